"""AgentLoop: the thread that owns the Engine. Events arrive in an inbox, effects are carried out in order.

Guarantees: the outcome of every submitted request is delivered once while the loop runs; its image or text is kept
until then; other threads read frozen snapshots. Assumes: ``on_outcome`` returns soon and does not raise: it runs on
this thread. An error of ``on_outcome`` or of the Engine, a lost device, or work past its age limits crashes the loop:
requests in flight have no outcome, ``wait_until_idle`` and ``stop`` raise AgentCrashed, and the next agent runs these
requests again.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from threading import Condition, Thread, current_thread
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from agent.core import effects, events
from agent.core.request import IMAGE, Precedence
from agent.runtime.ages import AgeLimits, OpenWork
from agent.runtime.effect_log import log_effect
from agent.runtime.images.preparation import Order, unwatched
from agent.runtime.images.sources import image_name
from agent.runtime.machine.box import torch_device
from agent.runtime.machine.device_loss import Breakdown
from agent.runtime.machine.heap import HeapKeeper
from agent.runtime.machine.threads import end_team
from agent.runtime.texts import TextSource, expert_name
from experts.errors import AgentCrashed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.performance import ExecutorSpec, Limits, PerformanceMatrix
    from agent.core.request import Batch, Outcome
    from agent.core.state import EngineStatistics
    from agent.runtime.executor import BatchExecutor, ExecutorStatistics, RequestSource
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.preparation import Preparation
    from agent.runtime.machine.box import Box
    from agent.runtime.text_engines import TextEngines
    from agent.runtime.texts import RunningTexts, TextProgress
    from agent.runtime.weights.slots import SkeletonShelf, SlotStatistics, SlotStore
    from agent.runtime.weights.transfer import Transfers, TransferStatistics
    from experts.graph import ExpertGraph

logger = logging.getLogger(__name__)
LATE_TICK_S = 0.05  # between two ticks whose time has passed
STOP_S = 5.0  # then threads are abandoned; their images stay in `.work`
POLL_S = 0.2  # poll interval of threads that wait for the loop

Answer = TypeVar("Answer")


class Decider(Protocol):
    """Engine, or a wrapper that times or replays decisions. Called on the loop's thread only."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def next_wakeup_s(self) -> float | None: ...

    def statistics(self) -> EngineStatistics: ...

    def check_invariants(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoopOptions:
    ssd_bytes_per_s: float | None = None  # limit on the rate of loads from the SSD
    checks_invariants: bool = False  # called when the agent becomes idle
    scaled: frozenset[str] = frozenset()  # experts, by name in the line file, with JPEGs decoded smaller
    keeps_prefixes: bool = True  # reuse keys and values for texts with a common prefix
    ages: AgeLimits = field(default_factory=AgeLimits)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    engine: EngineStatistics
    transfers: TransferStatistics
    slots: tuple[SlotStatistics, ...]
    executors: tuple[ExecutorStatistics, ...]
    skeletons_constructed: int
    requests_in_flight: int


@dataclass(frozen=True, slots=True)
class BatchWatch:
    """Callbacks on the loop's thread: a batch's requests start (``begun``), or have their answer (``ended``).

    ``given``: before the executor receives the batch. ``preparing``: a context, on any thread, around the preparation
    of an image ahead of its batch. ``ran``: a batch was answered, with its seconds. ``idle``: no work is under way.
    """

    begun: Callable[[Sequence[int]], None] = lambda _: None
    ended: Callable[[Sequence[int]], None] = lambda _: None
    preparing: Callable[[int], AbstractContextManager[object]] = unwatched
    given: Callable[[Sequence[int]], None] = lambda _: None
    ran: Callable[[Batch, float], None] = lambda *_: None
    idle: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """Subject of an Engine's decisions. ``copies``: all of the matrix, by name; ``routes``: at the start."""

    box: Box
    executors: Sequence[ExecutorSpec]
    limits: Limits
    copies: Mapping[str, ExpertCopy]
    matrix: PerformanceMatrix
    routes: ExpertGraph


@dataclass(frozen=True, slots=True)
class Workshop:
    """Threads and memories that carry out effects, and answer to ``inbox``."""

    stores: tuple[SlotStore, ...]
    shelf: SkeletonShelf
    transfers: Transfers
    preparation: Preparation
    executors: Mapping[int, BatchExecutor]
    texts: RunningTexts
    text_engines: TextEngines
    inbox: SimpleQueue[Message]

    def bind_where_they_run(self, matrix: PerformanceMatrix) -> None:
        """Bind each copy only on devices of executors with a row for it."""
        runs_on: dict[str, set[tuple[str, str]]] = {}
        for executor in self.executors.values():
            spec = executor.spec
            for row in matrix.experts[spec.processor].values():
                runs_on.setdefault(row.copy, set()).add((spec.pool, torch_device(spec.processor)))
        self.text_engines.runs_on = runs_on
        for store in self.stores:
            devices: defaultdict[str, list[str]] = defaultdict(list)
            for copy, places in runs_on.items():
                devices[copy] = sorted(device for pool, device in places if pool == store.pool)
            store.devices_of = devices.__getitem__


# A call runs on the loop's thread; None is the last message.
Message: TypeAlias = "Event | Breakdown | Callable[[], None] | None"


class AgentLoop:
    """See the module."""

    def __init__(
        self,
        engine: Decider,
        plan: AgentPlan,
        workshop: Workshop,
        on_outcome: Callable[[int, Outcome], None],
        options: LoopOptions,
    ) -> None:
        self._engine = engine
        self._clock = options.clock
        self._workshop = workshop
        self._copies = plan.copies
        self._experts = {expert_name(copy): copy.expert for copy in plan.copies.values()}
        self._texts = workshop.texts
        self._routes = plan.routes
        self._inbox = workshop.inbox
        self._on_outcome = on_outcome
        self._options = options
        self._sources: dict[int, RequestSource] = {}
        self._idle_request: int | None = None
        self._numbers = count(1)
        self._open = OpenWork(options.ages, plan.executors, plan.matrix, options.ssd_bytes_per_s)
        self._held: dict[int, effects.StartBatch] = {}  # executor -> its next batch
        self._has_started = False
        self._is_stopped = False
        self.leaves_threads = False  # after ``stop``: a thread still uses the memories
        self._ticked_s = float("-inf")
        self._watch = BatchWatch()
        self._crash: AgentCrashed | None = None
        self._on_crash: list[Callable[[AgentCrashed], None]] = []
        self._changed = Condition()  # also guards the two above
        self._thread = Thread(target=self._run, name="agent-loop", daemon=True)
        self._heap_keeper = HeapKeeper()
        self._carry_out: dict[type, Callable[..., None]] = {
            effects.StartLoad: self._start_load,
            effects.StartBatch: self._start_batch,
            effects.Prepare: self._prepare,
            effects.Forget: lambda effect: self._workshop.preparation.forget(effect.request),
            effects.Preempt: self._preempt,
            effects.Evict: self._evict,
            effects.BudgetChanged: self._change_budget,
            effects.LeasesChanged: self._change_leases,
            effects.Complete: self._deliver,
            effects.Fail: self._deliver,
        }

    # -- any thread --

    def start(self) -> None:
        end_team()  # by the thread that prepared the start
        for executor in self._workshop.executors.values():
            executor.start()
        self._thread.start()
        self._heap_keeper.start()

    def watch_batches(self, watch: BatchWatch) -> None:
        """Watch every batch. Call before ``start``; callbacks return soon and do not raise."""
        self._watch = watch
        self._workshop.preparation.watch = watch.preparing

    def watch_weights(self, mend: Callable[[str], None], distrust: Callable[[str], None]) -> None:
        """Set callbacks, on any thread, for experts with missing and with stale packed files. Call before ``start``."""
        self._workshop.transfers.mend, self._workshop.transfers.distrust = mend, distrust

    def submit(
        self,
        source: RequestSource,
        *,
        component: str | None = None,
        expert: str | None = None,
        precedence: Precedence = Precedence.LINE,
    ) -> int:
        """Submit a request for a component's route or one expert; returns its number. Raises as text sources do."""
        if (component is None) == (expert is None):
            raise ValueError("a request is for a component or for an expert: give exactly one of the two")
        if self._is_stopped or self._crash is not None:
            raise RuntimeError("the agent has stopped and takes no requests") from self._crash
        text = self._begun_text(source, component, expert) if isinstance(source, TextSource) else None
        request = next(self._numbers)
        self._sources[request] = source
        if precedence is Precedence.IDLE:
            self._idle_request = request
        if text is not None:
            self._texts.take(request, text)
        work = IMAGE if text is None else text.work
        self._inbox.put(events.Arrived(request, component, expert, work, precedence))
        return request

    def _begun_text(self, source: TextSource, component: str | None, expert: str | None) -> TextProgress:
        reached = self._routes.experts_of(component) if component is not None else (expert or "",)
        copies = [copy for name in reached for copy in self._copies_of(name)]
        return self._texts.begin(source, self._workshop.text_engines.reached(copies))

    def most_tokens(self, expert: str) -> int | None:
        """Tokens that one text of an expert may hold, alone in its memory; None: unknown."""
        return self._workshop.text_engines.most_tokens(self._copies_of(expert))

    def _copies_of(self, expert: str) -> list[ExpertCopy]:
        return [copy for copy in self._copies.values() if expert_name(copy) == expert]

    @property
    def text_executors(self) -> Collection[int]:
        return self._workshop.text_engines.by_executor.keys()

    def scale_images(self, experts: Iterable[str]) -> None:
        """Decode JPEGs smaller for these experts. Call before ``start``."""
        self._workshop.preparation.scaled |= frozenset(experts)

    def cancel(self, request: int) -> None:
        """Cancel a request. Its outcome is still delivered, UNKNOWN if the request did not run."""
        self._inbox.put(events.Cancelled(request))

    def quarantine(self, expert: str, reason: str) -> None:
        """Start no more batches of an expert; its requests end UNKNOWN with this reason."""
        self._inbox.put(events.Quarantined(expert, reason))

    def want(self, expert: str) -> None:
        """Load an expert, once there is room that no queue needs sooner."""
        self._inbox.put(events.Wanted(expert))

    def unwant(self, expert: str) -> None:
        """Evict an expert, unless it is pinned, runs, or has requests waiting."""
        self._inbox.put(events.Unwanted(expert))

    def change_line(self, change: events.LineChanged, copies: Mapping[str, ExpertCopy]) -> None:
        """Replace the served experts and routes; ``copies``: new ones. Earlier requests keep their routes."""
        self._call(lambda: self._change_line(change, copies))

    def drain(self) -> None:
        """Refuse new requests, and finish the others. See ``wait_until_drained``."""
        self._inbox.put(events.Drain())

    def when_crashed(self, callback: Callable[[AgentCrashed], None]) -> None:
        """Call back once if the loop crashes, on its thread; at once if it has crashed already."""
        with self._changed:
            crash = self._crash
            if crash is None:
                self._on_crash.append(callback)
        if crash is not None:
            callback(crash)

    @property
    def crash(self) -> AgentCrashed | None:
        return self._crash

    @property
    def requests_in_flight(self) -> int:
        """Requests in flight, without those of idle precedence."""
        return len(self._sources) - (self._idle_request is not None)

    def statistics(self) -> LoopStatistics:
        """Frozen snapshot, taken between two events."""
        return self._call(self._snapshot)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no request, load or batch is under way; False after the timeout. Raises AgentCrashed."""
        with self._changed:
            idle = self._changed.wait_for(lambda: self._crash is not None or self._is_idle(), timeout_s)
        self._raise_crash()
        return idle

    def wait_until_drained(self, timeout_s: float) -> bool:
        """Wait until no request or batch is under way, loads aside; False after the timeout or a crash."""
        with self._changed:
            self._changed.wait_for(lambda: self._crash is not None or self._is_drained(), timeout_s)
        return self._crash is None and self._is_drained()

    def stop(self) -> None:
        """Finish running batches, cancel loads; other requests have no outcome. Raises AgentCrashed after a crash.

        Threads that have not ended after ``STOP_S`` are abandoned with their memory.
        """
        self._is_stopped = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        with ExitStack() as ending:  # last first; errors of a lost device do not hide the crash
            ending.callback(self._raise_crash)
            ending.callback(self._heap_keeper.stop)
            ending.callback(self._sources.clear)
            self.leaves_threads = not self._end_threads()
            if self._crash is not None:
                self._crash.leaves_threads |= self.leaves_threads
            if not self.leaves_threads:
                for store in self._workshop.stores:
                    ending.callback(store.close)

    def _end_threads(self) -> bool:
        workshop = self._workshop
        deadline_s = time.monotonic() + STOP_S  # real clock, as running threads need real time
        executors = [executor.stop for executor in workshop.executors.values()]
        stops = [*executors, workshop.preparation.stop, workshop.transfers.stop]
        have_ended = [stop(max(deadline_s - time.monotonic(), 0.0)) for stop in stops]
        if not all(have_ended):
            logger.error("threads_left_behind: a batch, load or image does not end; its memory ends with the process")
        return all(have_ended)

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise self._crash

    def _call(self, work: Callable[[], Answer]) -> Answer:
        """Call on the loop's thread, or on this one after the loop's has ended."""
        if current_thread() is self._thread:
            return work()
        answer: Future[Answer] = Future()
        self._inbox.put(lambda: answer.set_result(work()))
        while self._thread.is_alive():
            with suppress(TimeoutError):
                return answer.result(POLL_S)
        return answer.result() if answer.done() else work()

    # -- on the loop's thread --

    def _run(self) -> None:
        try:
            self._handle(events.Started())
            self._has_started = True
            self._look_around()
            while (message := self._next()) is not None:
                if isinstance(message, Breakdown):
                    raise message.error
                if callable(message):
                    message()
                else:
                    self._handle(message)
                    self._look_around()
                self._open.look(self._clock())
        except Exception as error:
            logger.exception("agent_loop_crashed")
            self._end(AgentCrashed(error))

    def _end(self, crash: AgentCrashed) -> None:
        crash.__cause__ = crash.error
        with self._changed:
            self._crash = crash
            callbacks, self._on_crash = self._on_crash, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(crash)

    def _next(self) -> Message:
        """Next message, or a Tick if the Engine's wake-up or an age limit is earlier."""
        wakeup_s, limit_s = self._engine.next_wakeup_s(), self._open.next_due_s()
        ticks = [] if wakeup_s is None else [max(wakeup_s, self._ticked_s + LATE_TICK_S)]
        moments = ticks if limit_s is None else [*ticks, limit_s]
        if not moments:
            return self._inbox.get()
        due_s = min(moments) - self._clock()
        try:
            return self._inbox.get(timeout=due_s) if due_s > 0 else self._inbox.get_nowait()
        except Empty:
            self._ticked_s = self._clock()
            return events.Tick()

    def _handle(self, event: Event) -> None:
        if isinstance(event, events.Finished | events.Progressed | events.BatchFailed):
            self._batch_answered(event.batch)
        for effect in self._engine.handle(event, self._clock()):
            self._carry_out.get(type(effect), log_effect)(effect)
        if isinstance(event, events.Loaded | events.LoadFailed):
            self._open.close_load(event.load)
        if isinstance(event, events.Arrived) and event.work != IMAGE:
            self._texts.hurry()

    def _change_line(self, change: events.LineChanged, copies: Mapping[str, ExpertCopy]) -> None:
        known = {**self._copies, **copies}
        self._copies = {name: copy for name, copy in known.items() if expert_name(copy) in change.graph.experts}
        self._experts = {expert_name(copy): copy.expert for copy in self._copies.values()}
        self._workshop.preparation.scaled -= {copy.expert.id for copy in copies.values()}  # replaced by these copies
        self._routes = change.graph
        self._workshop.transfers.know(self._copies)
        self._workshop.bind_where_they_run(change.matrix)
        self._open.predict_by(change.matrix)
        self._handle(change)

    def _start_load(self, effect: effects.StartLoad) -> None:
        self._open.open_load(effect, self._clock())
        self._workshop.transfers.start_load(effect)

    def _start_batch(self, effect: effects.StartBatch) -> None:
        batch = effect.batch
        self._watch.given(batch.requests)
        if is_behind := self._open.runs_on(batch.executor):
            self._held[batch.executor] = effect
        else:
            self._begin_batch(effect)
        executor = self._workshop.executors[batch.executor]
        if batch.quantum_s is not None:
            copies = [self._copies[portion.copy] for portion in batch.all_portions for _ in portion.requests]
            executor.start_quantum(batch, copies)
            return
        images = [self._sources[request] for request in batch.requests]
        executor.start_batch(batch, self._copies[batch.copy].expert, images)
        if not is_behind:
            executor.hurry(batch)

    def _begin_batch(self, effect: effects.StartBatch) -> None:
        self._open.open_batch(effect.batch, self._clock())
        self._watch.begun(effect.batch.requests)

    def _prepare(self, effect: effects.Prepare) -> None:
        source = self._sources[effect.request]
        if isinstance(source, TextSource):
            return  # its batch rejects it
        later = [self._experts[expert] for expert in effect.later]
        gives_way = self._workshop.executors[effect.executor].is_on_cpu
        order = Order(self._experts[effect.expert], later, effect.later_bytes, effect.due_s, gives_way)
        self._workshop.preparation.prepare(effect.request, source, image_name(source, effect.request), order)

    def _preempt(self, effect: effects.Preempt) -> None:
        self._texts.preempt(effect.request, effect.executor)
        log_effect(effect)

    def _batch_answered(self, batch: int) -> None:
        closed = self._open.close_batch(batch)
        if closed is None:
            return
        answered = closed.work
        held = self._held.pop(answered.executor, None)
        if held is not None:
            self._workshop.executors[answered.executor].hurry(held.batch)
        self._watch.ended(answered.requests)
        self._watch.ran(answered, self._clock() - closed.opened_at_s)
        if held is not None:
            self._begin_batch(held)

    def _evict(self, effect: effects.Evict) -> None:
        self._workshop.transfers.evict(effect)
        log_effect(effect)

    def _change_budget(self, effect: effects.BudgetChanged) -> None:
        for store in self._workshop.stores:
            if store.pool == effect.pool:
                store.set_budget(effect.after_bytes)
        log_effect(effect)

    def _change_leases(self, effect: effects.LeasesChanged) -> None:
        self._workshop.text_engines.set_budget(effect.pool, effect.after_bytes)
        log_effect(effect)

    def _deliver(self, effect: effects.Complete | effects.Fail) -> None:
        self._texts.forget(effect.request)
        self._workshop.preparation.forget(effect.request)
        self._on_outcome(effect.request, effect.outcome)
        del self._sources[effect.request]
        if effect.request == self._idle_request:
            self._idle_request = None

    def _is_idle(self) -> bool:
        return self._has_started and not (self._sources or self._open.loads or self._open.batches)

    def _is_drained(self) -> bool:
        return not (self._sources or self._open.batches)

    def _look_around(self) -> None:
        if not self._is_drained():
            return
        if self._options.checks_invariants and self._is_idle() and self._inbox.empty():
            self._check_invariants()
        with self._changed:
            self._changed.notify_all()
        if self._is_idle() and self._inbox.empty():
            self._watch.idle()

    def _check_invariants(self) -> None:
        self._engine.check_invariants()
        ledgers = {pool.name: pool.used_bytes for pool in self._engine.statistics().pools}
        for store in self._workshop.stores:
            held_bytes = store.statistics().used_bytes
            assert held_bytes == ledgers[store.pool], (
                f"memory {store.pool} holds {held_bytes} bytes, its ledger counts {ledgers[store.pool]}"
            )
        assert not self._workshop.preparation.requests, "something is prepared for a request that has its outcome"

    def _snapshot(self) -> LoopStatistics:
        workshop = self._workshop
        return LoopStatistics(
            engine=self._engine.statistics(),
            transfers=workshop.transfers.statistics(),
            slots=tuple(store.statistics() for store in workshop.stores),
            executors=tuple(executor.statistics() for executor in workshop.executors.values()),
            skeletons_constructed=workshop.shelf.constructed,
            requests_in_flight=self.requests_in_flight,
        )
