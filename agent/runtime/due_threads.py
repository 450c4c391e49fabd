"""A few threads that carry out what is due first first, whenever it was given to them.

Guarantees: each task ends: with its call's result or error, or cancelled before it began; a task that is hurried comes
before all that are not; of those that are due at once, the one that was given first; a task that others hurry, too, or
carry out themselves, is begun by whoever comes first. No more of them work at once than was last allowed, but for what
they had begun before. As those of ``experts.daemon_threads``, these keep no process from ending.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[Callable[["Result"], None]], None]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LEAST_LISTED = 64  # tasks; no list that short is cleared of those that others have begun


class _Work(Generic[Result]):
    """A task and its call, for the one who comes first. It holds nothing any more of what was begun or cancelled."""

    def __init__(self, task: DueTask[Result], call: Call[Result]) -> None:
        self._held: tuple[DueTask[Result], Call[Result]] | None = (task, call)
        self._claiming = Lock()

    @property
    def is_open(self) -> bool:
        return self._held is not None

    def claim(self) -> tuple[DueTask[Result], Call[Result]] | None:
        """None for all but the first."""
        with self._claiming:
            held, self._held = self._held, None
        return held


class DueTask(Generic[Result]):
    """A call that is due at some time, and its result. The call is given what to answer with, and may go on after.

    ``is_short``: it takes less than to wait for another thread.
    """

    def __init__(self, call: Call[Result] | None, due_s: float, *, is_short: bool = False) -> None:
        self.work = None if call is None else _Work(self, call)
        self.due_s = due_s
        self.is_short = is_short
        self.future: Future[Result] = Future()

    @property
    def is_open(self) -> bool:
        return self.work is not None and self.work.is_open

    @classmethod
    def done(cls, result: Result) -> DueTask[Result]:
        task: DueTask[Result] = cls(None, -math.inf)
        task.future.set_result(result)
        return task

    def begin(self) -> None:
        """Carry it out on the calling thread, unless somebody has begun it."""
        held = None if self.work is None else self.work.claim()
        if held is not None:
            self.carry_out(held[1])

    def cancel(self) -> None:
        if self.work is not None and self.work.claim() is not None:
            self.future.cancel()

    def carry_out(self, call: Call[Result]) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            call(self.future.set_result)
        except BaseException as error:
            if self.future.done():
                logger.exception("due_task_broke after its answer")
            else:
                self.future.set_exception(error)


class DueThreads:
    """At most ``count`` of them, started as they are needed; each calls ``begin`` first. At first all may work."""

    def __init__(self, threads: int, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._count = self._allowed = threads
        self._name = name
        self._begin = begin
        self._tasks: list[tuple[float, int, _Work[Any]]] = []  # a heap
        self._clears_at = LEAST_LISTED
        self._number = count()
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._idle = 0
        self._is_stopped = False

    def submit(self, call: Call[Result], due_s: float, *, is_short: bool = False) -> DueTask[Result]:
        """Have it called when it is the first that is due. Raises RuntimeError once stopped."""
        task: DueTask[Result] = DueTask(call, due_s, is_short=is_short)
        assert task.work is not None, "it has a call"
        with self._changed:
            if self._is_stopped:
                raise RuntimeError(f"the threads {self._name} have been stopped")
            self._push(task.work, due_s)
        return task

    def hurry(self, task: DueTask[Result]) -> None:
        """Somebody waits for it: it comes before all others, unless it has begun. It may be one of other threads."""
        with self._changed:
            if task.work is not None and task.is_open and task.due_s != -math.inf and not self._is_stopped:
                task.due_s = -math.inf
                self._push(task.work, task.due_s)  # it is listed twice: whoever comes to the second finds it begun

    def allow(self, threads: int) -> None:
        """No more than so many of them begin something from now on."""
        with self._changed:
            has_more = threads > self._allowed
            self._allowed = threads
            if has_more and self._tasks:
                self._changed.notify(min(threads, len(self._tasks)))

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the threads after what they work on; False if that took longer. What was not begun is cancelled."""
        with self._changed:
            self._is_stopped = True
            waiting, self._tasks = self._tasks, []
            self._changed.notify_all()
        for _, _, work in waiting:
            if (held := work.claim()) is not None:
                held[0].future.cancel()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _may_begin(self) -> bool:
        return len(self._threads) - self._idle < self._allowed

    def _push(self, work: _Work[Result], due_s: float) -> None:
        if len(self._tasks) >= self._clears_at:
            self._clear()
        heappush(self._tasks, (due_s, next(self._number), work))
        self._changed.notify()
        if self._idle < len(self._tasks) and len(self._threads) < self._count:
            thread = Thread(target=self._run, name=f"{self._name}_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _clear(self) -> None:
        """Of what others have begun: where none of these threads may work, nobody else comes across it."""
        self._tasks = [each for each in self._tasks if each[2].is_open]
        heapify(self._tasks)
        self._clears_at = max(2 * len(self._tasks), LEAST_LISTED)

    def _run(self) -> None:
        self._begin()
        while (work := self._next()) is not None:
            task, call = work
            task.carry_out(call)
            del work, task, call  # what they hold is not kept until the next one comes

    def _next(self) -> tuple[DueTask[Any], Call[Any]] | None:
        with self._changed:
            self._idle += 1
            while True:
                self._changed.wait_for(lambda: self._is_stopped or (self._tasks and self._may_begin))
                if self._is_stopped:
                    return None
                held = heappop(self._tasks)[2].claim()
                if held is not None:
                    self._idle -= 1
                    return held
