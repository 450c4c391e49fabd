"""Orders between the API's event loop and the desk, whose threads tell the verdicts.

Guarantees: a caller that stops waiting withdraws its order; the desk never blocks the loop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from experts.daemon_threads import DaemonThreads
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Future

    from agent.api.calls.desk import Desk, ImageOrder, VerdictView
    from experts.errors import GenerationInvalid

NAME_CHARACTERS = 512  # at most: of a serial, a reference, a key

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Orders:
    """The desk, called from the API's event loop."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.under_way = 0
        self._ordering = DaemonThreads(2, "api_order")
        self._asking = DaemonThreads(4, "api_ask")

    async def ask(self, call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        return await asyncio.wrap_future(self._asking.submit(call, *given, **named))

    async def judged(
        self,
        order: ImageOrder,
        *,
        tell_taken: Callable[[], None] = lambda: None,
        tell_accepted: Callable[[], None] | None = None,
    ) -> Sequence[VerdictView]:
        """Verdicts of an order. Raises OrderRefused; cancelling withdraws the order.

        ``tell_taken``: the desk counts it. ``tell_accepted``: the order is durable, and judged also after a cancel.
        Both are called on the loop.
        """
        names = ("component", "expert", "board", "board_type", "ref", "key")
        check_names(**{name: getattr(order.subject, name) for name in names})
        return await _Placed(self, order, tell_accepted).awaited(tell_taken)

    def submit(self, call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Future[Result]:
        """Call the desk on one of two threads, first come, first served."""
        return self._ordering.submit(call, *given, **named)

    def stop(self) -> None:
        self._ordering.stop(timeout_s=1.0)
        self._asking.stop(timeout_s=1.0)


class _Placed:
    """An order on its way to the desk, or under way there; the desk's listener."""

    def __init__(self, orders: Orders, order: ImageOrder, tell_accepted: Callable[[], None] | None) -> None:
        self._orders = orders
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Sequence[VerdictView] | OrderRefused] = self._loop.create_future()
        self._tell_accepted = tell_accepted
        self._is_kept_anyway = False  # its caller was told that it is accepted
        self._ticket = orders.submit(taken, orders.desk.order, order, self)

    async def awaited(self, tell_taken: Callable[[], None]) -> Sequence[VerdictView]:
        """Verdicts. Raises OrderRefused; cancelling withdraws the order."""
        self._orders.under_way += 1
        try:
            ticket = await asyncio.wrap_future(self._ticket)
            if isinstance(ticket, OrderRefused):
                raise anew(ticket)
            tell_taken()
            end = await self._end
            if isinstance(end, OrderRefused):
                raise anew(end)
            return end
        finally:
            self._orders.under_way -= 1
            self._leave()

    def accepted(self) -> None:
        if self._tell_accepted is not None:
            self._call(self._accept)

    def judged(self, parts: Sequence[VerdictView]) -> None:
        self._call(lambda: None if self._end.done() else self._end.set_result(parts))

    def refused(self, refusal: OrderRefused) -> None:
        self._call(lambda: None if self._end.done() else self._end.set_result(refusal))

    def _accept(self) -> None:
        if self._tell_accepted is not None and not self._end.done():
            self._is_kept_anyway = True
            self._tell_accepted()

    def _call(self, tell: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            self._loop.call_soon_threadsafe(tell)

    def _leave(self) -> None:
        if not self._end.done() or self._end.cancelled():
            self._end.cancel()
            if not self._is_kept_anyway:
                self._ticket.add_done_callback(withdraw)
        del self._ticket  # it may hold its listener, which holds it: let the image go now


def anew(refused: OrderRefused) -> OrderRefused:
    """A copy: the original, once raised, would hold the frames that hold it."""
    return OrderRefused(refused.reason, str(refused), refused.retry_s, field=refused.field)


def taken(call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result | OrderRefused:
    """Return the refusal: as a future's exception its traceback would hold the image, in a cycle with the future,
    which only the garbage collector frees, long after memory has run out."""
    try:
        return call(*given, **named)
    except OrderRefused as refused:
        return refused.with_traceback(None)


def withdraw(ticket: Future[Any]) -> None:
    """Cancel an order, or a text, that was taken, now or once it is."""
    if ticket.cancelled() or ticket.exception() is not None:
        return
    given = ticket.result()
    if not isinstance(given, OrderRefused):
        given.cancel()


def check_names(**names: str | None) -> None:
    """Raises OrderRefused for a name that is too long or has a NUL."""
    for what, name in names.items():
        if name is not None and (len(name) > NAME_CHARACTERS or "\x00" in name):
            raise OrderRefused(Refusing.INVALID, f"{what} has more than {NAME_CHARACTERS} characters, or a NUL")


def invalid(field: str, message: str) -> OrderRefused:
    return OrderRefused(Refusing.INVALID, f"{field}: {message}", field=field)


def refusal_of(error: GenerationInvalid) -> OrderRefused:
    return OrderRefused(Refusing.INVALID, str(error), field=error.field)


async def first_of(*awaited: Awaitable[object]) -> None:
    """Wait for the first of these, then cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
