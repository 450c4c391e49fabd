"""The Engine under virtual time: loads and batches take the profile's times, all else is instantaneous.

Guarantees: no clock, thread or file; equal traces give equal effects. A source with a given bandwidth carries one load
after another; a load ends after its bytes arrived, and at the earliest after its profiled time. Any other
source serves one load after another, each for its profiled time. On a processor with speedups, m batches at once each
go at ``speedups[m - 1] / m`` of their speed alone; on any other, batches are independent. With known decoding times a
batch computes once its images are prepared (``decoders``); else images are ready at once. Quanta: see ``quanta``.
Each worker has links, processors and cores of its own. Executors may be lost and join (``changes``): loads and batches
of lost ones have no answer.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from agent.core.effects import Complete, Fail, Forget, Preempt, Prepare, StartBatch, StartLoad
from agent.core.events import Arrived, ExecutorsLost, Finished, Loaded, Progressed, Started, Tick
from agent.core.performance import SSD, tier_of
from agent.core.request import IMAGE
from experts.expert import Prediction
from profiler.simulation.decoders import Decoders
from profiler.simulation.quanta import run_quantum

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from agent.core.effects import Effect
    from agent.core.engine import Engine, EngineSetup
    from agent.core.events import Event, ExecutorsJoined
    from agent.core.performance import ExpertProfile, PoolSpec
    from agent.core.request import Batch, Outcome, Work
    from profiler.simulation.decoders import ImageTimes
    from profiler.workload.traces import TracedArrival

    Change: TypeAlias = tuple[float, ExecutorsLost | ExecutorsJoined]

PASSES = Prediction("ok", 1.0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Virtual seconds taken, every effect with its time, every outcome by request number.

    ``finished_s``: time of each outcome, in seconds since the trace's start. The trace starts at ``started_s`` on the
    effects' clock, after the initial placement.
    """

    seconds: float
    effects: tuple[tuple[float, Effect], ...]
    outcomes: dict[int, Outcome]
    finished_s: Mapping[int, float]
    started_s: float

    def waits_s(self, trace: Sequence[TracedArrival]) -> tuple[float, ...]:
        """Waits from arrival to outcome, in the order of the simulated trace."""
        return tuple(self.finished_s[number] - arrival.at_s for number, arrival in enumerate(trace))


@dataclass(slots=True)
class SharedProcessor:
    """Concurrent batches of one processor, and the end of the next.

    All run at one speed, so one clock serves for all: ``_done_s`` counts the seconds of work at full speed that any
    batch would have done since the processor was last idle.
    """

    speedups: tuple[float, ...]
    _done_s: float = 0.0
    _at_s: float = 0.0
    _ends: list[tuple[float, int, Finished | Progressed]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.speedups or min(self.speedups) <= 0.0:
            raise ValueError(f"speedups {self.speedups} - give at least one, each above 0")

    def start(self, now: float, work_s: float, answer: Finished | Progressed) -> None:
        """``work_s``: seconds of the batch alone."""
        if not self._ends:
            self._done_s = 0.0  # no rounding outlives an idle processor
        else:
            self._done_s += (now - self._at_s) * self._pace()
        self._at_s = now
        heapq.heappush(self._ends, (self._done_s + work_s, answer.batch, answer))

    def next_end_s(self) -> float:
        """End of the first batch at the present pace; infinity when none runs."""
        if not self._ends:
            return math.inf
        return self._at_s + max(self._ends[0][0] - self._done_s, 0.0) / self._pace()

    def end_next(self) -> Finished | Progressed:
        """Ends the first batch, at ``next_end_s``; the others go on at their new pace."""
        self._at_s = self.next_end_s()
        self._done_s, _, answer = heapq.heappop(self._ends)
        return answer

    def drop(self, batches: Container[int]) -> None:
        """Forget the batches of lost executors."""
        self._ends = [each for each in self._ends if each[2].batch not in batches]
        heapq.heapify(self._ends)

    def _pace(self) -> float:
        running = len(self._ends)
        return self.speedups[min(running, len(self.speedups)) - 1] / running


@dataclass(slots=True)
class Simulator:
    """Runs a new Engine once. ``predict(request, expert)``: an expert's prediction. For the others see the module.

    ``link_bytes_per_s`` by tier of the source, ``speedups`` by processor (as ``StoredProfile.speedups``).
    Each worker has its own.
    Raises MemoryExceeded for memories that are too small.
    """

    setup: EngineSetup
    predict: Callable[[int, str], Prediction] = lambda request, expert: PASSES  # passes any step that passes ``ok``
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    speedups: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    images: ImageTimes | None = None
    check_every_step: bool = False
    engine: Engine = field(init=False)
    _agenda: list[tuple[float, int, Event]] = field(default_factory=list)
    _ticket: count[int] = field(default_factory=count)
    _start_s: float = 0.0
    _link_free_s: dict[str, float] = field(default_factory=dict)
    _shared: dict[tuple[str, str], SharedProcessor] = field(default_factory=dict)  # by worker and processor
    _processors: dict[int, str] = field(init=False)
    _workers: dict[int, str] = field(init=False)  # by executor
    _pools: dict[str, PoolSpec] = field(init=False)
    _loads: dict[int, str] = field(default_factory=dict)  # load -> memory
    _rows: dict[tuple[str, str], ExpertProfile] = field(default_factory=dict)
    _running: dict[int, int] = field(default_factory=dict)  # batch by executor
    _ahead: dict[int, Batch] = field(default_factory=dict)  # batch queued ahead, by executor
    _log: list[tuple[float, Effect]] = field(default_factory=list)
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _finished_s: dict[int, float] = field(default_factory=dict)
    _work: dict[int, Work] = field(default_factory=dict)  # of the requests that have any
    _left: dict[int, Work] = field(default_factory=dict)  # of requests that have begun and are not done
    _decoders: dict[str, Decoders] = field(default_factory=dict)  # by worker; empty without decoding times
    _computing: dict[int, int] = field(default_factory=dict)  # executors, by batch

    def __post_init__(self) -> None:
        for source, bytes_per_s in self.link_bytes_per_s.items():
            if bytes_per_s <= 0.0:
                raise ValueError(f"the link from {source} has {bytes_per_s} bytes/s - give more than 0")
        self.engine = self.setup.engine()
        self._processors = {spec.id: spec.processor for spec in self.setup.executors}
        self._pools = {pool.name: pool for pool in self.setup.limits.pools}
        self._workers = {spec.id: self._pools[spec.pool].worker for spec in self.setup.executors}
        for spec in self.setup.executors:
            if tier_of(spec.processor) in self.speedups:
                key = self._workers[spec.id], spec.processor
                self._shared[key] = SharedProcessor(self.speedups[tier_of(spec.processor)])
        if self.images is not None:
            for worker in dict.fromkeys(self._workers.values()):
                specs = [spec for spec in self.setup.executors if self._workers[spec.id] == worker]
                self._decoders[worker] = Decoders(self.images, specs, self.setup.matrix)

    def run(
        self,
        trace: Sequence[TracedArrival],
        *,
        warm_s: float | None = None,
        changes: Sequence[Change] = (),
    ) -> Simulation:
        """Play a trace to its end. ``warm_s``: time to place experts before it starts; None: until done.

        ``changes``: executors lost and joined, with the seconds since the trace's start.
        """
        self._post(0.0, Started())
        self._start_s = self._play(until_s=warm_s)
        for number, arrival in enumerate(trace):
            if arrival.work is not IMAGE:
                self._work[number] = arrival.work
            self._post(self._start_s + arrival.at_s, Arrived(number, arrival.component, arrival.expert, arrival.work))
        for at_s, change in changes:
            self._post(self._start_s + at_s, change)
        seconds = self._play(until_s=None) - self._start_s
        return Simulation(seconds, tuple(self._log), dict(self._outcomes), dict(self._finished_s), self._start_s)

    def _play(self, until_s: float | None) -> float:
        """Plays up to ``until_s``, or to the end; returns the time then."""
        now = self._start_s
        limit_s = math.inf if until_s is None else until_s
        while (at_s := self._next_s()) <= limit_s and at_s < math.inf:
            now = at_s
            decoders = min(self._decoders.values(), key=Decoders.next_end_s, default=None)
            if decoders is not None and decoders.next_end_s() <= at_s:
                for batch in decoders.end_next():
                    self._compute(batch, now)
            else:
                self._handle(self._take_next(), now)
            wakeup_s = self.engine.next_wakeup_s()
            if wakeup_s is not None and self._next_s() == math.inf:
                self._post(wakeup_s, Tick())
        return now if until_s is None else until_s

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Finished | Progressed):
            self._stop_computing(event.batch, now)
            self._start_ahead(event.batch, now)
        elif isinstance(event, ExecutorsLost):
            self._lose(event.executors, now)
        for effect in self.engine.handle(event, now):
            self._log.append((now, effect))
            self._carry_out(effect, now)
        if self.check_every_step:
            self.engine.check_invariants()

    def _lose(self, executors: Container[int], now: float) -> None:
        """Drop the answers of lost executors, and of loads into memories that no other executor uses."""
        lost = {each for each in self._processors if each in executors}
        batches = {self._running.pop(each) for each in lost & self._running.keys()}
        for executor in lost:
            self._ahead.pop(executor, None)
        used = {spec.pool for spec in self.setup.executors if spec.id not in lost}
        used |= {cache for name in used if (cache := self._pools[name].cache) is not None}

        def is_gone(event: Event) -> bool:
            if isinstance(event, Loaded):
                return self._loads[event.load] not in used
            return isinstance(event, Finished | Progressed) and event.batch in batches

        self._agenda = [each for each in self._agenda if not is_gone(each[2])]
        heapq.heapify(self._agenda)
        for shared in self._shared.values():
            shared.drop(batches)
        for batch in batches:
            self._stop_computing(batch, now)
        for decoders in self._decoders.values():
            decoders.drop(batches)

    def _stop_computing(self, batch: int, now: float) -> None:
        executor = self._computing.pop(batch, None)
        if executor is not None:
            self._decoders[self._workers[executor]].computes(self._processors[executor], -1, now)

    def _next_s(self) -> float:
        posted_s = self._agenda[0][0] if self._agenda else math.inf
        decoded_s = (decoders.next_end_s() for decoders in self._decoders.values())
        return min((posted_s, *decoded_s, *(shared.next_end_s() for shared in self._shared.values())))

    def _take_next(self) -> Event:
        posted_s = self._agenda[0][0] if self._agenda else math.inf
        for shared in self._shared.values():
            if shared.next_end_s() < posted_s and shared.next_end_s() == self._next_s():
                return shared.end_next()
        return heapq.heappop(self._agenda)[2]

    def _post(self, at_s: float, event: Event) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._ticket), event))

    def _carry_out(self, effect: Effect, now: float) -> None:
        if isinstance(effect, StartLoad):
            self._loads[effect.load] = effect.pool
            self._post(self._load_end_s(effect, now), Loaded(effect.load))
        elif isinstance(effect, StartBatch):
            if effect.batch.executor in self._running:
                self._ahead[effect.batch.executor] = effect.batch
            else:
                self._start_batch(effect.batch, now)
        elif isinstance(effect, Preempt):
            self._left[effect.request] = self._left[effect.request].restarted()
        elif isinstance(effect, Complete | Fail):
            self._outcomes[effect.request] = effect.outcome
            self._finished_s[effect.request] = now - self._start_s
        if self._decoders and isinstance(effect, Prepare):
            self._decoders[self._workers[effect.executor]].prepare(effect, now)
        elif isinstance(effect, Forget | Complete | Fail):
            for worker, decoders in self._decoders.items():
                if not isinstance(effect, Forget) or effect.worker == worker:
                    decoders.forget(effect.request, now)

    def _start_ahead(self, answered: int, now: float) -> None:
        """Starts the batch that was queued ahead behind an ended one."""
        executor = next(executor for executor, running in self._running.items() if running == answered)
        del self._running[executor]
        ahead = self._ahead.pop(executor, None)
        if ahead is not None:
            self._start_batch(ahead, now)

    def _start_batch(self, batch: Batch, now: float) -> None:
        """Start to compute once the batch's images are prepared; texts have none."""
        self._running[batch.executor] = batch.id
        has_images = batch.quantum_s is None and not any(request in self._work for request in batch.requests)
        decoders = self._decoders.get(self._workers[batch.executor])
        if decoders is None or not has_images or decoders.start(batch, now):
            self._compute(batch, now)

    def _compute(self, batch: Batch, now: float) -> None:
        processor = self._processors[batch.executor]
        performance = self.setup.matrix.experts[processor][batch.expert].performance
        answer: Finished | Progressed
        if batch.quantum_s is None:
            tokens_s = sum(performance.tokens_s(self._work.get(request, IMAGE)) for request in batch.requests)
            work_s = performance.latency_s(len(batch.requests)) + tokens_s
            answer = Finished(batch.id, tuple(self.predict(request, batch.expert) for request in batch.requests))
        else:
            work_s, answer = self._run_quantum(batch, batch.quantum_s, processor)
        worker = self._workers[batch.executor]
        if self._decoders:
            self._computing[batch.id] = batch.executor
            self._decoders[worker].computes(processor, 1, now)
        shared = self._shared.get((worker, processor))
        if shared is None:
            self._post(now + work_s, answer)
        else:
            shared.start(now, work_s, answer)

    def _run_quantum(self, batch: Batch, quantum_s: float, processor: str) -> tuple[float, Finished | Progressed]:
        left = {each: self._left.pop(each, self._work.get(each, IMAGE)) for each in batch.requests}
        experts = {each: portion.expert for portion in batch.all_portions for each in portion.requests}
        column = self.setup.matrix.experts[processor]
        performances = {each: column[expert].performance for each, expert in experts.items()}
        quantum = run_quantum(left, performances, quantum_s)
        self._left.update(quantum.unfinished)
        results = {each: self.predict(each, experts[each]) for each in batch.requests if each not in quantum.unfinished}
        if not quantum.unfinished:
            return quantum.seconds, Finished(batch.id, tuple(results.values()))
        return quantum.seconds, Progressed(batch.id, tuple(results.items()), tuple(quantum.unfinished.items()))

    def _load_end_s(self, effect: StartLoad, now: float) -> float:
        tier = tier_of(effect.source)
        takes_s = self._row(effect).load_s[tier]
        link = self._pools[effect.pool].drive if effect.source == SSD else effect.source
        starts_s = max(now, self._link_free_s.get(link, 0.0))
        bytes_per_s = self.link_bytes_per_s.get(tier)
        if bytes_per_s is None:
            self._link_free_s[link] = starts_s + takes_s
            return starts_s + takes_s
        arrives_s = starts_s + effect.size_bytes / bytes_per_s
        self._link_free_s[link] = arrives_s
        return max(arrives_s, now + takes_s)

    def _row(self, effect: StartLoad) -> ExpertProfile:
        """Profile of this load's time: of a processor that runs from its destination.

        For a memory that is only a cache: of a processor that does not load from it, else of any.
        """
        key = (effect.copy, effect.pool)
        if key not in self._rows:
            users = {spec.processor for spec in self.setup.executors if spec.pool == effect.pool}
            rows = [
                (processor not in users, tier_of(effect.pool) in row.load_s, number, row)
                for number, (processor, column) in enumerate(self.setup.matrix.experts.items())
                if (row := column.get(effect.expert)) is not None
                and row.copy == effect.copy
                and tier_of(effect.source) in row.load_s
            ]
            self._rows[key] = min(rows, key=lambda each: each[:3])[3]
        return self._rows[key]
