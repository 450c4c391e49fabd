"""Thread pool of daemon threads: calls run in order, and a hanging call does not keep its process alive.

The interpreter joins a ThreadPoolExecutor's threads when it ends. A thread that hangs in a driver or on a network share
would keep its process alive for good, invisible to a watchdog.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Params = ParamSpec("Params")
Result = TypeVar("Result")


_Task: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"  # call, future of its result


class DaemonThreads:
    """Pool of at most ``count`` threads, started on demand; each thread calls ``begin`` first."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._count = count
        self._name = name
        self._begin = begin
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._is_stopped = False
        self._lock = Lock()

    def submit(self, work: Callable[Params, Result], *given: Params.args, **named: Params.kwargs) -> Future[Result]:
        """Queue a call behind those submitted before. Raises RuntimeError once stopped."""
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
        """End the threads after the submitted calls; False on a timeout: remaining threads end with the process."""
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
        del task  # frees the call's objects before the next call arrives


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the future carries any error
        future.set_exception(error)
    else:
        future.set_result(result)
