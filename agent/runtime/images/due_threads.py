"""Thread pool ordered by deadline, oldest first; a prioritised task comes before all others.

Guarantees: a task runs once, on the first thread that claims it (in the pool or outside), or is cancelled. At most the
allowed number of threads begin tasks. The threads are daemons.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[Callable[["Result"], None]], None]
    _Work = deque[tuple["DueTask[Result]", "Call[Result]"]]  # a task and its call; empty once a thread has claimed them

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LEAST_LISTED = 64  # tasks; a shorter list is not cleared of claimed tasks


class DueTask(Generic[Result]):
    """Call with a deadline, and its result. The call receives an answer function, and may continue after its answer.

    ``is_short``: the call takes less time than a wait for another thread.
    """

    def __init__(self, call: Call[Result] | None, due_s: float, *, is_short: bool = False) -> None:
        self.work: _Work[Result] = deque([] if call is None else [(self, call)])
        self.due_s = due_s
        self.is_short = is_short
        self.future: Future[Result] = Future()

    @property
    def is_open(self) -> bool:
        return bool(self.work)

    @classmethod
    def done(cls, result: Result) -> DueTask[Result]:
        task: DueTask[Result] = cls(None, -math.inf)
        task.future.set_result(result)
        return task

    def begin(self) -> None:
        """Run the task on the calling thread, unless a thread has claimed it."""
        if (held := _claimed(self.work)) is not None:
            self.carry_out(held[1])

    def cancel(self) -> None:
        if _claimed(self.work) is not None:
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


def _claimed(work: _Work[Result]) -> tuple[DueTask[Result], Call[Result]] | None:
    """None for all callers but the first: ``pop`` is atomic."""
    with suppress(IndexError):
        return work.pop()
    return None


class DueThreads:
    """At most ``threads``, started as needed; each calls ``begin`` first. ``allow`` lowers the number that may work."""

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
        """Queue a call by its deadline. Raises RuntimeError once stopped."""
        task: DueTask[Result] = DueTask(call, due_s, is_short=is_short)
        with self._changed:
            if self._is_stopped:
                raise RuntimeError(f"the threads {self._name} have been stopped")
            self._push(task.work, due_s)
        return task

    def prioritise(self, task: DueTask[Result]) -> None:
        """Move an awaited task before all others; a task of another pool moves here."""
        with self._changed:
            if task.is_open and task.due_s != -math.inf and not self._is_stopped:
                task.due_s = -math.inf
                self._push(task.work, task.due_s)  # now listed twice; the second entry will be claimed already

    def allow(self, threads: int) -> None:
        """Limit the threads that may begin tasks from now on."""
        with self._changed:
            has_more = threads > self._allowed
            self._allowed = threads
            if has_more and self._tasks:
                self._changed.notify(min(threads, len(self._tasks)))

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the threads after their current tasks, cancel other tasks; False after the timeout."""
        with self._changed:
            self._is_stopped = True
            waiting, self._tasks = self._tasks, []
            self._changed.notify_all()
        for _, _, work in waiting:
            if (held := _claimed(work)) is not None:
                held[0].future.cancel()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _push(self, work: _Work[Result], due_s: float) -> None:
        if len(self._tasks) >= self._clears_at:  # drop claimed tasks: an idle pool would keep them
            self._tasks = [each for each in self._tasks if each[2]]
            heapify(self._tasks)
            self._clears_at = max(2 * len(self._tasks), LEAST_LISTED)
        heappush(self._tasks, (due_s, next(self._number), work))
        self._changed.notify()
        if self._idle < len(self._tasks) and len(self._threads) < self._count:
            thread = Thread(target=self._run, name=f"{self._name}_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        self._begin()
        while (work := self._next()) is not None:
            task, call = work
            task.carry_out(call)
            del work, task, call  # else the result stays in memory until the next task

    def _next(self) -> tuple[DueTask[Any], Call[Any]] | None:
        with self._changed:
            self._idle += 1
            while True:
                self._changed.wait_for(
                    lambda: self._is_stopped or (self._tasks and len(self._threads) - self._idle < self._allowed)
                )
                if self._is_stopped:
                    return None
                held = _claimed(heappop(self._tasks)[2])
                if held is not None:
                    self._idle -= 1
                    return held
