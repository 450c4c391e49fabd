"""Texts between an event loop and the desk, whose threads tell the pieces.

Guarantees: a caller that stops waiting cancels its text; a text past its deadline ends, even if it never began; the
desk never blocks the loop, and a caller that reads slowly delays itself alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from agent.api.calls.desk import TextEnd
from agent.api.calls.orders import anew, taken, withdraw
from experts.daemon_threads import DaemonThreads
from experts.errors import OrderRefused
from experts.llm.serving.generation import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from agent.api.calls.desk import Desk, TextModelView, TextOrder, TextPiece

LATE_S = 1.0  # for the writer to report the end

Told: TypeAlias = "TextPiece | TextEnd"
Given = ParamSpec("Given")
Result = TypeVar("Result")


class TextCalls:
    """The desk, called from an event loop. ``threads``: for orders, each of which takes as long as tokenising."""

    def __init__(self, desk: Desk, threads: int = 2) -> None:
        self.under_way = 0
        self._desk = desk
        self._ordering = DaemonThreads(threads, "api_text")

    async def ask(self, call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        return await asyncio.wrap_future(self._ordering.submit(call, *given, **named))

    async def models(self) -> Sequence[TextModelView]:
        return await self.ask(self._desk.text_models)

    @asynccontextmanager
    async def written(self, order: TextOrder) -> AsyncIterator[AsyncGenerator[Told, None]]:
        """Pieces of a text, then its end. Leaving the context before the end cancels the text.

        Raises OrderRefused, at once, or inside for a text that fails.
        """
        listener = _Listener()
        ticket = self._ordering.submit(taken, self._desk.generate, order, listener)
        self.under_way += 1
        try:
            text = await asyncio.wrap_future(ticket)
            if isinstance(text, OrderRefused):
                raise anew(text)
            yield listener.told(text.due_s)
        finally:
            self.under_way -= 1
            if not listener.has_ended:
                ticket.add_done_callback(withdraw)

    def stop(self) -> None:
        self._ordering.stop(timeout_s=1.0)


class _Listener:
    """Keeps ``agent.api.calls.desk.TextListener``."""

    def __init__(self) -> None:
        self.has_ended = False
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Told] = deque()
        self._news = asyncio.Event()

    def wrote(self, piece: TextPiece) -> None:
        self._call(piece)

    def ended(self, end: TextEnd) -> None:
        self._call(end)

    async def told(self, due_s: float | None) -> AsyncGenerator[Told, None]:
        """Pieces until the end, or until the deadline. Raises OrderRefused for a text that fails."""
        while True:
            if not self._waiting and not await self._wait(due_s):
                yield TextEnd(Ending.DEADLINE, None, 0, 0, 0.0)
                return
            one = self._waiting.popleft()
            if isinstance(one, TextEnd):
                self.has_ended = True
                if one.failure is not None:
                    raise one.failure
                yield one
                return
            yield one

    async def _wait(self, due_s: float | None) -> bool:
        """True once something was written."""
        self._news.clear()
        rest_s = None if due_s is None else max(due_s + LATE_S - time.monotonic(), 0.0)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), rest_s)
        return bool(self._waiting)

    def _call(self, told: Told) -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            self._loop.call_soon_threadsafe(self._hear, told)

    def _hear(self, told: Told) -> None:
        self._waiting.append(told)
        self._news.set()
