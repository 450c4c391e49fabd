"""Stored results and boards' verdicts as one stream, followed by new ones.

Guarantees: every stored result after the cursor is sent once, in order, without a gap, also to a slow watcher.
Each board's verdict is sent in its latest form, after the results that led to it. The desk's notifications only
trigger a read from the store. Cursors of another results file, or beyond this file's end, are refused; a
watcher ends when another file replaces its file.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agent.doors.desk import ResultsCursor
from agent.doors.orders import first_of
from agent.doors.refusals import invalid
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from agent.doors.desk import Event, StoredView
    from agent.doors.orders import Orders

PAGE, PAGE_WITH_MAPS = 500, 50  # results per read; pictures have some kilobytes each
ALL = "watch from 0 to have all of this file"


async def watch(
    orders: Orders, place: ResultsCursor, stopping: asyncio.Event, *, with_maps: bool = False
) -> AsyncGenerator[tuple[Event, ResultsCursor], None]:
    """Events after a cursor, each with its own cursor, until the caller closes the iterator. ``with_maps``: include
    anomaly maps. Raises OrderRefused for a cursor of another results file, and at a stop."""
    news, loop = asyncio.Event(), asyncio.get_running_loop()
    most = PAGE_WITH_MAPS if with_maps else PAGE

    async def read(limit: int) -> StoredView:
        read_ = partial(orders.desk.stored_after, with_maps=with_maps)
        page = await orders.ask(read_, place.seq or 0, place.board or 0, limit)
        _check(place, page.end)
        return page

    def wake() -> None:  # on a desk's thread
        with suppress(RuntimeError):  # the loop is closed: no watcher is left
            loop.call_soon_threadsafe(news.set)

    end = (await read(0)).end
    seq, board = end.seq if place.seq is None else place.seq, end.board if place.board is None else place.board
    place = ResultsCursor(end.file, seq, board)
    unsubscribe = orders.desk.subscribe(wake)
    try:
        news.set()  # first read what is stored
        while not stopping.is_set():
            await first_of(news.wait(), stopping.wait())
            news.clear()
            is_more = True
            while is_more:
                page = await read(most)
                for part in page.results:
                    place = replace(place, seq=part.seq)
                    yield part, place
                for number, view in page.boards:
                    place = replace(place, board=number)
                    yield view, place
                is_more = most in (len(page.results), len(page.boards))
    finally:
        unsubscribe()
    raise OrderRefused(Reason.STOPPING, "the agent is stopping - watch again, after the last event received")


def _check(place: ResultsCursor, end: ResultsCursor) -> None:
    """Raises OrderRefused for numbers of another file."""
    if place.file is None and (place.seq or place.board):
        raise invalid("file", f"the results file of these numbers is missing - send it as in the last event, or {ALL}")
    if place.file not in (None, end.file):
        reason = f"these numbers belong to the results file {place.file}, and the line has {end.file} - {ALL}"
        raise OrderRefused(Reason.CURSOR_UNKNOWN, reason)
    if (place.seq or 0) > (end.seq or 0) or (place.board or 0) > (end.board or 0):
        reason = f"the results file {end.file} ends at {end.seq}, its boards at {end.board} - {ALL}"
        raise OrderRefused(Reason.CURSOR_UNKNOWN, reason)
