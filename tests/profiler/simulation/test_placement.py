"""Lines on several workers with the placement of a plan, and without one: switches and images/s, simulated."""

from dataclasses import replace
from statistics import fmean

import pytest

from agent.core.engine import EngineSetup
from agent.core.performance import SSD, ExecutorSpec, Limits, Performance, PerformanceMatrix, PoolSpec
from agent.deployment.placement import place_experts
from profiler.simulation.simulator import Simulator
from tests.profiler.lines import drawn, graph_of, row

WORKERS, EXPERTS, REQUESTS, SEEDS = 3, 36, 300, range(4)
CLASSIFIER = Performance(0.005, 0.01, 8, 0)
DETECTOR = Performance(0.015, 0.01, 8, 0)
LINE_RATE_S, BURST_S = 0.006, 0.0


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
def test_a_placement_has_fewer_switches_and_is_no_slower_than_none(fraction, every_s):
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
