"""Leases: which requests wait to begin, and which have begun and hold bytes of a memory until their step ends.

A request of an expert that counts in tokens comes to hold more with each of them. Its lease is taken when its first
batch starts and given back when its step ends, however it does. One for the worst case lacks no room for going on
(Orca, section 4.2). One for less may turn out too small: it grows where there is room for that, and is given back
where there is not, so that nobody holds anything while it waits, and nobody waits for another in a circle.

Guarantees: no memory's leases exceed its share; a request that waits holds none, one that has begun holds exactly its
own. With a bounded policy nobody takes what all those together need who wait in the same memory and were queued
``max_overtake_s`` or more before it, whether or not their experts are here: so whoever waits finds room in the end,
however many smaller ones come, and while it does not others may have what it leaves. Without leases everything here
is empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from agent.core.pool import ModelPool


class Waiting(NamedTuple):
    """A request that has not begun. They sort by when they were queued."""

    since_s: float
    request: int
    size_bytes: int


class Leases:
    """Of all memories of one Engine. ``max_overtake_s``: infinity where nothing is bounded."""

    def __init__(self, pools: Mapping[str, ModelPool], max_overtake_s: float) -> None:
        self._pools = pools
        self._max_overtake_s = max_overtake_s
        self._queues: dict[str, list[Waiting]] = {name: [] for name in pools}  # the oldest first
        self._waiting: dict[int, tuple[str, Waiting]] = {}  # request -> memory
        self._begun: dict[int, str] = {}  # request -> memory

    @property
    def is_any(self) -> bool:
        return bool(self._waiting or self._begun)

    @property
    def waiting(self) -> AbstractSet[int]:
        return self._waiting.keys()

    @property
    def begun(self) -> Mapping[int, str]:
        return self._begun

    def wait(self, request: int, pool: str, size_bytes: int, since_s: float) -> None:
        waiting = Waiting(since_s, request, size_bytes)
        self._waiting[request] = pool, waiting
        insort(self._queues[pool], waiting)

    def can_begin(self, request: int) -> bool:
        name, waiting = self._waiting[request]
        return self._has_room(name, waiting.size_bytes, waiting.since_s)

    def begin(self, request: int) -> None:
        """Its first batch starts. Raises MemoryExceeded where there is no room."""
        name, waiting = self._waiting[request]
        self._pools[name].take_lease(request, waiting.size_bytes)
        self._stop_waiting(request)
        self._begun[request] = name

    def grow(self, request: int, size_bytes: int, since_s: float) -> bool:
        """Whether one that has begun, and was queued at ``since_s``, may come to hold so much in all from now on."""
        name = self._begun[request]
        further_bytes = size_bytes - self._pools[name].leased_bytes(request)
        if further_bytes <= 0:
            return True
        if not self._has_room(name, further_bytes, since_s):
            return False
        self._pools[name].grow_lease(request, size_bytes)
        return True

    def end(self, request: int) -> None:
        if request in self._waiting:
            self._stop_waiting(request)
        elif request in self._begun:
            self._pools[self._begun.pop(request)].return_lease(request)

    def check_invariants(self) -> None:
        for name, pool in self._pools.items():
            lessees = {request for request, where in self._begun.items() if where == name}
            assert pool.lessees == lessees, f"{name}: leases held by {set(pool.lessees)}, begun are {lessees}"
            expected = sorted(waiting for where, waiting in self._waiting.values() if where == name)
            assert self._queues[name] == expected, f"{name}: those who wait for a lease are miscounted"
        both = self._waiting.keys() & self._begun.keys()
        assert not both, f"requests {both} hold a lease and wait for one"

    def _has_room(self, name: str, size_bytes: int, since_s: float) -> bool:
        room_bytes = self._pools[name].free_lease_bytes - size_bytes
        if room_bytes < 0:
            return False
        if not size_bytes:
            return True
        for older in self._queues[name]:
            if older.since_s + self._max_overtake_s > since_s:
                break
            room_bytes -= older.size_bytes
            if room_bytes < 0:
                return False
        return True

    def _stop_waiting(self, request: int) -> None:
        name, waiting = self._waiting.pop(request)
        queue = self._queues[name]
        del queue[bisect_left(queue, waiting)]
