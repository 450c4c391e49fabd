"""Lines under virtual time: placed on several workers, and beside requests of idle precedence."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from agent.core.effects import StartLoad
from agent.core.engine import EngineSetup
from agent.core.events import Arrived, Loaded
from agent.core.performance import SSD, ExecutorSpec, Limits, Performance, PerformanceMatrix, PoolSpec
from agent.core.request import GAVE_WAY, Precedence
from agent.deployment.placement import place_experts
from experts.expert import Verdict
from profiler.simulation.simulator import Simulator
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import IMAGES, drawn, graph_of, row, setup_of

WORKERS, EXPERTS, REQUESTS, SEEDS = 3, 36, 300, range(4)
CLASSIFIER = Performance(0.005, 0.01, 8, 0)
DETECTOR = Performance(0.015, 0.01, 8, 0)
LINE_RATE_S, BURST_S = 0.006, 0.0
LOAD_S = 0.2
OFFERED = 10_000  # the first request of the source
LATE_S = IMAGES.latency_s(1) + LOAD_S  # one batch of one image, and one load, that were under way


def setup_with(fraction, seed):
    """Workers whose memories hold this fraction of all experts; every third route ends in a shared detector."""
    chains = {f"c{n}": [f"c{n}"] + [f"d{n % 2}"] * (n % 3 == 0) for n in range(EXPERTS)}
    _, shares = drawn(chains, 1, seed=seed, sigma=1.0)
    graph = graph_of(chains)
    rows = {name: row(name, DETECTOR if name[0] == "d" else CLASSIFIER, load_s=0.06) for name in graph.experts}
    room = round(len(rows) * fraction / WORKERS)
    pools = [PoolSpec(f"w{n}/host", room, 0, drive=f"w{n}/{SSD}") for n in range(WORKERS)]
    executors = [ExecutorSpec(number, "cpu", pool.name) for number, pool in enumerate(pools)]
    matrix = PerformanceMatrix({"cpu": rows}, graph.usage(shares, {}))
    placement = place_experts(graph, matrix, executors, pools)
    assert bool(placement.unplaced) == (fraction < 1)
    limits = Limits(tuple(pools), placement=placement.pools)
    return EngineSetup(graph, "coserve", tuple(executors), matrix, limits), chains


def played(setup, trace):
    """Switches, and images/s."""
    simulator = Simulator(setup)
    simulation = simulator.run(trace)
    return simulator.engine.statistics().switches, len(trace) / simulation.seconds


@pytest.mark.parametrize("every_s", [LINE_RATE_S, BURST_S], ids=["line", "burst"])
@pytest.mark.parametrize(
    "fraction", [0.7, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.4, 0.9, 1.1, 1.5))]
)
def test_placement_has_fewer_switches_and_is_no_slower(fraction, every_s):
    """Means of several lines: a burst's last requests end one line sooner, and another one later."""
    switches, rates = [], []
    for seed in SEEDS:
        setup, chains = setup_with(fraction, seed)
        trace, _ = drawn(chains, REQUESTS, every_s, seed=seed, sigma=1.0)
        without = replace(setup, limits=replace(setup.limits, placement={}))
        (placed, placed_per_s), (free, free_per_s) = played(setup, trace), played(without, trace)
        switches.append(placed - free)
        rates.append(placed_per_s / free_per_s)
    assert fmean(switches) <= 0
    assert fmean(rates) > 0.97
    if fraction > 1:
        assert placed == 0


def simulator(capacity, executors=1):
    """Eight experts; 0 and 1 have shadows."""
    names = [f"e{n}" for n in range(8)]
    graph = graph_of({name: [name] for name in names}, ["new0", "new1"], shadows={"e0": "new0", "e1": "new1"})
    rows = {name: row(name, load_s=LOAD_S) for name in graph.experts}
    usage = dict.fromkeys(names, 0.125)
    setup = setup_of(rows, ["cpu"] * executors, capacity, routes=graph, usage=usage)
    return IdleSource(setup, check_every_step=True)


class IdleSource(Simulator):
    """Offers to shadows, one at a time, whenever nothing of the line is under way."""

    def beside(self, trace, waiting):
        self.waiting, self.asked, self.open_loads, self.in_flight = list(waiting), {}, 0, set()
        return self.run(trace)

    def _handle(self, event, now):
        known = len(self._log)
        self.in_flight |= {event.request} if isinstance(event, Arrived) and event.request < OFFERED else set()
        super()._handle(event, now)
        self.open_loads += sum(isinstance(effect, StartLoad) for _, effect in self._log[known:])
        self.open_loads -= isinstance(event, Loaded)
        self.in_flight -= self._outcomes.keys()
        is_idle = self._outcomes and not (self.in_flight or self.open_loads or self._running)
        if is_idle and self.waiting and self.asked.keys() <= self._outcomes.keys():
            number = OFFERED + len(self.asked)
            self.asked[number] = self.waiting.pop()
            self._post(now, Arrived(number, expert=self.asked[number], precedence=Precedence.IDLE))


def arrivals(count, gap_s, seed):
    rng = random.Random(seed)
    return [TracedArrival(gap_s * number + 0.1 * rng.random(), f"e{rng.randrange(8)}") for number in range(count)]


@pytest.mark.parametrize("capacity", [3, 9, 12])
@pytest.mark.parametrize("executors", [1, 2])
def test_line_with_time_to_spare_is_late_by_the_begun_work_at_most(capacity, executors):
    trace, rng = arrivals(100, 0.6, seed=capacity), random.Random(1)
    offers = [f"new{rng.randrange(2)}" for _ in range(300)]
    alone = simulator(capacity, executors).beside(trace, ()).waits_s(trace)
    beside = simulator(capacity, executors).beside(trace, offers)
    late_s = [after - before for before, after in zip(alone, beside.waits_s(trace), strict=True)]
    assert max(late_s) <= LATE_S + 1e-9
    ran = [number for number, outcome in beside.outcomes.items() if number >= OFFERED and outcome.steps]
    assert (len(ran) > 100) == (capacity > 8)  # a memory that the line's own fill has no room for a shadow
    assert all(beside.outcomes[number].verdict is Verdict.UNKNOWN for number in ran)


def test_line_without_time_to_spare_is_not_delayed():
    trace = [TracedArrival(0.004 * number, f"e{number % 8}") for number in range(400)]
    alone, beside = simulator(12).beside(trace, ()), simulator(12).beside(trace, ["new0"] * 200)
    assert beside.waits_s(trace) == pytest.approx(alone.waits_s(trace), abs=LATE_S)
    gave_way = [outcome for outcome in beside.outcomes.values() if outcome.reason == GAVE_WAY]
    assert len(gave_way) <= 1
