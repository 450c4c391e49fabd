"""What a line's shadows cost it, under virtual time: a late arrival waits for what had begun, and for no more."""

from __future__ import annotations

import random

import pytest

from agent.core.background import DROPPED
from agent.core.engine import Engine
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Footprint, Limits, Performance, PerformanceMatrix
from agent.core.performance import PoolSpec as Pool
from agent.core.policy import PRESETS
from experts.expert import Verdict
from experts.graph import ExpertGraph, RouteStep
from profiler.simulation.simulator import Simulator
from profiler.workload.traces import TracedArrival

K_S, B_S, LOAD_S = 0.01, 0.02, 0.2
LATE_S = K_S + B_S + LOAD_S  # one batch of one image, and one load, that were under way


def simulator(capacity, executors=1, policy="coserve"):
    """Eight experts; 0 and 1 have shadows."""
    names = [f"e{n}" for n in range(8)]
    shadows = {"e0": "new0", "e1": "new1"}
    performance = Performance(K_S, B_S, 4, workspace_bytes=0)
    column = {
        name: ExpertProfile(name, performance, Footprint(1), {SSD: LOAD_S}) for name in (*names, *shadows.values())
    }
    routes = {name: (RouteStep(name, frozenset({"ok"})),) for name in names}
    matrix = PerformanceMatrix({"cpu": column}, dict.fromkeys(names, 0.125))
    specs = [ExecutorSpec(number, "cpu", "host") for number in range(executors)]
    engine = Engine(
        ExpertGraph(column, routes, shadows), matrix, specs, PRESETS[policy], Limits((Pool("host", capacity, 0),))
    )
    return Simulator(engine, matrix, specs, check_every_step=True)


def arrivals(count, gap_s, seed):
    rng = random.Random(seed)
    return [TracedArrival(gap_s * number + 0.1 * rng.random(), f"e{rng.randrange(8)}") for number in range(count)]


def offers(count, gap_s, seed):
    rng = random.Random(seed)
    return [TracedArrival(gap_s * number * rng.random(), None, f"new{rng.randrange(2)}") for number in range(count)]


@pytest.mark.parametrize("capacity", [3, 9, 12])
@pytest.mark.parametrize("executors", [1, 2])
def test_a_line_with_time_to_spare_is_late_by_what_had_begun_at_most(capacity, executors):
    trace = arrivals(100, 0.6, seed=capacity)
    alone = simulator(capacity, executors).run(trace).waits_s(trace)
    beside = simulator(capacity, executors).run(trace, offers=offers(300, 0.6, seed=1))
    late_s = [after - before for before, after in zip(alone, beside.waits_s(trace), strict=True)]
    assert max(late_s) <= LATE_S + 1e-9
    ran = [number for number, outcome in beside.outcomes.items() if number >= len(trace) and outcome.steps]
    assert (len(ran) > 100) == (capacity > 8)  # where the line's own fill the memory, there is no room for a shadow
    assert all(beside.outcomes[number].verdict is Verdict.UNKNOWN for number in ran)


def test_a_line_without_time_to_spare_drops_what_its_shadows_were_asked_and_loses_nothing():
    trace = [TracedArrival(0.004 * number, f"e{number % 8}") for number in range(400)]
    asked = [TracedArrival(0.5 + 0.004 * number, None, "new0") for number in range(200)]
    alone, beside = simulator(12).run(trace), simulator(12).run(trace, offers=asked)
    assert beside.waits_s(trace) == alone.waits_s(trace)
    dropped = [each for each in beside.outcomes.values() if each.reason == DROPPED]
    assert len(dropped) == 200 - 64
    ran_s = [at_s for number, at_s in beside.finished_s.items() if beside.outcomes[number].reason != DROPPED]
    assert len(ran_s) == len(trace) + 64
