"""Playing back what was decided: the same batches and moves in the same order, under virtual time and on the engine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import read_line
from agent.core.effects import Complete, Evict, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.events import Arrived, BatchFailed, Finished, Loaded, LoadFailed, Started
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
from agent.runtime.loop import LoopOptions
from experts.errors import ConfigError
from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep
from profiler.bench.policy_runs import RunOptions
from profiler.simulation.simulator import Simulator, always_passes
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.traces import TracedArrival, read_trace
from proof.scheduling.cost import SchedulingCost, measure_scheduling, run_and_play_back
from proof.scheduling.playback import Playback, Recorder

OK = frozenset({"ok"})
ON_CPU = {"COSERVE__DEVICE": "cpu"}  # the environment


def routes_of(experts):
    """Every third component goes on to the last expert."""
    last = RouteStep(f"e{experts - 1}", OK)
    routes = {}
    for number in range(experts):
        first = RouteStep(f"e{number}", OK)
        routes[f"c{number}"] = (first, last) if number % 3 == 0 and number != experts - 1 else (first,)
    return routes


def unified(experts, capacity, executors):
    """One memory, several CPU executors."""
    column = {
        f"e{n}": ExpertProfile(f"e{n}", Performance(0.01, 0.02, 4, 0), Footprint(1), {SSD: 0.2}) for n in range(experts)
    }
    specs = [ExecutorSpec(n, "cpu", "host") for n in range(executors)]
    return PerformanceMatrix({"cpu": column}, {}), specs, Limits((PoolSpec("host", capacity, 0),), max_overtake_s=1.0)


def split(experts, capacity, executors):
    """A device behind a cache in host memory, from which one CPU executor runs as well."""
    fast, slow = Performance(0.01, 0.02, 4, 0), Performance(0.05, 0.05, 4, 0)
    columns = {
        "gpu": {f"e{n}": ExpertProfile(f"e{n}", fast, Footprint(1), {SSD: 0.2, "host": 0.05}) for n in range(experts)},
        "cpu": {f"e{n}": ExpertProfile(f"e{n}", slow, Footprint(1), {SSD: 0.2}) for n in range(experts)},
    }
    specs = [ExecutorSpec(n, "gpu", "device") for n in range(executors)] + [ExecutorSpec(executors, "cpu", "host")]
    pools = (PoolSpec("host", 2 * capacity, 0), PoolSpec("device", capacity, 0, cache="host"))
    return PerformanceMatrix(columns, {}), specs, Limits(pools, max_overtake_s=1.0)


class Stage:
    """A line under virtual time, whose Engine is recorded and then played back."""

    def __init__(self, box, policy, trace, experts):
        self.profile, self.specs, self.limits = box
        self.memories = {spec.id: spec.pool for spec in self.specs}
        self.trace = trace
        self.graph = ExpertGraph([f"e{n}" for n in range(experts)], routes_of(experts))
        self.engine = Engine(self.graph, self.profile, self.specs, PRESETS[policy], self.limits)

    def run(self, decider):
        """What the simulator makes of the trace with this decider."""
        simulator = Simulator(decider, self.profile, self.specs, always_passes, check_every_step=True)
        return simulator.run(self.trace)

    def recorded(self):
        recorder = Recorder(self.engine, self.memories)
        return self.run(recorder), recorder.recording()

    def played_back(self, recording):
        """The simulation, the playback itself, and the recording of it."""
        playback = Playback(recording, self.memories)
        again = Recorder(Watched(playback, self.memories), self.memories)
        return self.run(again), playback, again.recording()


class Watched:
    """A Decider whose effects are checked against what a workshop could carry out."""

    def __init__(self, decider, memories):
        self._decider = decider
        self._memories = memories
        self._loads, self._running = {}, {}
        self._resident, self._here = set(), set()
        self.next_wakeup_s = decider.next_wakeup_s
        self.statistics = decider.statistics
        self.check_invariants = decider.check_invariants

    def handle(self, event, now):
        if isinstance(event, Arrived):
            self._here.add(event.request)
        elif isinstance(event, Loaded):
            load = self._loads.pop(event.load)
            self._resident.add((load.pool, load.copy))
        elif isinstance(event, Finished):
            del self._running[next(number for number, batch in self._running.items() if batch.id == event.batch)]
        effects = self._decider.handle(event, now)
        for effect in effects:
            self._check(effect)
        return effects

    def _check(self, effect):
        if isinstance(effect, StartBatch):
            batch = effect.batch
            assert (self._memories[batch.executor], batch.copy) in self._resident
            assert batch.executor not in self._running
            assert set(batch.requests) <= self._here
            self._running[batch.executor] = batch
        elif isinstance(effect, StartLoad):
            assert effect.source == SSD or (effect.source, effect.copy) in self._resident
            assert (effect.pool, effect.copy) not in self._resident
            assert len(self._loads) < 4  # two from each source
            self._loads[effect.load] = effect
        elif isinstance(effect, Evict):
            assert not any(
                batch.copy == effect.copy and self._memories[number] == effect.pool
                for number, batch in self._running.items()
            )
            assert not any((load.source, load.copy) == (effect.pool, effect.copy) for load in self._loads.values())
            self._resident.remove((effect.pool, effect.copy))


def in_lanes(recording):
    """Batches by executor and moves by memory, each in its order."""
    lanes = defaultdict(list)
    for batch in recording.batches:
        lanes[batch.executor].append(batch)
    for due in recording.dues:
        if not isinstance(due.effect, StartBatch):
            lanes[due.effect.pool].append(due.effect)
    return lanes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([unified, split]),
    st.integers(2, 7),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.01, 0.2, 1.5])), min_size=1, max_size=50),
)
def test_a_playback_does_the_same_in_the_same_order_and_never_stalls(policy, box, experts, capacity, executors, drawn):
    at_s, trace = 0.0, []
    for component, pause_s in drawn:
        at_s += pause_s
        trace.append(TracedArrival(at_s, f"c{component % experts}"))
    stage = Stage(box(experts, capacity, executors), policy, trace, experts)
    before, recording = stage.recorded()
    after, playback, again = stage.played_back(recording)
    assert after.outcomes == before.outcomes
    assert in_lanes(again) == in_lanes(recording)
    assert playback.differences == 0
    if box is unified:  # one memory's loads keep their order on the link: nothing comes later than it did
        assert after.seconds <= before.seconds + 1e-9


def test_a_playback_counts_what_it_did():
    trace = [TracedArrival(0.0, f"c{number % 3}") for number in range(9)]
    stage = Stage(unified(3, 2, 1), "coserve", trace, 3)
    _, recording = stage.recorded()
    _, playback, _ = stage.played_back(recording)
    recorded, played = recording.statistics, playback.statistics()
    for name in ("arrived", "completed", "failed", "in_flight", "batches", "loads", "evictions", "bytes_read"):
        assert getattr(played, name) == getattr(recorded, name), name
    assert [pool.used_bytes for pool in played.pools] == [pool.used_bytes for pool in recorded.pools]
    assert [sorted(pool.resident) for pool in played.pools] == [sorted(pool.resident) for pool in recorded.pools]


def started(effects):
    return [effect.batch for effect in effects if isinstance(effect, StartBatch)]


def test_nothing_runs_or_moves_before_its_request_and_other_labels_are_counted():
    """samba loads nothing until a request wants it; the second request's expert is another one."""
    stage = Stage(unified(4, 3, 1), "samba", [TracedArrival(0.0, "c1"), TracedArrival(0.5, "c2")], 4)
    _, recording = stage.recorded()
    playback = Playback(recording, stage.memories)
    assert playback.handle(Started(), 0.0) == []
    (first,) = playback.handle(Arrived(0), 0.0)
    (batch,) = started(playback.handle(Loaded(first.load), 0.1))
    assert batch.requests == (0,)
    ended = playback.handle(Finished(batch.id, (Prediction("missing", 1.0),)), 0.2)
    assert [type(effect) for effect in ended] == [Complete]
    assert playback.differences == 1
    (second,) = playback.handle(Arrived(1), 0.5)
    assert (first.expert, second.expert) == ("e1", "e2")
    assert [each.requests for each in started(playback.handle(Loaded(second.load), 0.6))] == [(1,)]


@pytest.mark.parametrize("answer", [LoadFailed(1, "disk on fire", False), BatchFailed(1, "disk on fire")])
def test_failures_are_neither_recorded_nor_played_back(answer):
    stage = Stage(unified(2, 2, 1), "samba", [TracedArrival(0.0, "c1")], 2)
    _, recording = stage.recorded()
    recorder = Recorder(stage.engine, stage.memories)
    recorder.handle(answer, 0.0)
    with pytest.raises(ConfigError, match="disk on fire"):
        recorder.recording()
    with pytest.raises(ConfigError, match="disk on fire"):
        Playback(recording, stage.memories).handle(answer, 0.0)


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    recipe = LineRecipe(
        classifiers=4, architecture="squeezenet1_1", requests=30, every_s=0.001, memory_for=2, classifier_px=64
    )
    return generate_line(tmp_path_factory.mktemp("prescheduled") / "line", recipe)


@pytest.mark.parametrize("policy", ["coserve", "samba"])
def test_the_real_engine_is_played_back_batch_by_batch(line, policy):
    config = replace(read_line(line.line, ON_CPU), policy=policy)
    trace = read_trace(line.trace, config.catalog)
    pair = run_and_play_back(config, trace, LoopOptions(checks_invariants=True))
    assert pair.played_back.labels == pair.scheduled.labels
    assert pair.differences == 0
    assert pair.played_back.loads() == pair.scheduled.loads()
    assert pair.recording.statistics.arrived == len(trace)
    for played in (pair.scheduled, pair.played_back):
        assert sum(executor.images for executor in played.after.executors) == len(trace)


def test_the_recording_of_an_earlier_run_is_played_back_before_the_next_run(line):
    config = read_line(line.line, ON_CPU)
    trace = read_trace(line.trace, config.catalog)[:10]
    first = run_and_play_back(config, trace, LoopOptions())
    second = run_and_play_back(config, trace, LoopOptions(), first.recording)
    assert second.played_back.labels == first.scheduled.labels == second.scheduled.labels
    assert second.played_back.counted(lambda each: each.engine.batches) == len(first.recording.batches)


def test_scheduling_is_measured_in_pairs(line):
    config = read_line(line.line, ON_CPU)
    found = measure_scheduling(config, read_trace(line.trace, config.catalog)[:10], RunOptions(repeats=2))
    (cost,) = found.rows
    assert (cost.policy, cost.requests, cost.repeats, cost.differences) == ("coserve", 10, 2, 0)
    assert min(cost.scheduling_s, cost.inference_s, cost.prescheduled_s, cost.management_share) > 0
    assert found.targets == cost.targets


def test_the_larger_gap_decides_and_other_labels_are_told():
    cost = SchedulingCost("coserve", 60, 3, 0.0001, 0.0510, 0.0500, 0.02, 0.01, 0.001, 0, 0.004)
    assert all(target.reached for target in cost.targets)
    missed = replace(cost, seconds_gap=0.03, management_share=0.0021, differences=2)
    assert not any(target.reached for target in missed.targets)
    text = missed.measured("a box").text()
    assert "+3.00%" in text
    assert "2 labels were judged unlike" in text
