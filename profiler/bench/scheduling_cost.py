"""What scheduling costs: a recorded run against the same batches and loads played back without any scheduling.

Section 5.3 of the CoServe paper schedules requests offline in advance and performs inference directly; Figure 19 sets
the latency of scheduling a request beside that of its inference with and without scheduling. Here the effects of a
real run are recorded; a ``Playback`` then stands in the Engine's place and releases them in their recorded order, each
as soon as what it needs has happened.

Guarantees: a playback gives the same batches to the same executors in the same order, and the same loads and evictions
to the same memories in the same order; it never runs a batch before its requests are there, nor moves an expert before
as many requests have come as had come when that was decided, so nothing is won by knowing the future. It cannot stall:
what an effect waits for was caused, when it was recorded, by effects before it.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core import events
from agent.core.effects import Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.engine import EngineStatistics
from agent.core.performance import SSD
from agent.core.request import Rejected
from agent.records.database import StateLock
from agent.runtime.loop import LoopOptions
from agent.runtime.machine.detection import detect
from experts.errors import ConfigError
from profiler.bench.policy_runs import RunOptions, configured, machine
from profiler.bench.rows import busy_s
from profiler.charts import bar_chart
from profiler.paper.figures import FIGURE_19, FIGURE_19_SAID, section
from profiler.replay.player import AgentSetup, experts_of, images_of, player

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.pool import PoolStatistics
    from agent.core.request import Batch
    from agent.runtime.loop import Decider
    from experts.expert import Prediction
    from profiler.replay.player import Played, Progress
    from profiler.workload.traces import Arrival

TARGET_GAP = 0.03
TARGET_MANAGEMENT_SHARE = 0.002


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """A copy in one memory."""

    pool: str
    copy: str


@dataclass(frozen=True, slots=True)
class Due:
    """A recorded effect and what it waits for.

    ``arrived``: requests that had come when it was decided. ``moves`` and ``uses``: how often each of these places had
    been loaded or evicted, and how often run or copied from, by the effects before it.
    """

    effect: StartLoad | StartBatch | Evict
    arrived: int
    moves: Mapping[CopyPlace, int]
    uses: Mapping[CopyPlace, int]


@dataclass(frozen=True, slots=True)
class Recording:
    """A run's effects in order, the answers of its batches, and what its Engine counted in the end.

    ``loads_at_once``: the most that were in flight, by source.
    """

    dues: tuple[Due, ...]
    outcomes: Mapping[int, tuple[Complete | Fail, ...]]  # behind the batch that decided them; -n: when n arrived
    results: Mapping[int, tuple[Prediction | Rejected, ...]]
    loads_at_once: Mapping[str, int]
    statistics: EngineStatistics

    @property
    def batches(self) -> tuple[Batch, ...]:
        """In the order they were started."""
        return tuple(due.effect.batch for due in self.dues if isinstance(due.effect, StartBatch))

    @property
    def moves(self) -> tuple[StartLoad | Evict, ...]:
        """Loads and evictions, in the order they were decided."""
        return tuple(due.effect for due in self.dues if isinstance(due.effect, StartLoad | Evict))


class Recorder:
    """A Decider that keeps what another one decides. ``executors``: id -> name of its memory."""

    def __init__(self, decider: Decider, executors: Mapping[int, str]) -> None:
        self._decider = decider
        self._executors = dict(executors)
        self._dues: list[Due] = []
        self._outcomes: defaultdict[int, list[Complete | Fail]] = defaultdict(list)
        self._results: dict[int, tuple[Prediction | Rejected, ...]] = {}
        self._moves: Counter[CopyPlace] = Counter()
        self._uses: Counter[CopyPlace] = Counter()
        self._last_batch: dict[int, int] = {}
        self._sources: dict[int, str] = {}
        self._in_flight: Counter[str] = Counter()
        self._loads_at_once: Counter[str] = Counter()
        self._arrived = 0
        self._failure: str | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """As the other one does."""
        effects = self._decider.handle(event, now)
        if isinstance(event, events.Arrived):
            self._arrived += 1
        elif isinstance(event, events.Finished):
            self._results[event.batch] = event.results
        elif isinstance(event, events.Loaded):
            self._in_flight[self._sources.pop(event.load)] -= 1
        elif isinstance(event, events.LoadFailed | events.BatchFailed):
            self._failure = event.reason
        for effect in effects:
            self._keep(effect)
        return effects

    def next_wakeup_s(self) -> float | None:
        """As the other one does."""
        return self._decider.next_wakeup_s()

    def statistics(self) -> EngineStatistics:
        """As the other one does."""
        return self._decider.statistics()

    def check_invariants(self) -> None:
        """As the other one does."""
        self._decider.check_invariants()

    def recording(self) -> Recording:
        """What was decided so far, once nothing is under way. Raises ConfigError when something failed in it."""
        if self._failure is not None:
            raise ConfigError(f"only a run without failures can be played back: {self._failure} - correct that first")
        outcomes = {batch: tuple(ended) for batch, ended in self._outcomes.items()}
        return Recording(
            tuple(self._dues), outcomes, dict(self._results), dict(self._loads_at_once), self._decider.statistics()
        )

    def _keep(self, effect: Effect) -> None:
        if isinstance(effect, Complete | Fail):
            self._outcomes[self._last_batch.get(effect.request, -effect.request)].append(effect)
        elif isinstance(effect, StartBatch):
            batch = effect.batch
            place = CopyPlace(self._executors[batch.executor], batch.copy)
            self._due(effect, place)
            self._uses[place] += 1
            self._last_batch |= dict.fromkeys(batch.requests, batch.id)
        elif isinstance(effect, Evict):
            place = CopyPlace(effect.pool, effect.copy)
            self._due(effect, place)
            self._moves[place] += 1
        elif isinstance(effect, StartLoad):
            self._keep_load(effect)

    def _keep_load(self, load: StartLoad) -> None:
        target, source = CopyPlace(load.pool, load.copy), CopyPlace(load.source, load.copy)
        self._due(load, target, source)
        self._moves[target] += 1
        if load.source != SSD:
            self._uses[source] += 1
        self._sources[load.load] = load.source
        self._in_flight[load.source] += 1
        self._loads_at_once[load.source] = max(self._loads_at_once[load.source], self._in_flight[load.source])

    def _due(self, effect: StartLoad | StartBatch | Evict, *places: CopyPlace) -> None:
        moves = {place: self._moves[place] for place in places}
        uses = {places[0]: self._uses[places[0]]} if isinstance(effect, Evict) else {}
        self._dues.append(Due(effect, self._arrived, moves, uses))


class Playback:
    """A Decider that releases a recording's effects in order; see the module. ``executors``: id -> its memory."""

    def __init__(self, recording: Recording, executors: Mapping[int, str]) -> None:
        self._recording = recording
        self._executors = dict(executors)
        self._lanes: dict[int | str, deque[Due]] = {}  # batches by executor, moves by memory
        for due in recording.dues:
            self._lanes.setdefault(_lane(due.effect), deque()).append(due)
        self._moves: Counter[CopyPlace] = Counter()  # that are complete
        self._uses: Counter[CopyPlace] = Counter()  # that have ended
        self._loads: dict[int, StartLoad] = {}
        self._running: dict[int, Batch] = {}  # by executor
        self._in_flight: Counter[str] = Counter()
        self._used_bytes: Counter[str] = Counter()
        self._waits_for: dict[int, deque[int]] = {}  # request -> its batches that have not ended, in order
        for batch in recording.batches:
            for request in batch.requests:
                self._waits_for.setdefault(request, deque()).append(batch.id)
        self._here: set[int] = set()
        self._counts: Counter[str] = Counter()
        self.differences = 0  # labels unlike the recorded ones

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Everything that may happen now. Raises ConfigError when a load or a batch fails."""
        released: list[Effect] = []
        self._note(event, released)
        before = -1
        while len(released) > before:  # a move may let a batch go, in a lane that was looked at already
            before = len(released)
            for lane in self._lanes.values():
                while lane and self._may_go(lane[0]):
                    released.append(self._released(lane.popleft().effect))
        return released

    def next_wakeup_s(self) -> float | None:
        """Never: only events bring a playback on."""
        return None

    def statistics(self) -> EngineStatistics:
        """What was played back so far; switches are the recorded ones."""
        recorded, ended = self._recording.statistics, self._counts["completed"] + self._counts["failed"]
        return EngineStatistics(
            arrived=len(self._here),
            completed=self._counts["completed"],
            failed=self._counts["failed"],
            in_flight=len(self._here) - ended,
            switches=recorded.switches,
            batches=self._counts["batches"],
            loads={path: self._counts[path] for path in recorded.loads},
            bytes_read=self._counts["bytes_read"],
            evictions=self._counts["evictions"],
            unexpected_events=0,
            is_draining=False,
            quarantined=dict(recorded.quarantined),
            on_probation=dict(recorded.on_probation),
            queues=(),
            pools=tuple(self._pool(pool) for pool in recorded.pools),
        )

    def check_invariants(self) -> None:
        """Every memory keeps to its budget. Raises AssertionError naming one that does not."""
        for pool in self._recording.statistics.pools:
            used_bytes = self._used_bytes[pool.name]
            assert used_bytes <= pool.expert_bytes, f"{pool.name}: {used_bytes} bytes of {pool.expert_bytes}"

    def _note(self, event: Event, released: list[Effect]) -> None:
        """Take down what has happened; outcomes follow from it at once."""
        if isinstance(event, events.Arrived):
            self._here.add(event.request)
            self._release_outcomes(-event.request, released)
        elif isinstance(event, events.Loaded):
            load = self._loads.pop(event.load)
            self._in_flight[load.source] -= 1
            self._moves[CopyPlace(load.pool, load.copy)] += 1
            if load.source != SSD:
                self._uses[CopyPlace(load.source, load.copy)] += 1
        elif isinstance(event, events.Finished):
            self._end_batch(event, released)
        elif isinstance(event, events.LoadFailed | events.BatchFailed):
            raise ConfigError(f"nothing may fail in a playback: {event.reason} - correct that, and measure again")

    def _end_batch(self, event: events.Finished, released: list[Effect]) -> None:
        executor = next(number for number, batch in self._running.items() if batch.id == event.batch)
        batch = self._running.pop(executor)
        self._uses[CopyPlace(self._executors[executor], batch.copy)] += 1
        recorded = self._recording.results[batch.id]
        self.differences += sum(_label(one) != _label(two) for one, two in zip(event.results, recorded, strict=True))
        for request in batch.requests:
            self._waits_for[request].popleft()
        self._release_outcomes(batch.id, released)

    def _release_outcomes(self, batch: int, released: list[Effect]) -> None:
        for effect in self._recording.outcomes.get(batch, ()):
            self._counts["completed" if isinstance(effect, Complete) else "failed"] += 1
            released.append(effect)

    def _may_go(self, due: Due) -> bool:
        """Has everything happened that this effect came after?"""
        effect = due.effect
        if any(self._moves[place] != count for place, count in due.moves.items()):
            return False
        if isinstance(effect, StartBatch):
            batch = effect.batch
            is_idle = batch.executor not in self._running
            return is_idle and all(
                request in self._here and self._waits_for[request][0] == batch.id for request in batch.requests
            )
        if due.arrived > len(self._here):
            return False
        if isinstance(effect, StartLoad):
            return self._in_flight[effect.source] < self._recording.loads_at_once[effect.source]
        return all(self._uses[place] == count for place, count in due.uses.items())

    def _released(self, effect: StartLoad | StartBatch | Evict) -> Effect:
        """Take down that it begins."""
        if isinstance(effect, StartBatch):
            self._running[effect.batch.executor] = effect.batch
            self._counts["batches"] += 1
        elif isinstance(effect, Evict):
            self._moves[CopyPlace(effect.pool, effect.copy)] += 1
            self._used_bytes[effect.pool] -= effect.freed_bytes
            self._counts["evictions"] += 1
        else:
            self._loads[effect.load] = effect
            self._in_flight[effect.source] += 1
            self._used_bytes[effect.pool] += effect.size_bytes
            self._counts[f"{effect.source}_{effect.pool}"] += 1
            self._counts["bytes_read"] += effect.size_bytes if effect.source == SSD else 0
        return effect

    def _pool(self, recorded: PoolStatistics) -> PoolStatistics:
        """A memory as it is now; its copies were moved in and out in turn."""
        copies = sorted(place.copy for place, moves in self._moves.items() if place.pool == recorded.name and moves % 2)
        return replace(
            recorded,
            used_bytes=self._used_bytes[recorded.name],
            workspace_used_bytes=0,
            resident=tuple(copies),
            loading=tuple(load.copy for load in self._loads.values() if load.pool == recorded.name),
        )


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    """Figure 19, and the share of expert management: means over pairs of a run and its playback, in seconds.

    ``scheduling_s``, ``inference_s``, ``prescheduled_s``: of one request. Scheduling is the deciding thread's processor
    time, inference what the executors were busy for. ``gap``: by how much inference takes longer than without any
    scheduling; ``seconds_gap``: the same of the whole trace. ``management_share``: of the trace's time. ``error``: the
    standard error of ``seconds_gap``, by how much pairs differ; None for a single one.
    """

    machine: str
    policy: str
    requests: int
    repeats: int
    scheduling_s: float
    inference_s: float
    prescheduled_s: float
    gap: float
    seconds_gap: float
    management_share: float
    differences: int  # labels that a playback judged unlike its recording
    error: float | None

    @property
    def larger_gap(self) -> float:
        """The larger of the two: an executor that waits for a decision is not busy, but the trace takes longer."""
        return max(self.gap, self.seconds_gap)

    @property
    def meets_targets(self) -> bool:
        """The paper's figures: a gap under 3 %, expert management at most 0.2 %."""
        return self.larger_gap < TARGET_GAP and self.management_share <= TARGET_MANAGEMENT_SHARE


@dataclass(frozen=True, slots=True)
class Pair:
    """A run and its playback."""

    recording: Recording
    scheduled: Played
    played_back: Played
    differences: int
    machine: str


def measure_scheduling(
    config: LineConfig,
    trace: Sequence[Arrival],
    options: RunOptions | None = None,
    progress: Progress = lambda *_: None,
) -> SchedulingCost:
    """Run and play back a trace ``repeats`` times, after one pair that counts for nothing.

    In every second pair the playback, of the run before, goes first: a machine that slows down touches both alike.

    Raises what ``run_line`` raises, and ConfigError for a run in which something fails.
    """
    options = options or RunOptions()
    config = configured(config, options)
    pairs: list[Pair] = []
    with ExitStack() as ending:
        if not options.is_locked:
            ending.enter_context(StateLock(config.state))
        for number in range(1 + options.repeats):
            progress("prescheduled", number, 1 + options.repeats)
            loop = LoopOptions(ssd_bytes_per_s=options.ssd_bytes_per_s)
            earlier = pairs[-1].recording if number and number % 2 == 0 else None
            pairs.append(run_and_play_back(config, trace, loop, earlier))
    progress("prescheduled", 1 + options.repeats, 1 + options.repeats)
    return _cost(config, len(trace), pairs[1:])


def run_and_play_back(
    config: LineConfig, trace: Sequence[Arrival], options: LoopOptions, earlier: Recording | None = None
) -> Pair:
    """One pair; with the recording of an earlier run, that is played back before the run instead of its own after it.

    Raises what ``run_line`` raises.
    """
    experts, images = experts_of(trace, config.catalog), images_of(trace, config.catalog)
    box = detect(config.device)
    recorders: list[Recorder] = []
    playbacks: list[Playback] = []

    def memories(engine: Decider) -> dict[int, str]:
        return {queue.executor: box.pool_of(queue.processor) for queue in engine.statistics().queues}

    def record(engine: Decider) -> Decider:
        recorders.append(Recorder(engine, memories(engine)))
        return recorders[0]

    def play_back(engine: Decider) -> Decider:
        playbacks.append(Playback(earlier or recorders[0].recording(), memories(engine)))
        return playbacks[0]

    def played(decider: Callable[[Decider], Decider]) -> tuple[Played, str]:
        with player(config, experts, AgentSetup(loop=options, decider=decider)) as stage:
            return stage.play(trace, images), machine(stage.agent)

    if earlier is None:
        (scheduled, box_text), (played_back, _) = played(record), played(play_back)
    else:
        (played_back, box_text), (scheduled, _) = played(play_back), played(record)
    return Pair(recorders[0].recording(), scheduled, played_back, playbacks[0].differences, box_text)


def report(cost: SchedulingCost) -> str:
    """The figures in words, with the machine they come from, and whether they reach the paper's."""
    error = "" if cost.error is None else f" (pairs differ: standard error {cost.error:.2%})"
    gap = "reached" if cost.larger_gap < TARGET_GAP else "SHORT of its target"
    share = "reached" if cost.management_share <= TARGET_MANAGEMENT_SHARE else "SHORT of its target"
    lines = [
        f"machine       {cost.machine}",
        f"runs          policy {cost.policy}, {cost.requests} requests, means of {cost.repeats} pairs",
        f"scheduling    {cost.scheduling_s * 1e3:.3f} ms a request, of the deciding thread",
        f"inference     {cost.inference_s * 1e3:.3f} ms a request; pre-scheduled {cost.prescheduled_s * 1e3:.3f} ms",
        f"gap           {cost.gap:+.2%} of inference, {cost.seconds_gap:+.2%} of the whole trace{error}, "
        f"target under {TARGET_GAP:.0%} for both: {gap}",
        f"management    {cost.management_share:.3%} of the time, target {TARGET_MANAGEMENT_SHARE:.1%}: {share}",
    ]
    if cost.differences:
        lines.append(f"DIFFERENCES   {cost.differences} labels were judged unlike in the run that was played back")
    return "\n".join(lines)


def _cost(config: LineConfig, requests: int, pairs: Sequence[Pair]) -> SchedulingCost:
    inference = [busy_s(pair.scheduled) / requests for pair in pairs]
    prescheduled = [busy_s(pair.played_back) / requests for pair in pairs]
    managing = [
        sum(each.cpu_s for each in pair.scheduled.decisions if each.is_expert_management) / pair.scheduled.seconds
        for pair in pairs
    ]
    scheduling = [
        sum(each.cpu_s for each in pair.scheduled.decisions if not each.is_expert_management) / requests
        for pair in pairs
    ]
    seconds_gaps = [pair.scheduled.seconds / pair.played_back.seconds - 1 for pair in pairs]
    return SchedulingCost(
        machine=pairs[0].machine,
        policy=config.policy,
        requests=requests,
        repeats=len(pairs),
        scheduling_s=statistics.fmean(scheduling),
        inference_s=statistics.fmean(inference),
        prescheduled_s=statistics.fmean(prescheduled),
        gap=statistics.fmean(with_ / without - 1 for with_, without in zip(inference, prescheduled, strict=True)),
        seconds_gap=statistics.fmean(seconds_gaps),
        management_share=statistics.fmean(managing),
        differences=sum(pair.differences for pair in pairs),
        error=statistics.stdev(seconds_gaps) / len(pairs) ** 0.5 if len(pairs) > 1 else None,
    )


def _lane(effect: StartLoad | StartBatch | Evict) -> int | str:
    """What keeps its order: the batches of one executor, the moves of one memory."""
    return effect.batch.executor if isinstance(effect, StartBatch) else effect.pool


def _label(result: Prediction | Rejected) -> str | None:
    return None if isinstance(result, Rejected) else result.label


def figure_19(folder: Path, cost: SchedulingCost) -> str:
    """What scheduling and expert management cost, on the real engine."""
    chart = folder / "figure-19.png"
    latencies = [cost.scheduling_s * 1e3, cost.inference_s * 1e3, cost.prescheduled_s * 1e3]
    groups = ["scheduling", "inference", "pre-scheduled inference"]
    bar_chart(chart, "Average latency of one request", "ms", groups, {cost.policy: latencies}, cost.machine)
    times = ("scheduling, ms", "inference, ms", "pre-scheduled, ms")
    header = ("policy", "requests", *times, "gap", "of the trace", "expert management")
    figures = (f"{value:.3f}" for value in latencies)
    gaps = (f"{cost.gap:.2%}", f"{cost.seconds_gap:.2%}")
    line = (cost.policy, str(cost.requests), *figures, *gaps, f"{cost.management_share:.3%}")
    pairs = f"means of {cost.repeats} pairs" + ("" if cost.error is None else f", standard error {cost.error:.2%}")
    return section(FIGURE_19, [chart], header, [line], f"{FIGURE_19_SAID} Here: {cost.machine}, {pairs}.")
