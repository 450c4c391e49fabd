"""Orders of images and texts between an event loop and the desk, whose threads report verdicts and pieces.

Guarantees: a caller that stops waiting withdraws its order. A text past its deadline ends, even if it never began. The
desk never blocks the loop, and a slow reader delays only itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from agent.doors.access import CALLING, Role, making
from agent.doors.desk import TextEnd
from agent.doors.refusals import copied
from agent.faults.errors import OrderRefused, Reason
from experts.daemon_threads import DaemonThreads
from experts.llm.serving.generation import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from agent.doors.desk import Desk, ImageOrder, TextEvent, TextOrder, VerdictView
    from experts.llm.serving.generation import Piece

NAME_CHARACTERS = 512  # longest serial, reference or key
LATE_S = 1.0  # for the writer's report of the end
_OVERDUE: TextEvent = TextEnd(Ending.DEADLINE, None, 0, 0, 0.0)

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Orders:
    """Desk for an event loop. Texts and images have separate ``Orders``: placing a text takes tokenising."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.under_way = 0
        self._ordering = DaemonThreads(2, "api_order")
        self._forming = DaemonThreads(2, "api_form")  # texts of a form: grammars of callers take seconds at worst
        self._asking = DaemonThreads(4, "api_ask")
        self._converting = DaemonThreads(1, "api_convert")

    async def ask(self, call: Callable[Params, Result], *given: Params.args, **named: Params.kwargs) -> Result:
        return await asyncio.wrap_future(making(self._asking.submit(call, *given, **named)))

    async def aside(self, convert: Callable[Params, Result], *given: Params.args, **named: Params.kwargs) -> Result:
        """Convert a message on a thread: millions of typed numbers take a second, in which others are answered."""
        taken = partial(_taken, convert, *given, **named)
        converted: Result | OrderRefused = await asyncio.wrap_future(self._converting.submit(taken))
        del taken  # holds the message
        if isinstance(converted, OrderRefused):
            raise copied(converted)
        return converted

    async def judged(
        self,
        order: ImageOrder,
        *,
        on_taken: Callable[[], None] = lambda: None,
        on_accepted: Callable[[], None] | None = None,
    ) -> Sequence[VerdictView]:
        """Verdicts of an order. Raises OrderRefused; cancelling withdraws the order. Both callbacks run on the loop.

        ``on_taken``: the desk counts the order. ``on_accepted``: the order is durable, and judged even after a
        cancel.
        """
        if order.is_kept:
            CALLING.get().check(Role.INSPECT)
        names = ("component", "expert", "board", "board_type", "ref", "key")
        check_names(**{name: getattr(order.subject, name) for name in names})
        listener = _ImageListener(on_accepted)
        async with self._placed(listener, self.desk.order, order):
            on_taken()
            end = await listener.end
            if isinstance(end, OrderRefused):
                raise copied(end)
            return end

    @asynccontextmanager
    async def written(self, orders: Sequence[TextOrder]) -> AsyncIterator[AsyncGenerator[tuple[int, TextEvent], None]]:
        """Pieces and ends of texts, each with its order's place. Leaving the context cancels texts without an end.
        Raises OrderRefused on entry, or during iteration for a text that fails."""
        heard = asyncio.Queue[tuple[int, "TextEvent"]]()
        listeners = [_TextListener(place, heard) for place in range(len(orders))]
        async with AsyncExitStack() as placed:
            due_s = []
            for order, listener in zip(orders, listeners, strict=True):
                has_form = order.constraint is not None or order.tools is not None
                threads = self._forming if has_form else self._ordering
                ticket = self._placed(listener, self.desk.generate, order, threads)
                due_s.append((await placed.enter_async_context(ticket)).due_s)
            yield _events(heard, listeners, due_s)

    def stop(self) -> None:
        self._ordering.stop(timeout_s=1.0)
        self._forming.stop(timeout_s=1.0)
        self._asking.stop(timeout_s=1.0)
        self._converting.stop(timeout_s=1.0)

    @asynccontextmanager
    async def _placed(
        self, listener: _Listener, place: Callable[[Any, Any], Result], order: object,
        threads: DaemonThreads | None = None,
    ) -> AsyncIterator[Result]:  # fmt: skip
        """Place an order, first come, first served. Leaving withdraws the order unless its listener is settled."""
        ticket = (threads or self._ordering).submit(_taken, place, order, listener)
        self.under_way += 1
        try:
            given = await asyncio.wrap_future(ticket)
            if isinstance(given, OrderRefused):
                raise copied(given)
            yield given
        finally:
            self.under_way -= 1
            if not listener.is_settled:
                ticket.add_done_callback(_withdraw)


class _Listener:
    """Forwards calls of the desk's threads to the loop. ``is_settled``: leaving no longer withdraws the order."""

    def __init__(self) -> None:
        self.is_settled = False
        self._loop = asyncio.get_running_loop()

    def _soon(self, call: Callable[..., None], *given: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            self._loop.call_soon_threadsafe(call, *given)


class _ImageListener(_Listener):
    """Implements ``agent.doors.desk.Listener``."""

    def __init__(self, on_accepted: Callable[[], None] | None) -> None:
        super().__init__()
        self.end: asyncio.Future[Sequence[VerdictView] | OrderRefused] = self._loop.create_future()
        self._on_accepted = on_accepted

    def accepted(self) -> None:
        if self._on_accepted is not None:
            self._soon(self._accept, self._on_accepted)

    def judged(self, parts: Sequence[VerdictView]) -> None:
        self._soon(self._settle, parts)

    def refused(self, refusal: OrderRefused) -> None:
        self._soon(self._settle, refusal)

    def _accept(self, call: Callable[[], None]) -> None:
        if not self.end.done():
            self.is_settled = True
            call()

    def _settle(self, end: Sequence[VerdictView] | OrderRefused) -> None:
        if not self.end.done():
            self.is_settled = True
            self.end.set_result(end)


class _TextListener(_Listener):
    """Implements ``agent.doors.desk.TextListener`` for the order at a place."""

    def __init__(self, place: int, heard: asyncio.Queue[tuple[int, TextEvent]]) -> None:
        super().__init__()
        self._place = place
        self._heard = heard

    def wrote(self, piece: Piece) -> None:
        self._soon(self._heard.put_nowait, (self._place, piece))

    def ended(self, end: TextEnd) -> None:
        self._soon(self._heard.put_nowait, (self._place, end))


async def _events(
    heard: asyncio.Queue[tuple[int, TextEvent]], listeners: Sequence[_TextListener], due_s: Sequence[float | None]
) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """Pieces of texts until each has ended, or its deadline has passed. Raises OrderRefused for a text that fails."""
    left = {place: None if own_s is None else own_s + LATE_S for place, own_s in enumerate(due_s)}
    while left:
        place, event = min(left, key=lambda each: left[each] or math.inf), _OVERDUE
        until_s = left[place]
        with suppress(TimeoutError):
            async with asyncio.timeout(None if until_s is None else max(until_s - time.monotonic(), 0.0)):
                place, event = await heard.get()
                listeners[place].is_settled |= isinstance(event, TextEnd)
        if place not in left:  # it came after its deadline
            continue
        if isinstance(event, TextEnd):
            del left[place]
            if event.failure is not None:
                raise event.failure
        yield place, event


def _taken(call: Callable[Params, Result], *given: Params.args, **named: Params.kwargs) -> Result | OrderRefused:
    """Return the refusal. As a future's exception, its traceback would hold the image in a cycle with the future.
    Only the garbage collector frees such a cycle, long after memory has run out."""
    try:
        return call(*given, **named)
    except OrderRefused as refused:
        return refused.with_traceback(None)


def _withdraw(ticket: Future[Any]) -> None:
    """Cancel an order, now or once it is taken."""
    if ticket.cancelled() or ticket.exception() is not None:
        return
    given = ticket.result()
    if not isinstance(given, OrderRefused):
        given.cancel()


def check_names(**names: str | None) -> None:
    """Raises OrderRefused for a name that is too long or has a NUL."""
    for what, name in names.items():
        if name is not None and (len(name) > NAME_CHARACTERS or "\x00" in name):
            raise OrderRefused(Reason.INVALID, f"{what} has more than {NAME_CHARACTERS} characters, or a NUL")


def pixels(height: int, width: int, rgb: bytes) -> NDArray[np.uint8]:
    """Pixels from their bytes. Raises OrderRefused for another number of bytes."""
    if height < 1 or width < 1 or height * width * 3 != len(rgb):
        raise OrderRefused(
            Reason.INVALID, f"an image of {height} x {width} pixels has 3 bytes each, and here are {len(rgb)}"
        )
    return np.frombuffer(rgb, np.uint8).reshape(height, width, 3)


async def first_of(*awaited: Awaitable[object]) -> None:
    """Wait for the first of these, then cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
