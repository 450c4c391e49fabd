"""Places of one bound, shared by its peers: a lone peer may hold all, and yields when others come.

Guarantees: whoever comes gets a place while a peer that yields would still hold no less than the newcomer: its place
that has been silent longest ends. A place that was silent for ``silent_s`` yields to anyone. For one thread.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING
from urllib.parse import unquote

from agent.line_file.api import is_loopback_name

if TYPE_CHECKING:
    from collections.abc import Callable


class Place:
    """``size``: its part of the bound, 1 for a call, or bytes. ``end``: called once the place has yielded; None: it
    never does."""

    def __init__(self, shares: Shares, peer: str, size: int, end: Callable[[], object] | None) -> None:
        self._shares = shares
        self.peer = peer
        self.size = size
        self.end = end
        self.heard_s = 0.0
        self.is_busy: Callable[[], bool] = lambda: False  # waits for our answer, so that it is not silent

    def touch(self) -> None:
        """The peer was heard: others' places are silent for longer."""
        self._shares._touch(self)

    def offer(self, end: Callable[[], object]) -> None:
        """The peer is waited for: the place yields from now on; one that yields already, by ``end``, in its turn."""
        if self.end is None:
            self._shares._touch(self, is_new=self.size > 0)
        self.end = end

    def keep(self, size: int | None = None) -> None:
        """Keep the place, or so much of it: it yields no longer."""
        self._shares._keep(self, self.size if size is None else size)

    def leave(self) -> None:
        """Idempotent, also for a place that has yielded."""
        self._shares._keep(self, 0)


class Shares:
    def __init__(self, size: int, silent_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = self.free = size
        self._silent_s = silent_s
        self._clock = clock
        self._yielding: dict[Place, None] = {}  # silent longest first
        self._held: Counter[str] = Counter()

    def held(self, peer: str) -> int:
        return self._held[peer]

    def take(self, peer: str, end: Callable[[], object] | None = None, size: int = 1, spared: int = 0) -> Place | None:
        """A place, with ``spared`` left free; None if none is free and nobody yields."""
        while self.free < size + spared:
            yielding = self._first_to_yield(peer, size)
            if yielding is None:
                return None
            end_ = yielding.end
            yielding.leave()
            if end_ is not None:
                end_()
        place = Place(self, peer, size, end)
        self.free -= size
        self._held[peer] += size
        self._touch(place, is_new=end is not None)
        return place

    def _first_to_yield(self, peer: str, size: int) -> Place | None:
        if not self._yielding:
            return None
        largest = max(self._yielding, key=lambda place: self._held[place.peer])
        if self._held[largest.peer] - largest.size >= self._held[peer] + size:
            return largest
        until_s = self._clock() - self._silent_s
        silent = takewhile(lambda place: place.heard_s <= until_s, self._yielding)
        return next((place for place in silent if not place.is_busy()), None)

    def _touch(self, place: Place, *, is_new: bool = False) -> None:
        if is_new or place in self._yielding:
            self._yielding.pop(place, None)
            self._yielding[place] = None
            place.heard_s = self._clock()

    def _keep(self, place: Place, size: int) -> None:
        self._yielding.pop(place, None)
        place.end = None
        freed, place.size = max(place.size - size, 0), min(place.size, size)
        self.free += freed
        self._held[place.peer] -= freed
        if not self._held[place.peer]:
            del self._held[place.peer]


def peer_of(name: str, address: str) -> str:
    """Holder of a share: a caller by its name and machine; on this machine, by its connection.

    ``address``: HOST:PORT, or as gRPC gives it (``ipv4:10.0.0.7:4321``, ``ipv6:%5B::1%5D:4321``, ``unix:``).
    """
    address = unquote(address).removeprefix("ipv4:").removeprefix("ipv6:")
    host, _, _ = address.rpartition(":")
    return f"{name}@{address if is_loopback_name(host) or not host else host}"
