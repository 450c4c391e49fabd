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
from heapq import heappop, heappush
from itertools import count
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DueTask(Generic[Result]):
    """A call that is due at some time, and its result. The call is given what to answer with, and may go on after."""

    def __init__(self, call: Callable[[Callable[[Result], None]], None] | None, due_s: float) -> None:
        self._call = call  # None once somebody carries it out
        self._claiming = Lock()
        self.due_s = due_s
        self.future: Future[Result] = Future()

    @property
    def is_open(self) -> bool:
        """Does nobody carry it out yet?"""
        return self._call is not None

    def claim(self) -> Callable[[Callable[[Result], None]], None] | None:
        """Its call, for the one who comes first; None for the others, and once it was cancelled."""
        with self._claiming:
            call, self._call = self._call, None
        return None if self.future.cancelled() else call

    @classmethod
    def done(cls, result: Result) -> DueTask[Result]:
        """One that has nothing to do any more."""
        task: DueTask[Result] = cls(None, -math.inf)
        task.future.set_result(result)
        return task

    def begin(self) -> None:
        """Carry it out on the calling thread, unless somebody has begun it."""
        call = self.claim()
        if call is not None:
            self.carry_out(call)

    def carry_out(self, call: Callable[[Callable[[Result], None]], None]) -> None:
        """Unless it was cancelled."""
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
        self._tasks: list[tuple[float, int, DueTask[Any]]] = []  # a heap
        self._number = count()
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._idle = 0
        self._is_stopped = False

    def submit(self, call: Callable[[Callable[[Result], None]], None], due_s: float) -> DueTask[Result]:
        """Have it called when it is the first that is due. Raises RuntimeError once stopped."""
        task: DueTask[Result] = DueTask(call, due_s)
        with self._changed:
            if self._is_stopped:
                raise RuntimeError(f"the threads {self._name} have been stopped")
            self._push(task)
        return task

    def hurry(self, task: DueTask[Result]) -> None:
        """Somebody waits for it: it comes before all others, unless it has begun. It may be one of other threads."""
        with self._changed:
            if task.is_open and task.due_s != -math.inf and not self._is_stopped:
                task.due_s = -math.inf
                self._push(task)  # it is listed twice: whoever comes to the second finds it begun

    def allow(self, threads: int) -> None:
        """No more than so many of them begin something from now on."""
        with self._changed:
            has_more = threads > self._allowed
            self._allowed = threads
            if has_more and self._tasks:
                self._changed.notify(threads)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the threads after what they work on; False if that took longer. What was not begun is cancelled."""
        with self._changed:
            self._is_stopped = True
            waiting, self._tasks = self._tasks, []
            self._changed.notify_all()
        for _, _, task in waiting:
            task.future.cancel()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _may_begin(self) -> bool:
        return len(self._threads) - self._idle < self._allowed

    def _push(self, task: DueTask[Result]) -> None:
        heappush(self._tasks, (task.due_s, next(self._number), task))
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
            del work, task, call  # what they hold is not kept until the next one comes

    def _next(self) -> tuple[DueTask[Any], Callable[[Callable[[Any], None]], None]] | None:
        with self._changed:
            self._idle += 1
            while True:
                self._changed.wait_for(lambda: self._is_stopped or (self._tasks and self._may_begin))
                if self._is_stopped:
                    return None
                task = heappop(self._tasks)[2]
                call = task.claim()
                if call is not None:
                    self._idle -= 1
                    return task, call
