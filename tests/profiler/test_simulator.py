"""The Engine under virtual time: hand-worked traces, the proven ceiling of a wait, and what each policy is worth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.effects import Assigned, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    DeviceProfile,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PoolSpec,
)
from agent.core.policy import PRESETS
from experts.graph import ExpertGraph, RouteStep
from profiler.simulator import Arrival, Simulator

K_S, B_S, LOAD_S, MAX_BATCH, BOUND_S = 0.01, 0.02, 0.2, 4, 1.0


def build(policy, experts, capacity, executors=1, usage=None, max_overtake_s=BOUND_S):
    routes = {f"c{n}": (RouteStep(f"e{n}", frozenset({"ok"})),) for n in range(experts)}
    performance = Performance(K_S, B_S, MAX_BATCH, workspace_bytes=0)
    column = {f"e{n}": ExpertProfile(f"e{n}", performance, Footprint(1), {SSD: LOAD_S}) for n in range(experts)}
    specs = [ExecutorSpec(n, "cpu", "host") for n in range(executors)]
    profile = DeviceProfile({"cpu": column}, usage or dict.fromkeys(column, 1 / experts))
    limits = Limits((PoolSpec("host", capacity, 0),), max_overtake_s=max_overtake_s)
    engine = Engine(ExpertGraph(column, routes), profile, specs, PRESETS[policy], limits)
    return Simulator(engine, profile, specs, check_every_step=True)


def heavy_tailed(experts, requests, seed=1):
    """One request every 4 ms, components by log-normal quantities, as on the paper's boards."""
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, 2) for _ in range(experts)]
    drawn = rng.choices(range(experts), weights, k=requests)
    usage = {f"e{n}": weight / sum(weights) for n, weight in enumerate(weights)}
    return [Arrival(0.004 * n, f"c{component}") for n, component in enumerate(drawn)], usage


def test_a_hand_worked_trace():
    """One request: load 0.2 s, run 0.03 s. A second of the same expert at 0.1 s joins its batch: 0.01 s more."""
    trace = [Arrival(0.0, "c0"), Arrival(0.1, "c0")]
    simulation = build("samba", experts=2, capacity=1).run(trace)
    assert simulation.seconds == pytest.approx(0.2 + 0.04)
    assert [effect.batch.requests for _, effect in simulation.effects if isinstance(effect, StartBatch)] == [(0, 1)]


def test_prefetch_hides_a_load_behind_the_work_before_it():
    """e0: 0.2 + 0.06; e1 is loaded from 0.2 on and comes at 0.4, e0 is done at 0.26: the end is at 0.4 + 0.03."""
    trace = [Arrival(0.0, "c0")] * 4 + [Arrival(0.0, "c1")]
    assert build("coserve", experts=2, capacity=2).run(trace, warm_s=0.0).seconds == pytest.approx(0.43)


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_every_policy_answers_every_request(policy):
    trace, usage = heavy_tailed(experts=30, requests=300)
    simulation = build(policy, 30, capacity=8, executors=2, usage=usage).run(trace)
    assert simulation.outcomes.keys() == set(range(300))


def test_the_policies_stand_in_the_papers_order_by_switches_and_by_time():
    trace, usage = heavy_tailed(experts=60, requests=800)
    seconds, switches = {}, {}
    for policy in ("none", "em-ra", "paper", "coserve"):
        simulator = build(policy, 60, capacity=16, executors=2, usage=usage, max_overtake_s=5.0)
        seconds[policy] = simulator.run(trace).seconds
        switches[policy] = simulator.engine.statistics().switches
    assert seconds["none"] > seconds["em-ra"] > seconds["paper"] > seconds["coserve"]
    assert switches["none"] > switches["em-ra"] > switches["paper"]
    assert switches["coserve"] <= 1.1 * switches["paper"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0.0, 0.01, 0.2, 1.5])), min_size=1, max_size=80),
)
def test_every_wait_is_under_its_ceiling(experts, capacity, drawn):
    """One executor: whoever is queued at t waits at most the bound, plus a load, a batch and the batch that may run
    during that load, for each request queued before t + bound and not yet run at t, and for itself."""
    at_s, trace = 0.0, []
    for component, pause_s in drawn:
        at_s += pause_s
        trace.append(Arrival(at_s, f"c{component % experts}"))
    simulation = build("coserve", experts, capacity).run(trace, warm_s=0.0)
    queued = {effect.request: now for now, effect in simulation.effects if isinstance(effect, Assigned)}
    started = {
        request: now
        for now, effect in simulation.effects
        if isinstance(effect, StartBatch)
        for request in effect.batch.requests
    }
    batch_s = K_S * MAX_BATCH + B_S
    for request, since in queued.items():
        ahead = sum(1 for other in queued if queued[other] < since + BOUND_S and started[other] >= since)
        assert started[request] - since <= BOUND_S + (ahead + 2) * (LOAD_S * 2 + 2 * batch_s)


def test_the_same_trace_gives_the_same_effects():
    trace, usage = heavy_tailed(experts=20, requests=200)
    first, second = (build("coserve", 20, 6, executors=3, usage=usage).run(trace) for _ in range(2))
    assert first.effects == second.effects
    assert any(isinstance(effect, StartLoad) for _, effect in first.effects)


def test_a_head_that_waited_too_long_gets_through_a_busy_link_and_past_a_hot_expert():
    """Split memory: the CPU's loads keep the SSD busy, and a hot expert keeps the device's only room."""
    on_cpu = [f"x{number}" for number in range(40)]
    routes = {name: (RouteStep(name, frozenset({"ok"})),) for name in ["rare", "hot", *on_cpu]}
    performance = Performance(0.01, 0.01, 4, workspace_bytes=1)
    columns = {
        "gpu": {n: ExpertProfile(n, performance, Footprint(1), {SSD: 0.1, "host": 0.02}) for n in ("rare", "hot")},
        "cpu": {n: ExpertProfile(n, performance, Footprint(1), {SSD: 0.1}) for n in on_cpu},
    }
    profile = DeviceProfile(columns, dict.fromkeys(on_cpu, 0.02) | {"rare": 0.001, "hot": 0.2})
    executors = [ExecutorSpec(0, "gpu", "device"), ExecutorSpec(1, "cpu", "host")]
    pools = (PoolSpec("host", 6, 8), PoolSpec("device", 1, 8, cache="host"))
    engine = Engine(ExpertGraph(routes, routes), profile, executors, PRESETS["coserve"], Limits(pools, BOUND_S))
    trace = [Arrival(number / 12, on_cpu[number % 40]) for number in range(12 * 20)]
    trace += [Arrival(2.0 + number / 60, "hot") for number in range(60 * 18)]
    trace = sorted([*trace, Arrival(5.0, "rare")], key=lambda arrival: arrival.at_s)
    simulation = Simulator(engine, profile, executors).run(trace, warm_s=0.0)
    started = next(
        now for now, effect in simulation.effects if isinstance(effect, StartBatch) and effect.batch.expert == "rare"
    )
    assert started - 5.0 <= BOUND_S + 4 * 0.1 + performance.latency_s(4)  # loads under way, its own, a batch
