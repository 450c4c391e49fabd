"""A box that has time reads no more from its SSD than the paper's policy does, and its requests wait less."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from agent.core.effects import StartLoad
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
from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep
from profiler.simulation.simulator import Simulator
from profiler.workload.traces import TracedArrival

OK = frozenset({"ok"})
CLASSIFIERS, DETECTORS, IMAGES = 31, 2, 60  # images: of one board, about
TAKT_S = 60.0
SEEDS = range(5)


@dataclass(frozen=True)
class Result:
    loads: int  # after the initial placement
    mean_wait_s: float
    seconds: float
    switches: int


@dataclass(frozen=True)
class Line:
    """Small classifiers with log-normal quantities on a board, two detectors behind a third of them, a third fits."""

    seed: int
    executors: int
    k_s: float

    def run(self, policy, boards, image_interval_s, takt_s=TAKT_S, **limited):
        rng = random.Random(self.seed)
        classifiers = [f"cls/{number:02}" for number in range(CLASSIFIERS)]
        routes = {
            name: (RouteStep(name, OK), RouteStep(f"det/{number % DETECTORS}", OK))[: 2 if number % 3 == 0 else 1]
            for number, name in enumerate(classifiers)
        }
        weights = [rng.lognormvariate(0, 1.2) for _ in routes]
        quantities = {name: max(1, round(IMAGES * w / sum(weights))) for name, w in zip(routes, weights, strict=True)}
        usage: dict[str, float] = {}
        for name, steps in routes.items():
            for step in steps:
                usage[step.expert] = usage.get(step.expert, 0.0) + quantities[name] / sum(quantities.values())
        column = {name: self._row(name, rng.choice([22, 22, 45])) for name in sorted(usage)}
        profile = PerformanceMatrix({"cpu": column}, usage)
        specs = [ExecutorSpec(number, "cpu", "host") for number in range(self.executors)]
        room = sum(row.footprint.own_bytes for row in column.values()) // 3
        limits = Limits((PoolSpec("host", room, 0),), **limited)
        engine = Engine(ExpertGraph(sorted(usage), routes), profile, specs, PRESETS[policy], limits)
        trace = []
        for board in range(boards):
            images = [name for name, quantity in quantities.items() for _ in range(quantity)]
            rng.shuffle(images)
            trace += [TracedArrival(board * takt_s + n * image_interval_s, name) for n, name in enumerate(images)]
        trace.sort(key=lambda arrival: arrival.at_s)
        seen = [Prediction("ok" if rng.random() < 0.95 else "bad", 1.0) for _ in trace]
        simulation = Simulator(engine, profile, specs, lambda request, expert: seen[request]).run(trace)
        loads = [
            at_s for at_s, each in simulation.effects if isinstance(each, StartLoad) and at_s >= simulation.started_s
        ]
        waits_s = simulation.waits_s(trace)
        return Result(len(loads), sum(waits_s) / len(waits_s), simulation.seconds, engine.statistics().switches)

    def _row(self, name, size):
        k_s = self.k_s * (4 if name.startswith("det") else 1)
        return ExpertProfile(name, Performance(k_s, 0.7 * self.k_s, 8, 0), Footprint(size), {SSD: self.k_s * size / 12})


@pytest.mark.parametrize("executors", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_boards_at_takt_pace_take_no_more_loads_than_the_papers_policy_and_wait_less(seed, executors):
    """A board's images come 4 ms apart, a board a minute: an image a second, and nothing to do in between."""
    line = Line(seed, executors, k_s=0.005)
    ours, paper = (line.run(policy, boards=6, image_interval_s=0.004) for policy in ("coserve", "paper"))
    assert ours.loads <= paper.loads
    assert ours.mean_wait_s < 0.9 * paper.mean_wait_s


@pytest.mark.parametrize("k_s", [0.03, 0.1])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_image_a_second_takes_no_more_loads_than_the_papers_policy(seed, k_s):
    line = Line(seed, 1, k_s)
    ours, paper = (line.run(policy, boards=4, image_interval_s=1.0) for policy in ("coserve", "paper"))
    # a detector that was guessed, into free room, before an image was NG; and room that was taken, once in 120 loads,
    # from what usage is wrong about so far, rather than waited for
    assert ours.loads <= paper.loads + 2
    assert ours.mean_wait_s <= paper.mean_wait_s


@pytest.mark.parametrize("max_overtake_s", [5.0, 86_400.0])
@pytest.mark.parametrize("image_interval_s", [0.0, 0.004])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_queue_is_run_in_order_with_its_loads_hidden_however_late_a_request_may_be(
    seed, image_interval_s, max_overtake_s
):
    line = Line(seed, 1, k_s=0.03)
    takt_s = IMAGES * image_interval_s
    ours, paper = (
        line.run(policy, 8, image_interval_s, takt_s, max_overtake_s=max_overtake_s) for policy in ("coserve", "paper")
    )
    assert ours.seconds < paper.seconds
    assert ours.switches <= 6 < paper.switches


def test_usage_that_is_wrong_costs_no_load_an_image():
    """Two experts alternate that hardly anybody was expected to ask for; the expected one lies there, never asked."""
    usage = {"expected": 0.8, "one": 0.1, "other": 0.1}
    column = {name: ExpertProfile(name, Performance(0.1, 0.0, 8, 0), Footprint(10), {SSD: 0.3}) for name in usage}
    graph = ExpertGraph(list(usage), {name: (RouteStep(name, frozenset({"ok"})),) for name in usage})
    profile, specs = PerformanceMatrix({"cpu": column}, usage), [ExecutorSpec(0, "cpu", "host")]
    engine = Engine(graph, profile, specs, PRESETS["coserve"], Limits((PoolSpec("host", 20, 0),)))
    Simulator(engine, profile, specs).run(
        [TracedArrival(0.2 * number, ("one", "other")[number % 2]) for number in range(200)]
    )
    assert sum(engine.statistics().loads.values()) <= 6
