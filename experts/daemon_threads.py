"""Thread pool of daemon threads: calls in order, and no process kept from ending.

A ThreadPoolExecutor's threads are joined when the interpreter ends: one that hangs in a driver, or on a share that does
not answer, keeps its process alive for good, invisible to a watchdog.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Given = ParamSpec("Given")
Result = TypeVar("Result")


_Task: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"  # a call, and where its result goes


class DaemonThreads:
    """At most ``count`` of them, started as they are needed; each calls ``begin`` first."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._count = count
        self._name = name
        self._begin = begin
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._is_stopped = False
        self._lock = Lock()

    def submit(self, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Future[Result]:
        """Have it called behind everything submitted before. Raises RuntimeError once stopped."""
        future: Future[Result] = Future()
        with self._lock:
            if self._is_stopped:
                raise RuntimeError(f"the threads {self._name} have been stopped")
            if len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = Thread(target=_run, args=(self._begin, self._tasks), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._tasks.put((future, lambda: work(*given, **named)))
        return future

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the threads after what was submitted; False if that took longer, and the rest ends with the process."""
        with self._lock:
            if not self._is_stopped:
                for _ in self._threads:
                    self._tasks.put(None)
            self._is_stopped = True
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _run(begin: Callable[[], None], tasks: SimpleQueue[_Task | None]) -> None:
    begin()
    while (task := tasks.get()) is not None:
        _carry_out(*task)
        del task  # what it holds is not kept until the next one comes


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is the future's, whatever it is
        future.set_exception(error)
    else:
        future.set_result(result)
