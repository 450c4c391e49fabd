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
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
    PreparedForm,
)
from agent.core.policy import PRESETS
from experts.graph import ExpertGraph, RouteStep
from profiler.simulation.simulator import Simulator
from profiler.workload.traces import TracedArrival

K_S, B_S, LOAD_S, MAX_BATCH, BOUND_S = 0.01, 0.02, 0.2, 4, 1.0


def build(policy, experts, capacity, executors=1, usage=None, max_overtake_s=BOUND_S, form=None, speedups=None):
    routes = {f"c{n}": (RouteStep(f"e{n}", frozenset({"ok"})),) for n in range(experts)}
    performance = Performance(K_S, B_S, MAX_BATCH, workspace_bytes=0)
    column = {
        f"e{n}": ExpertProfile(f"e{n}", performance, Footprint(1), {SSD: LOAD_S}, prepared=form) for n in range(experts)
    }
    specs = [ExecutorSpec(n, "cpu", "host") for n in range(executors)]
    profile = PerformanceMatrix({"cpu": column}, usage or dict.fromkeys(column, 1 / experts))
    prepared_bytes = 0 if form is None else 1000
    limits = Limits((PoolSpec("host", capacity, 0),), max_overtake_s=max_overtake_s, prepared_bytes=prepared_bytes)
    engine = Engine(ExpertGraph(column, routes), profile, specs, PRESETS[policy], limits)
    return Simulator(engine, profile, specs, speedups=speedups, check_every_step=True)


def heavy_tailed(experts, requests, seed=1):
    """One request every 4 ms, components by log-normal quantities, as on the paper's boards."""
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, 2) for _ in range(experts)]
    drawn = rng.choices(range(experts), weights, k=requests)
    usage = {f"e{n}": weight / sum(weights) for n, weight in enumerate(weights)}
    return [TracedArrival(0.004 * n, f"c{component}") for n, component in enumerate(drawn)], usage


def test_a_hand_worked_trace():
    """One request: load 0.2 s, run 0.03 s. A second of the same expert at 0.1 s joins its batch: 0.01 s more."""
    trace = [TracedArrival(0.0, "c0"), TracedArrival(0.1, "c0")]
    simulation = build("samba", experts=2, capacity=1).run(trace)
    assert simulation.seconds == pytest.approx(0.2 + 0.04)
    assert [effect.batch.requests for _, effect in simulation.effects if isinstance(effect, StartBatch)] == [(0, 1)]


def test_prefetch_hides_a_load_behind_the_work_before_it():
    """e0: 0.2 + 0.06; e1 is loaded from 0.2 on and comes at 0.4, e0 is done at 0.26: the end is at 0.4 + 0.03."""
    trace = [TracedArrival(0.0, "c0")] * 4 + [TracedArrival(0.0, "c1")]
    assert build("coserve", experts=2, capacity=2).run(trace, warm_s=0.0).seconds == pytest.approx(0.43)


@pytest.mark.parametrize("speedups", [None, {"cpu": (1.0,)}])
def test_a_batch_that_is_held_begins_when_the_one_before_it_ends(speedups):
    """Three full batches of one expert: 0.2 s to load, and 0.06 s each, one after another."""
    simulator = build("coserve", experts=1, capacity=1, form=PreparedForm("small", 1), speedups=speedups)
    simulation = simulator.run([TracedArrival(0.0, "c0")] * 12, warm_s=0.0)
    given_s = [at_s for at_s, effect in simulation.effects if isinstance(effect, StartBatch)]
    assert given_s == pytest.approx([0.2, 0.2, 0.26])
    assert sorted(set(simulation.finished_s.values())) == pytest.approx([0.26, 0.32, 0.38])


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
        trace.append(TracedArrival(at_s, f"c{component % experts}"))
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


LINE_BOUND_S = 0.3
FULL_S = K_S + B_S / MAX_BATCH  # between two requests that keep one executor busy in full batches
LINES = ({"cpu": "host"}, {"cpu": "host", "gpu": "host"}, {"cpu": "host", "gpu": "device"})


@st.composite
def lines(draw):
    """A few experts on several executors, memories that hold one to three of them, slow or quick links, and streams
    of requests that may keep an expert at work for as long as the trace lasts."""
    memories = draw(st.sampled_from(LINES))
    experts = [f"e{number}" for number in range(draw(st.integers(2, 6)))]
    ssd_s, host_s = draw(st.sampled_from([0.05, 0.2])), draw(st.sampled_from([0.02, 0.15]))
    columns: dict[str, dict[str, ExpertProfile]] = {processor: {} for processor in memories}
    for expert in experts:
        for processor in draw(st.sampled_from([tuple(memories), *((each,) for each in memories)])):
            load_s = {SSD: ssd_s, "host": host_s} if processor == "gpu" else {SSD: ssd_s}
            columns[processor][expert] = ExpertProfile(
                expert, Performance(K_S, B_S, MAX_BATCH, workspace_bytes=0), Footprint(1), load_s
            )
    more = draw(st.lists(st.sampled_from(sorted(memories)), min_size=1, max_size=2))
    executors = [ExecutorSpec(n, processor, memories[processor]) for n, processor in enumerate([*memories, *more])]
    pools = tuple(
        PoolSpec(name, draw(st.integers(1, 3)), 0, cache="host" if name == "device" else None)
        for name in dict.fromkeys(memories.values())
    )
    limits = Limits(pools, LINE_BOUND_S, loads_in_flight=draw(st.integers(1, 2)))
    profile = PerformanceMatrix(columns, {expert: draw(st.sampled_from([0.1, 0.5, 0.9])) for expert in experts})
    graph = ExpertGraph(experts, {expert: (RouteStep(expert, frozenset({"ok"})),) for expert in experts})
    engine = Engine(graph, profile, executors, PRESETS["coserve"], limits)
    step_s = 2 * (ssd_s + host_s) + 2 * (K_S * MAX_BATCH + B_S)  # two loads share a link; two batches in their way
    return Simulator(engine, profile, executors), draw(streams(experts)), step_s


@st.composite
def streams(draw, experts):
    arrivals = []
    for _ in range(draw(st.integers(2, 5))):
        expert, start_s = draw(st.sampled_from(experts)), draw(st.sampled_from([0.0, 0.01, 0.5, 1.5]))
        count, period_s = draw(st.sampled_from([1, 60, 600])), draw(st.sampled_from([FULL_S / 2, FULL_S, 0.02, 0.05]))
        burst = draw(st.sampled_from([0, 2 * MAX_BATCH]))  # on top of what executors can just keep up with: it stays
        arrivals += [TracedArrival(start_s + max(number - burst, 0) * period_s, expert) for number in range(count)]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def assert_waits_under_their_ceiling(simulation, step_s):
    """Whoever is queued at t waits at most the bound, plus ``step_s`` for its own batch, for one that was about to
    start, and for each batch that holds a request queued before t + bound."""
    queued = {effect.request: now for now, effect in simulation.effects if isinstance(effect, Assigned)}
    batches = [(now, effect.batch) for now, effect in simulation.effects if isinstance(effect, StartBatch)]
    oldest_s = {batch.id: min(queued[request] for request in batch.requests) for _, batch in batches}
    for started_s, batch in batches:
        since = oldest_s[batch.id]
        if started_s - since > LINE_BOUND_S:
            between = (each for now, each in batches if since <= now <= started_s)
            ahead = sum(1 for each in between if oldest_s[each.id] < since + LINE_BOUND_S)
            assert started_s - since <= LINE_BOUND_S + (ahead + 2) * step_s, batch


@settings(max_examples=60, deadline=None)
@given(lines())
def test_every_wait_is_under_its_ceiling_on_several_executors_too(line):
    simulator, trace, step_s = line
    assert_waits_under_their_ceiling(simulator.run(trace, warm_s=0.0), step_s)


def several(columns, executors, capacity=1):
    """A memory for ``capacity`` experts under executors that can run what ``columns`` names."""
    performance = Performance(K_S, B_S, MAX_BATCH, workspace_bytes=0)
    rows = {
        processor: {name: ExpertProfile(name, performance, Footprint(1), {SSD: 0.05}) for name in names}
        for processor, names in columns.items()
    }
    names = sorted(set().union(*columns.values()))
    profile = PerformanceMatrix(rows, dict.fromkeys(names, 0.5))
    specs = [ExecutorSpec(number, processor, "host") for number, processor in enumerate(executors)]
    graph = ExpertGraph(names, {name: (RouteStep(name, frozenset({"ok"})),) for name in names})
    limits = Limits((PoolSpec("host", capacity, 0),), LINE_BOUND_S)
    return Simulator(Engine(graph, profile, specs, PRESETS["coserve"], limits), profile, specs)


@pytest.mark.parametrize(
    ("executors", "streamed"),
    [
        pytest.param(("a", "b"), 1, id="a group that is never empty"),
        pytest.param(("a", "a", "b"), 2, id="two executors that take turns on one copy"),
    ],
)
def test_a_hot_expert_does_not_keep_another_executors_expert_out_of_a_small_memory(executors, streamed):
    """The hot one's executors have always work, so that its copy would never be free but for the bound."""
    burst = 2 * MAX_BATCH * streamed
    hot = [TracedArrival(FULL_S / streamed * max(number - burst, 0), "hot") for number in range(600 * streamed)]
    trace = sorted([*hot, TracedArrival(1.0, "rare")], key=lambda arrival: arrival.at_s)
    simulation = several({"a": ["hot"], "b": ["rare"]}, executors).run(trace, warm_s=0.0)
    assert simulation.waits_s(trace)[trace.index(TracedArrival(1.0, "rare"))] <= LINE_BOUND_S + 0.5
    assert_waits_under_their_ceiling(simulation, 2 * 0.05 + 2 * (K_S * MAX_BATCH + B_S))


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
    profile = PerformanceMatrix(columns, dict.fromkeys(on_cpu, 0.02) | {"rare": 0.001, "hot": 0.2})
    executors = [ExecutorSpec(0, "gpu", "device"), ExecutorSpec(1, "cpu", "host")]
    pools = (PoolSpec("host", 6, 8), PoolSpec("device", 1, 8, cache="host"))
    engine = Engine(ExpertGraph(routes, routes), profile, executors, PRESETS["coserve"], Limits(pools, BOUND_S))
    trace = [TracedArrival(number / 12, on_cpu[number % 40]) for number in range(12 * 20)]
    trace += [TracedArrival(2.0 + number / 60, "hot") for number in range(60 * 18)]
    trace = sorted([*trace, TracedArrival(5.0, "rare")], key=lambda arrival: arrival.at_s)
    simulation = Simulator(engine, profile, executors).run(trace, warm_s=0.0)
    started = next(
        now for now, effect in simulation.effects if isinstance(effect, StartBatch) and effect.batch.expert == "rare"
    )
    assert started - 5.0 <= BOUND_S + 4 * 0.1 + performance.latency_s(4)  # loads under way, its own, a batch
