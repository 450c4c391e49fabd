"""Bytes for messages and bodies in receipt, or not yet counted by the desk; who holds least comes first."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from agent.doors.shares import Place, Shares

if TYPE_CHECKING:
    from collections.abc import Callable


class Budget:
    """``silent_s``: as in ``Shares``."""

    def __init__(self, size_bytes: int, silent_s: float = math.inf) -> None:
        self._shares = Shares(size_bytes, silent_s)
        self._look_s = None if silent_s == math.inf else silent_s
        self._waiting: dict[Room, asyncio.Future[Place]] = {}  # in the order of their coming

    async def take(self, room: Room) -> Place:
        """Wait for the room's bytes, with its ``spared_bytes`` left free. Rooms that spare none delay no others."""
        place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting[room] = place
        try:
            while not place.done():
                self.serve()
                await asyncio.wait((place,), timeout=self._look_s)
            return place.result()
        except BaseException:
            if place.done() and not place.cancelled():
                place.result().leave()
            raise
        finally:
            self._waiting.pop(room, None)
            self.serve()

    def serve(self) -> None:
        """Give free bytes to waiting rooms: of each kind, to the peer that holds least."""
        for spares in (True, False):
            while waiting := [room for room, place in self._waiting.items()
                              if (room.spared_bytes > 0) is spares and not place.done()]:  # fmt: skip
                first = min(waiting, key=lambda room: self._shares.held(room.peer))
                place = self._shares.take(first.peer, first.end, first.size_bytes, first.spared_bytes)
                if place is None:
                    break
                self._waiting[first].set_result(place)


class Room:
    """Bytes reserved for one call's message until the desk has counted it. ``end``: ends a call that yields its bytes
    to another peer before its message has come; None: it never yields. ``call``: the call's own place, if it has one.
    """

    def __init__(
        self, budget: Budget, size_bytes: int, spared_bytes: int, peer: str = "", end: Callable[[], None] | None = None
    ) -> None:
        self.size_bytes, self.spared_bytes, self.peer, self.end = size_bytes, spared_bytes, peer, end
        self._budget = budget
        self.call: Place | None = None
        self._place: Place | None = None

    async def enter(self) -> None:
        self._place = await self._budget.take(self)

    def touch(self) -> None:
        """The caller was heard, or has read."""
        for place in (self._place, self.call):
            if place is not None:
                place.touch()

    def keep(self, size_bytes: int) -> None:
        """Reduce the reservation to the bytes of the received message, which does not yield any more."""
        if self._place is not None:
            self._place.keep(size_bytes)
            self._budget.serve()

    def leave(self) -> None:
        """Release the reservation. Idempotent."""
        self.keep(0)
