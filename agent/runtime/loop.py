"""AgentLoop: the thread that owns the Engine. Events arrive in an inbox, effects are carried out in order.

Guarantees: the outcome of every submitted request is delivered once while the loop runs; its image or text is kept
until then; other threads read frozen snapshots. Assumes: ``on_outcome`` returns soon and does not raise: it runs on
this thread. An error of ``on_outcome``, of the Engine or of the dispatcher crashes the loop: requests in flight have no
outcome, ``wait_until_idle`` and ``stop`` raise AgentCrashed, and the next agent runs these requests again.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from itertools import count
from queue import Empty, SimpleQueue
from threading import Condition, Thread, current_thread
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from agent.core import effects, events
from agent.core.names import expert_of
from agent.core.request import IMAGE, Precedence
from agent.faults.errors import AgentCrashed
from agent.faults.housekeeping import Housekeeper
from agent.runtime.ages import AgeLimits, OpenWork
from agent.runtime.dispatcher import Dispatcher
from agent.runtime.effect_log import log_effect
from agent.runtime.machine.device_loss import Breakdown
from agent.runtime.machine.heap import GIVEN_BACK_EVERY_S, give_back_unused
from agent.runtime.machine.threads import end_team
from agent.runtime.texts import TextSource
from agent.runtime.worker import WorkerLost, WorkerStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from agent.core.effects import Effect
    from agent.core.engine import EngineSetup
    from agent.core.events import Event
    from agent.core.performance import ExecutorSpec, PerformanceMatrix, PoolSpec
    from agent.core.request import Outcome
    from agent.core.state import EngineStatistics
    from agent.runtime.dispatcher import BatchWatch
    from agent.runtime.executor import RequestSource
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.local_worker import LocalWorker
    from agent.runtime.machine.box import Box
    from agent.runtime.worker import Worker

logger = logging.getLogger(__name__)
LATE_TICK_S = 0.05  # between two ticks whose time has passed
STOP_S = 5.0  # then threads are abandoned; their images stay in `.work`
POLL_S = 0.2  # poll interval of threads that wait for the loop
AT_ONCE = nullcontext()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStatistics(WorkerStatistics):
    """Frozen snapshot of a loop, with the sum of its workers."""

    engine: EngineStatistics
    requests_in_flight: int


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """Subject of an Engine's decisions, as at the start. ``copies``: all of the matrix, by name."""

    box: Box
    setup: EngineSetup
    copies: Mapping[str, ExpertCopy]


# A call runs on the loop's thread; None is the last message.
Message: TypeAlias = "Event | Breakdown | WorkerLost | Callable[[], None] | None"


class AgentLoop:
    def __init__(
        self,
        engine: Decider,
        plan: AgentPlan,
        worker: LocalWorker,
        inbox: SimpleQueue[Message],
        on_outcome: Callable[[int, Outcome], None],
        options: LoopOptions,
    ) -> None:
        self._engine = engine
        self._clock = options.clock
        self._here = worker
        self._worker_lost: Callable[[str], None] = lambda _: None
        setup = plan.setup
        self._texts = worker.texts
        self._routes = setup.graph
        self._inbox = inbox
        self._on_outcome = on_outcome
        self._options = options
        self._sources: dict[int, RequestSource] = {}
        self._idle_request: int | None = None
        self._numbers = count(1)
        self._open = OpenWork(options.ages, setup.executors, setup.matrix, options.ssd_bytes_per_s)
        self._dispatcher = Dispatcher(setup, plan.copies, worker, self._open, self._sources, options.clock)
        self.record = self._dispatcher.record
        self._has_started = False
        self._is_stopped = False
        self.leaves_threads = False  # after ``stop``: a thread still uses the memories
        self._ticked_s = float("-inf")
        self._crash: AgentCrashed | None = None
        self._on_crash: list[Callable[[AgentCrashed], None]] = []
        self._changed = Condition()  # also guards the two above
        self._thread = Thread(target=self._run, name="agent-loop", daemon=True)
        self._heap_keeper = Housekeeper({"heap": give_back_unused}, "heap-keeper", GIVEN_BACK_EVERY_S)
        self._carry_out: dict[type, Callable[..., None]] = {
            **self._dispatcher.actions, effects.Complete: self._deliver, effects.Fail: self._deliver
        }  # fmt: skip

    # -- any thread --

    def start(self) -> None:
        end_team()  # by the thread that prepared the start
        self._dispatcher.start()
        self._thread.start()
        self._heap_keeper.start()

    def watch_batches(self, watch: BatchWatch) -> None:
        """Watch every batch. Call before ``start``; callbacks return soon and do not raise."""
        self._dispatcher.watch = watch
        self._here.preparation.watch = watch.preparing

    def watch_weights(self, repack: Callable[[str], None], on_stale: Callable[[str], None]) -> None:
        """Set callbacks, on any thread, for experts with missing and with stale packed files. Call before ``start``."""
        self._here.transfers.repack, self._here.transfers.on_stale = repack, on_stale

    def repack(self, expert: str) -> None:
        """Have an expert's missing packed files packed anew, from any thread."""
        if self._here.transfers.repack is not None:
            self._here.transfers.repack(expert)

    def attach(self, workers: Mapping[str, Worker], lost: Callable[[str], None]) -> None:
        """Let other workers carry out what is decided for their executors. Call before ``start``.

        ``lost``: called on the loop's thread, with the name of a lost worker.
        """
        self._dispatcher.workers |= workers
        self._worker_lost = lost

    @property
    def here(self) -> LocalWorker:
        """The worker that is this process."""
        return self._here

    def post(self, message: Message) -> None:
        """Take an answer of a worker, from any thread."""
        self._inbox.put(message)

    def join(self, name: str, worker: Worker, executors: Sequence[ExecutorSpec], pools: Sequence[PoolSpec]) -> None:
        """Add a worker that is ready, or has come back."""

        def join() -> None:
            if self._is_stopped:
                worker.lose("the agent has stopped")
            else:
                self._handle(self._dispatcher.join(name, worker, executors, pools))

        self._call(join)

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
        if isinstance(source, TextSource):
            self._begin_text(source, component, expert)
        request = next(self._numbers)
        self._sources[request] = source
        if precedence is Precedence.IDLE:
            self._idle_request = request
        work = IMAGE
        if isinstance(source, TextSource):
            self._texts.take(request, source)
            work = source.work
        self._inbox.put(events.Arrived(request, component, expert, work, precedence))
        return request

    def _begin_text(self, source: TextSource, component: str | None, expert: str | None) -> None:
        reached = self._routes.experts_of(component) if component is not None else (expert or "",)
        copies = [copy for name in reached for copy in self._copies_of(name)]
        self._texts.begin(source, self._here.text_engines.reached(copies))

    def most_tokens(self, expert: str) -> int | None:
        """Tokens that one text of an expert may hold, alone in its memory; None: unknown."""
        return self._here.text_engines.most_tokens(self._copies_of(expert))

    def _copies_of(self, expert: str) -> list[ExpertCopy]:
        return [copy for copy in self._dispatcher.copies.values() if expert_of(copy.name) == expert]

    @property
    def text_executors(self) -> Collection[int]:
        return self._here.text_engines.by_executor.keys()

    def scale_images(self, experts: Iterable[str]) -> None:
        """Decode JPEGs smaller for these experts. Call before ``start``."""
        self._here.preparation.scaled |= frozenset(experts)

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

    @contextmanager
    def reserving(self, pool: str, size_bytes: int) -> Iterator[int]:
        """Room in a memory for work beside its experts: up to so many bytes, less where more of it is in use."""

        def budget_bytes() -> int:
            return next(each.expert_bytes for each in self._engine.statistics().pools if each.name == pool)

        def reserve() -> int:
            before_bytes = budget_bytes()
            self._handle(events.Reserved(pool, size_bytes))
            return before_bytes - budget_bytes()

        try:
            yield self._call(reserve)
        finally:
            self._inbox.put(events.Reserved(pool, 0))

    def change_line(
        self,
        change: events.LineChanged,
        copies: Mapping[str, ExpertCopy],
        queueing: AbstractContextManager[None] = AT_ONCE,
    ) -> None:
        """Replace the served experts and routes; ``copies``: new ones. Requests submitted before the end of
        ``queueing`` keep their routes, later ones get the new."""
        self._call(lambda: self._change_line(change, copies), queueing)

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
    def scaled(self) -> frozenset[str]:
        """Experts, by name in the line file, with JPEGs decoded smaller."""
        return self._here.preparation.scaled

    @property
    def served(self) -> tuple[Mapping[str, ExpertCopy], PerformanceMatrix]:
        return self._dispatcher.copies, self._dispatcher.matrix

    @property
    def lost(self) -> Mapping[str, str]:
        return dict(self._dispatcher.lost)

    @property
    def workers(self) -> Collection[str]:
        """Names of the workers beside this process that are there."""
        return [name for name in self._dispatcher.workers if name]

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
            ending.callback(give_back_unused)
            ending.callback(self._heap_keeper.stop, STOP_S)
            ending.callback(self._sources.clear)
            self.leaves_threads = not self._dispatcher.stop(STOP_S)
            if self._crash is not None:
                self._crash.leaves_threads |= self.leaves_threads
            if not self.leaves_threads:
                ending.callback(self._here.close)

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise self._crash

    def _call(self, work: Callable[[], Answer], queueing: AbstractContextManager[None] = AT_ONCE) -> Answer:
        """Call on the loop's thread, or on this one after the loop's has ended."""
        if current_thread() is self._thread:
            return work()
        answer: Future[Answer] = Future()
        with queueing:
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
                    self._lose_device(message)
                elif isinstance(message, WorkerLost):
                    if self._lose(self._dispatcher.lose_worker(message)):
                        self._worker_lost(message.worker)
                elif callable(message):
                    message()
                else:
                    self._handle(message)
                    self._look_around()
                self._lose(self._dispatcher.lose_overdue())
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
            self._dispatcher.batch_answered(event)
        began_s = self._clock()
        decided = self._engine.handle(event, began_s)
        self.record.decided(event, began_s, self._clock())
        for effect in decided:
            self._carry_out.get(type(effect), log_effect)(effect)
            if isinstance(effect, effects.Assigned) and self._open.runs_quantum(effect.executor):
                self._texts.end_quantum(effect.executor)
        if isinstance(event, events.Loaded | events.LoadFailed):
            self._open.close_load(event.load)

    def _change_line(self, change: events.LineChanged, copies: Mapping[str, ExpertCopy]) -> None:
        self._routes = change.graph
        self._dispatcher.change_line(change, copies)
        self._handle(change)

    def _lose_device(self, breakdown: Breakdown) -> None:
        self._lose(self._dispatcher.lose_device(breakdown))
        if breakdown.load in self._open.loads:  # into a memory that stays
            self._handle(events.LoadFailed(breakdown.load, str(breakdown.error), permanent=False))

    def _lose(self, loss: events.ExecutorsLost | None) -> bool:
        if loss is None:
            return False
        self._handle(loss)
        self._dispatcher.keep_pools({pool.name for pool in self._engine.statistics().pools})
        self._look_around()
        return True

    def _deliver(self, effect: effects.Complete | effects.Fail) -> None:
        for worker in self._dispatcher.workers.values():
            worker.end(effect.request)
        self._on_outcome(effect.request, effect.outcome)
        self.record.request_ended(effect.request)
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
            self._dispatcher.watch.idle()

    def _check_invariants(self) -> None:
        self._engine.check_invariants()
        ledgers = {pool.name: pool.used_bytes for pool in self._engine.statistics().pools}
        for name in self._here.stores.keys() & ledgers.keys():
            held_bytes = self._here.stores[name].statistics().used_bytes
            assert held_bytes == ledgers[name], (
                f"memory {name} holds {held_bytes} bytes, its ledger counts {ledgers[name]}"
            )
        assert not self._here.preparation.requests, "something is prepared for a request that has its outcome"

    def _snapshot(self) -> LoopStatistics:
        workers = WorkerStatistics.sum(worker.statistics() for worker in self._dispatcher.workers.values())
        return LoopStatistics(
            *(getattr(workers, each.name) for each in fields(workers)),
            engine=self._engine.statistics(),
            requests_in_flight=self.requests_in_flight,
        )
