"""Stored results and boards' verdicts as one stream, then those to come.

Guarantees: every stored result behind the cursor is told once, in order, without a gap, however slow the watcher is.
Each board's verdict is told as it is when its turn comes, behind the results that led to it. The desk's news only
trigger a read; all is read from the store. Cursors of another results file, or beyond this one's end, are refused; a
watcher ends when another file takes its file's place.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agent.api.calls.desk import ResultsCursor
from agent.api.calls.orders import first_of, invalid
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from agent.api.calls.desk import Event, StoredView
    from agent.api.calls.orders import Orders

PAGE, PAGE_WITH_MAPS = 500, 50  # results read at a time; pictures are of some kilobytes each
ALL = "watch from 0 to have all of this file"


class Watch:
    """Watcher behind a cursor. ``with_maps``: pictures of anomalies, too."""

    def __init__(self, orders: Orders, place: ResultsCursor, *, with_maps: bool = False) -> None:
        self._orders = orders
        self._place = place
        self._read = partial(orders.desk.stored_after, with_maps=with_maps)
        self._page = PAGE_WITH_MAPS if with_maps else PAGE
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def events(self, stopping: asyncio.Event) -> AsyncGenerator[tuple[Event, ResultsCursor], None]:
        """Events with the cursor behind each, until the caller closes the iterator. A stop raises OrderRefused.

        Raises OrderRefused for a place of another results file, too.
        """
        await self._begin()
        end = self._orders.desk.subscribe(self._wake)
        try:
            self._news.set()  # what is there already
            while not stopping.is_set():
                await first_of(self._news.wait(), stopping.wait())
                self._news.clear()
                is_more = True
                while is_more:
                    page = await self._next(self._page)
                    for told in self._told(page):
                        yield told
                    is_more = self._page in (len(page.results), len(page.boards))
        finally:
            end()
        raise OrderRefused(Refusing.STOPPING, "the agent is stopping - watch again, behind the last event that came")

    async def _begin(self) -> None:
        end = (await self._next(0)).end
        seq, board = self._place.seq, self._place.board
        self._place = ResultsCursor(end.file, end.seq if seq is None else seq, end.board if board is None else board)

    async def _next(self, limit: int) -> StoredView:
        page = await self._orders.ask(self._read, self._place.seq or 0, self._place.board or 0, limit)
        _check(self._place, page.end)
        return page

    def _told(self, page: StoredView) -> Iterator[tuple[Event, ResultsCursor]]:
        for part in page.results:
            self._place = replace(self._place, seq=part.seq)
            yield part, self._place
        for number, board in page.boards:
            self._place = replace(self._place, board=number)
            yield board, self._place

    def _wake(self) -> None:
        """On a thread of the desk's."""
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is closed: no watcher is left
            return


def _check(place: ResultsCursor, end: ResultsCursor) -> None:
    """Raises OrderRefused for numbers that are not of the file that was read."""
    if place.file is None and (place.seq or place.board):
        raise invalid("file", f"whose numbers are these? - send it with them, as the last event had it, or {ALL}")
    if place.file not in (None, end.file):
        reason = f"these numbers are of the results file {place.file}, and this one is {end.file} - {ALL}"
        raise OrderRefused(Refusing.CURSOR_UNKNOWN, reason)
    if (place.seq or 0) > (end.seq or 0) or (place.board or 0) > (end.board or 0):
        reason = f"results file {end.file} has come to {end.seq}, its boards to {end.board} - {ALL}"
        raise OrderRefused(Refusing.CURSOR_UNKNOWN, reason)
