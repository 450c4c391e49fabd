"""Stored results as one stream: those that are there, then those to come.

Guarantees: every stored result above the first number is told once, in order, without a gap, however slow its watcher
is: what the desk tells is only a sign to read on, and results are read from the store alone. A board's verdict comes
behind the results that it was reached by.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from agent.api.calls.desk import BoardView, Part
from agent.api.calls.orders import first_of
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from agent.api.calls.desk import Event
    from agent.api.calls.orders import Orders

PAGE, PAGE_WITH_MAPS = 500, 50  # results read at a time; pictures are of some kilobytes each
BOARDS_WAITING = 10_000  # verdicts for a watcher that does not read
BEHIND = "more boards were judged than wait for one watcher - watch again, and ask for the boards that matter"


class Watch:
    """One watcher. ``after_seq``: None for results to come only. ``with_maps``: where images are anomalous, too."""

    def __init__(self, orders: Orders, after_seq: int | None, *, with_maps: bool = False) -> None:
        self._orders = orders
        self._seq = after_seq
        self._read = partial(orders.desk.results_after, with_maps=with_maps)
        self._page = PAGE_WITH_MAPS if with_maps else PAGE
        self._boards: deque[BoardView] = deque()
        self._is_behind = False  # a board's verdict had no room
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def events(self, stopping: asyncio.Event) -> AsyncGenerator[Event, None]:
        """Until the agent stops, which raises OrderRefused, or whoever iterates ends it."""
        end = self._orders.desk.subscribe(self._tell)
        try:
            self._news.set()  # what is there already
            while not stopping.is_set():
                await first_of(self._news.wait(), stopping.wait())
                self._news.clear()
                is_behind = self._is_behind
                boards = [self._boards.popleft() for _ in range(len(self._boards))]
                async for part in self._stored():
                    yield part
                for board in boards:
                    yield board
                if is_behind:
                    raise OrderRefused(Refusing.QUEUE_FULL, BEHIND, 0.0)
        finally:
            end()
        raise OrderRefused(Refusing.STOPPING, "the agent is stopping - watch again, after the last number that came")

    async def _stored(self) -> AsyncIterator[Part]:
        """What is stored by now, and was not told yet."""
        while self._seq is not None:
            page = await self._orders.ask(self._read, self._seq, self._page)
            for part in page:
                self._seq = part.seq
                yield part
            if len(page) < self._page:
                return

    def _tell(self, event: Event) -> None:
        """On a thread of the desk's."""
        try:
            self._loop.call_soon_threadsafe(self._hear, event)
        except RuntimeError:  # the loop is closed: nobody watches any more
            return

    def _hear(self, event: Event) -> None:
        if isinstance(event, Part):
            if self._seq is None and event.seq is not None:
                self._seq = event.seq - 1
        elif len(self._boards) == BOARDS_WAITING:
            self._is_behind = True
        else:
            self._boards.append(event)
        self._news.set()
