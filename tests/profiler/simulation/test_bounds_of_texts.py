"""The bounds of mixed lines: known cases by hand, and no policy, whatever comes, is below one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
)
from agent.core.policy import PRESETS
from agent.core.request import IMAGE, Work
from experts.graph import ExpertGraph, RouteStep
from profiler.simulation.bounds import RequestSteps, Resources, arrivals_s, bounds, compute_s, tokens_of
from profiler.simulation.simulator import Simulator
from profiler.workload.traces import TracedArrival

IMAGES = Performance(K_s=0.01, B_s=0.02, max_batch=4, workspace_bytes=0)
TEXTS = Performance(0.001, 0.004, 4, 0, K_prompt_s=0.0005, K_output_s=0.003, lease_bytes=1)
FASTER = Performance(0.001, 0.004, 4, 0, K_prompt_s=0.0001, K_output_s=0.002, lease_bytes=1)


def resources(*columns, leases=10_000):
    pools = (PoolSpec("host", 100, 0, lease_bytes=leases),)
    rows = {
        f"p{number}": {
            name: ExpertProfile(name, performance, Footprint(1), {SSD: 0.1}) for name, performance in column.items()
        }
        for number, column in enumerate(columns)
    }
    executors = tuple(ExecutorSpec(number, processor, "host") for number, processor in enumerate(rows))
    return Resources(executors, pools, PerformanceMatrix(rows, {"i": 0.5, "t": 0.5}), 10.0, {})


def test_tokens_of_all_requests_are_added_up():
    requests = [RequestSteps(0.0, ("r", "t"), Work(3, 4, 7)), RequestSteps(0.0, ("t",), Work(1, 2, 3))]
    assert tokens_of([*requests, RequestSteps(0.0, ("i",))]) == {"r": Work(3, 4), "t": Work(4, 6)}


def test_tokens_take_their_time_beside_batches():
    plant = resources({"t": TEXTS})
    assert compute_s({"t": 5}, plant, {"t": Work(100, 20)}) == pytest.approx(5 * 0.001 + 2 * 0.004 + 0.05 + 0.06)
    assert compute_s({"t": 5}, plant) == pytest.approx(0.013)


def test_two_processors_share_tokens():
    plant = resources({"t": TEXTS}, {"t": TEXTS})
    assert compute_s({"t": 1}, plant, {"t": Work(0, 1000)}) == pytest.approx(1.5, rel=0.01)


def test_a_text_alone_takes_its_tokens_where_they_are_fastest():
    request = RequestSteps(2.0, ("t",), Work(10, 100, 110))
    assert arrivals_s([request], resources({"t": TEXTS}, {"t": FASTER})) == pytest.approx(2.0 + 0.005 + 0.001 + 0.2)


WORK = st.one_of(
    st.none(), st.builds(lambda read, write: Work(read, write, read + write), st.integers(1, 40), st.integers(0, 60))
)
ROUTES = {"image": ("i",), "asked": ("t",), "routed": ("r", "t")}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["coserve", "paper", "samba", "none"]),
    st.lists(st.tuples(WORK, st.booleans(), st.sampled_from([0.0, 0.05, 1.0])), min_size=1, max_size=15),
    st.integers(100, 400),
    st.booleans(),
)
def test_no_policy_beats_the_bounds(policy, drawn, leases, has_two):
    column = {"i": IMAGES, "t": TEXTS, "r": TEXTS}
    plant = resources(*[column] * (2 if has_two else 1), leases=leases)
    times = itertools.accumulate(pause_s for _, _, pause_s in drawn)
    trace = [
        TracedArrival(at_s, "image" if work is None else "routed" if routed else "asked", work=work or IMAGE)
        for at_s, (work, routed, _) in zip(times, drawn, strict=True)
    ]
    steps = {
        "image": (RouteStep("i", frozenset({"ok"})),),
        "asked": (RouteStep("t", frozenset({"ok"})),),
        "routed": (RouteStep("r", frozenset(), then={"ok": "t"}),),
    }
    engine = Engine(
        ExpertGraph(column, steps), plant.profile, plant.executors, PRESETS[policy], Limits(plant.pools, quantum_s=0.02)
    )
    simulation = Simulator(engine, plant.profile, plant.executors).run(trace)
    found = bounds([RequestSteps(each.at_s, ROUTES[each.component], each.work) for each in trace], plant)
    assert found.seconds <= max(simulation.finished_s.values()) + 1e-9
