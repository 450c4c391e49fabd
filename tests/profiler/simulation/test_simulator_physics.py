"""Loads that share a wire and batches that share a processor, against traces worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.effects import StartLoad
from agent.core.engine import Engine
from agent.core.events import Finished
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
from experts.graph import ExpertGraph, RouteStep
from profiler.simulation.simulator import SharedProcessor, Simulator
from profiler.workload.traces import TracedArrival

OK = frozenset({"ok"})


def line(policy, experts, executors, physics, *, capacity=8, loads_in_flight=8):
    """Experts of 100 bytes that load in 0.25 s; a batch of n takes 0.1 n + 0.2 s, four images at most."""
    routes = {f"c{n}": (RouteStep(f"e{n}", OK),) for n in range(experts)}
    performance = Performance(0.1, 0.2, 4, workspace_bytes=0)
    column = {f"e{n}": ExpertProfile(f"e{n}", performance, Footprint(100), {SSD: 0.25}) for n in range(experts)}
    specs = [ExecutorSpec(n, "gpu", "host") for n in range(executors)]
    profile = PerformanceMatrix({"gpu": column}, {f"e{n}": 1 / (n + 2) for n in range(experts)})
    limits = Limits((PoolSpec("host", 100 * capacity, 0),), loads_in_flight=loads_in_flight)
    engine = Engine(ExpertGraph(column, routes), profile, specs, PRESETS[policy], limits)
    return Simulator(engine, profile, specs, check_every_step=True, **physics)


def test_two_batches_that_start_together_share_the_processor():
    """Each alone takes 0.3 s; together they are 1.5 times as fast as one: 0.6 s of work takes 0.4 s."""
    simulation = line("paper", 2, 2, {"speedups": {"gpu": (1.0, 1.5)}}).run(
        [TracedArrival(0.0, "c0"), TracedArrival(0.0, "c1")]
    )
    assert simulation.finished_s == pytest.approx({0: 0.4, 1: 0.4})


def test_a_batch_slows_down_when_another_starts_and_speeds_up_when_that_ends():
    """e0 runs alone until 0.1 and has 0.2 s of work left, at 3/4 of its speed: until 0.1 + 0.2 / 0.75.

    By then e1 has done 0.2 of its 0.3 s; the rest it does alone.
    """
    simulator = line("paper", 2, 2, {"speedups": {"gpu": (1.0, 1.5)}})
    trace = [TracedArrival(0.0, "c0"), TracedArrival(0.1, "c1")]
    simulation = simulator.run(trace)
    first_s = 0.1 + 0.2 / 0.75
    assert simulation.finished_s == pytest.approx({0: first_s, 1: first_s + 0.1})
    assert simulation.waits_s(trace) == pytest.approx((first_s, first_s))
    assert simulation.seconds == pytest.approx(first_s + 0.1)


def test_beyond_the_measured_speedups_the_last_one_counts():
    """Three at once, no faster together than two: 0.9 s of work at 1.5 times the speed."""
    trace = [TracedArrival(0.0, f"c{n}") for n in range(3)]
    simulation = line("paper", 3, 3, {"speedups": {"gpu": (1.0, 1.5)}}).run(trace)
    assert simulation.finished_s == pytest.approx(dict.fromkeys(range(3), 0.6))


@pytest.mark.parametrize("physics", [{}, {"speedups": {"cpu": (1.0,)}}], ids=["nothing given", "another processor"])
def test_without_speedups_batches_do_not_feel_one_another(physics):
    simulation = line("paper", 2, 2, physics).run([TracedArrival(0.0, "c0"), TracedArrival(0.1, "c1")])
    assert simulation.finished_s == pytest.approx({0: 0.3, 1: 0.4})


@pytest.mark.parametrize(
    ("physics", "ends_s"),
    [
        ({}, (0.25, 0.5)),  # one load after another, each for its profiled time
        ({"link_bytes_per_s": {SSD: 1000.0}}, (0.25, 0.25)),  # the wire is free after 0.1 and 0.2 s
        ({"link_bytes_per_s": {SSD: 400.0}}, (0.25, 0.5)),  # 0.25 s on the wire, one after another
        ({"link_bytes_per_s": {SSD: 200.0}}, (0.5, 1.0)),  # the wire is slower than the framework
        ({"link_bytes_per_s": {"host": 200.0}}, (0.25, 0.5)),  # another link's business
    ],
    ids=["no bandwidth", "wide", "as wide as needed", "narrow", "another"],
)
def test_loads_that_overlap_share_their_wire(physics, ends_s):
    """Two executors each wait for an expert, both loads start at once; then each batch takes 0.3 s."""
    simulator = line("samba-parallel", 2, 2, physics)
    simulation = simulator.run([TracedArrival(0.0, "c0"), TracedArrival(0.0, "c1")])
    assert [now for now, effect in simulation.effects if isinstance(effect, StartLoad)] == [0.0, 0.0]
    assert simulation.finished_s == pytest.approx({0: ends_s[0] + 0.3, 1: ends_s[1] + 0.3})


def test_a_load_that_starts_later_waits_for_the_wire_and_for_its_own_framework():
    """At 400 bytes/s: the first load is there at 0.25. The second starts at 0.2, has the wire from 0.25 to 0.5."""
    simulator = line("samba-parallel", 2, 2, {"link_bytes_per_s": {SSD: 400.0}})
    simulation = simulator.run([TracedArrival(0.0, "c0"), TracedArrival(0.2, "c1")])
    assert simulation.finished_s == pytest.approx({0: 0.25 + 0.3, 1: 0.5 + 0.3})


def split(policy, host_bytes, *, with_cpu):
    """A device with a cache in front: SSD to device 0.9 s, SSD to host 0.6 s, host to device 0.25 s."""
    performance = Performance(0.1, 0.2, 4, workspace_bytes=0)
    columns = {"gpu": {"e0": ExpertProfile("e0", performance, Footprint(100), {SSD: 0.9, "host": 0.25})}}
    if with_cpu:
        columns["cpu"] = {"e0": ExpertProfile("e0", performance, Footprint(100), {SSD: 0.6})}
    profile = PerformanceMatrix(columns)
    pools = (PoolSpec("host", host_bytes, 0), PoolSpec("device", 100, 0, cache="host"))
    executors = [ExecutorSpec(0, "gpu", "device")]
    graph = ExpertGraph(["e0"], {"c0": (RouteStep("e0", OK),)})
    engine = Engine(graph, profile, executors, PRESETS[policy], Limits(pools))
    return Simulator(engine, profile, executors, check_every_step=True)


@pytest.mark.parametrize(
    ("host_bytes", "with_cpu", "load_s"),
    [(100, True, 0.6 + 0.25), (0, True, 0.9), (100, False, 0.9 + 0.25)],
    ids=["over the host", "past a host that is full", "over a host of which nothing else is known"],
)
def test_a_load_takes_what_the_memory_that_it_goes_to_says(host_bytes, with_cpu, load_s):
    simulation = split("samba", host_bytes, with_cpu=with_cpu).run([TracedArrival(0.0, "c0")])
    assert simulation.finished_s == pytest.approx({0: load_s + 0.3})


def test_times_count_from_the_start_of_the_trace_not_of_the_placement():
    """Two experts are placed in 0.25 s each; then the first request runs at once."""
    simulation = line("paper", 2, 1, {}).run([TracedArrival(1.0, "c0")])
    assert simulation.seconds == pytest.approx(1.3)
    assert simulation.finished_s == pytest.approx({0: 1.3})


def test_a_trace_may_start_while_experts_are_being_placed():
    """At 0.3 the first expert is there; the second one comes at 0.5, 0.2 s after the trace's start."""
    simulation = line("paper", 2, 1, {}).run([TracedArrival(0.0, "c1")], warm_s=0.3)
    assert simulation.finished_s == pytest.approx({0: 0.2 + 0.3})


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12))
def test_sharing_neither_makes_nor_loses_work(works_s):
    """At a speedup of 1, whoever starts at 0 together is done when all the work is; less work ends sooner."""
    shared = SharedProcessor((1.0,))
    for number, work_s in enumerate(works_s):
        shared.start(0.0, work_s, Finished(number, ()))
    ends = []
    while shared.next_end_s() < math.inf:
        at_s = shared.next_end_s()
        ends.append((at_s, shared.end_next().batch))
    assert ends[-1][0] == pytest.approx(sum(works_s))
    assert [works_s[batch] for _, batch in ends] == sorted(works_s)
    assert [at_s for at_s, _ in ends] == sorted(at_s for at_s, _ in ends)


@pytest.mark.parametrize("speedups", [(), (1.0, 0.0), (-1.0,)])
def test_speedups_that_stop_the_clock_are_refused(speedups):
    with pytest.raises(ValueError, match="speedups"):
        line("paper", 1, 1, {"speedups": {"gpu": speedups}})


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(ValueError, match="ssd"):
        line("paper", 1, 1, {"link_bytes_per_s": {SSD: 0.0}})
