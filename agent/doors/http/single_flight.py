"""One call to the line at a time, on a thread of its own; concurrent callers share the answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from experts.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

Found = TypeVar("Found")


class SingleFlight(Generic[Found]):
    """``fresh_s``: an answer is shared for so long after its call began; an error is never shared later."""

    def __init__(self, ask: Callable[[], Found], name: str, fresh_s: float = 0.0) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self.thread = DaemonThreads(1, name)
        self._lock = threading.Lock()
        self._under_way: Future[Found] | None = None
        self._began_s = 0.0

    async def answer(self, timeout_s: float) -> Found:
        """Raises TimeoutError, and the line's own errors."""
        with self._lock:
            if self._under_way is None or self._is_over(self._under_way):
                self._began_s = time.monotonic()
                self._under_way = self.thread.submit(self._ask)
            under_way = self._under_way
        if under_way.done():
            return under_way.result()
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asyncio.wrap_future(under_way))

    def _is_over(self, call: Future[Found]) -> bool:
        if not call.done():
            return False
        return call.exception() is not None or time.monotonic() - self._began_s >= self._fresh_s
