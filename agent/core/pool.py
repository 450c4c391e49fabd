"""ModelPool: the byte ledger of one memory; Leases: the requests that hold, or wait for, a part of it.

Guarantees: weights never exceed ``expert_bytes``, the workspaces of running batches never exceed ``workspace_bytes``,
and the leases of begun requests never exceed ``lease_bytes``; a reservation beyond that raises MemoryExceeded and
changes nothing. Tensors that several copies share count once. A copy in use, pinned
or being loaded is not evictable. Each change of a copy's residency goes through one table:

    ABSENT --start_load--> LOADING --loaded--> RESIDENT --start_use--> IN_USE
       ^                      |                  |  ^                    |
       +----- load_failed ----+                  |  +----- end_use ------+   (the last of several uses)
       +------------------- evict ---------------+

A copy that runs, or is the source of a load, is IN_USE until its last use ends: so no running expert is evicted. The
pool counts the uses of a copy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from agent.faults.errors import IllegalMove
from experts.errors import MemoryExceeded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, KeysView, Mapping
    from collections.abc import Set as AbstractSet

    from agent.core.performance import Footprint, PoolSpec


class Residency(StrEnum):
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    IN_USE = "in use"


class Move(StrEnum):
    START_LOAD = "start_load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    START_USE = "start_use"
    END_USE = "end_use"
    EVICT = "evict"


MOVES = {
    (Residency.ABSENT, Move.START_LOAD): Residency.LOADING,
    (Residency.LOADING, Move.LOADED): Residency.RESIDENT,
    (Residency.LOADING, Move.LOAD_FAILED): Residency.ABSENT,
    (Residency.RESIDENT, Move.START_USE): Residency.IN_USE,
    (Residency.RESIDENT, Move.EVICT): Residency.ABSENT,
    (Residency.IN_USE, Move.START_USE): Residency.IN_USE,
    (Residency.IN_USE, Move.END_USE): Residency.RESIDENT,
}


def after(copy: str, state: Residency, move: Move) -> Residency:
    """State after a move. Raises IllegalMove with copy, state and move."""
    try:
        return MOVES[state, move]
    except KeyError:
        raise IllegalMove(copy, state, move) from None


@dataclass(slots=True)
class PoolEntry:
    copy: str
    expert: str
    footprint: Footprint
    pinned: bool
    loaded_order: int  # order of loads in this pool
    used_order: int  # order of the latest use
    state: Residency = Residency.ABSENT
    uses: int = 0
    is_spare: bool = False  # used only by requests of idle precedence

    @property
    def is_evictable(self) -> bool:
        return self.state is Residency.RESIDENT and not self.pinned

    @property
    def is_untouched(self) -> bool:
        return self.is_evictable and self.used_order == self.loaded_order

    @property
    def is_resident(self) -> bool:
        return self.state in (Residency.RESIDENT, Residency.IN_USE)


@dataclass(slots=True)
class SharedBytes:
    """Tensors that ``holders`` copies share."""

    size_bytes: int
    holders: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    name: str
    expert_bytes: int
    used_bytes: int
    workspace_bytes: int
    workspace_used_bytes: int
    peak_used_bytes: int
    resident: tuple[str, ...]
    loading: tuple[str, ...]
    lease_bytes: int = 0
    lease_used_bytes: int = 0


@dataclass(slots=True)
class ModelPool:
    spec: PoolSpec
    guaranteed_workspace: dict[int, int] = field(default_factory=dict)  # executor -> bytes kept for a batch of one
    used_bytes: int = 0
    peak_used_bytes: int = 0
    workspace_used_bytes: int = 0
    lease_used_bytes: int = 0
    _entries: dict[str, PoolEntry] = field(default_factory=dict)
    _shared: dict[str, SharedBytes] = field(default_factory=dict)
    _workspaces: dict[int, int] = field(default_factory=dict)
    _leases: dict[int, int] = field(default_factory=dict)  # request -> bytes
    _order: int = 0
    missing_bytes: int = 0  # planned bytes that the box lacks
    reserved_bytes: int = 0  # planned bytes that the shell uses
    missing_lease_bytes: int = 0
    has_spare: bool = False  # saves the search while no copy was ever spare

    @property
    def expert_bytes(self) -> int:
        return self.most_bytes - self.missing_bytes

    @property
    def most_bytes(self) -> int:
        """Planned bytes for weights, without those that the shell uses."""
        return self.spec.expert_bytes - self.reserved_bytes

    def set_budget(self, expert_bytes: int) -> None:
        """Set the budget for weights. Raises MemoryExceeded above ``most_bytes``, or below the bytes in use."""
        if expert_bytes > self.most_bytes:
            raise MemoryExceeded(self.name, expert_bytes, self.most_bytes)
        if expert_bytes < self.used_bytes:
            raise MemoryExceeded(self.name, self.used_bytes, expert_bytes)
        self.missing_bytes = self.most_bytes - expert_bytes

    @property
    def lease_bytes(self) -> int:
        return self.spec.lease_bytes - self.missing_lease_bytes

    def set_lease_budget(self, lease_bytes: int) -> None:
        """Set the budget for leases. Raises MemoryExceeded above the planned one, or below the leased bytes."""
        if lease_bytes > self.spec.lease_bytes:
            raise MemoryExceeded(f"{self.name} leases", lease_bytes, self.spec.lease_bytes)
        if lease_bytes < self.lease_used_bytes:
            raise MemoryExceeded(f"{self.name} leases", self.lease_used_bytes, lease_bytes)
        self.missing_lease_bytes = self.spec.lease_bytes - lease_bytes

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def free_bytes(self) -> int:
        return self.expert_bytes - self.used_bytes

    def entry(self, copy: str) -> PoolEntry | None:
        return self._entries.get(copy)

    def entries(self) -> Iterator[PoolEntry]:
        """Loading and resident copies, in order of their loads."""
        return iter(self._entries.values())

    def is_resident(self, copy: str) -> bool:
        entry = self._entries.get(copy)
        return entry is not None and entry.is_resident

    def is_evictable(self, copy: str) -> bool:
        entry = self._entries.get(copy)
        return entry is not None and entry.is_evictable

    def holders(self, tensors: str) -> int:
        held = self._shared.get(tensors)
        return held.holders if held else 0

    def needed_bytes(self, footprint: Footprint) -> int:
        """Bytes that a copy would add to the ledger now: its own and the missing shared tensors."""
        return footprint.own_bytes + sum(
            shared.size_bytes for shared in footprint.shared if shared.id not in self._shared
        )

    def freed_bytes(self, copy: str) -> int:
        footprint = self._entries[copy].footprint
        return footprint.own_bytes + sum(
            shared.size_bytes for shared in footprint.shared if self._shared[shared.id].holders == 1
        )

    def can_reserve(self, footprint: Footprint) -> bool:
        return self.needed_bytes(footprint) <= self.free_bytes

    def start_load(self, copy: str, expert: str, footprint: Footprint, *, pinned: bool) -> int:
        """Reserve room; returns the reserved bytes. Raises MemoryExceeded, IllegalMove."""
        held = self._entries.get(copy)
        state = after(copy, held.state if held else Residency.ABSENT, Move.START_LOAD)
        needed = self.needed_bytes(footprint)
        if needed > self.free_bytes:
            raise MemoryExceeded(self.name, needed, self.free_bytes)
        self._order += 1
        self._entries[copy] = PoolEntry(copy, expert, footprint, pinned, self._order, self._order, state)
        self._hold(footprint)
        self.used_bytes += needed
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return needed

    def mark_spare(self, copy: str) -> None:
        self._entries[copy].is_spare = True
        self.has_spare = True

    def loaded(self, copy: str) -> None:
        self._step(copy, Move.LOADED)

    def load_failed(self, copy: str) -> None:
        self._step(copy, Move.LOAD_FAILED)
        self._forget(copy)

    def evict(self, copy: str) -> int:
        """Release a copy; returns the freed bytes. Raises IllegalMove for a copy in use, being loaded, or absent."""
        self._step(copy, Move.EVICT)
        freed = self.freed_bytes(copy)
        self._forget(copy)
        return freed

    def start_use(self, copy: str, *, is_spare: bool = True) -> None:
        """Keep a copy until its last use ends: a batch, or a load from it into another memory.

        ``is_spare``: a use by a request of idle precedence, which leaves a spare copy spare.
        """
        entry = self._step(copy, Move.START_USE)
        entry.uses += 1
        entry.is_spare &= is_spare
        self._order += 1
        entry.used_order = self._order

    def end_use(self, copy: str) -> None:
        entry = self._entries[copy]
        if entry.uses == 1:
            self._step(copy, Move.END_USE)
        entry.uses -= 1

    def workspace_for(self, executor: int) -> int:
        """Bytes that an idle executor may take for a batch: free ones, less the guarantees of other executors."""
        owed = sum(
            max(size - self._workspaces.get(other, 0), 0)
            for other, size in self.guaranteed_workspace.items()
            if other != executor
        )
        return self.spec.workspace_bytes - self.workspace_used_bytes - owed

    def take_workspace(self, executor: int, size_bytes: int) -> None:
        """Count a running batch's workspace. Raises MemoryExceeded."""
        if size_bytes > self.workspace_for(executor):
            raise MemoryExceeded(f"{self.name} workspace", size_bytes, self.workspace_for(executor))
        self._workspaces[executor] = size_bytes
        self.workspace_used_bytes += size_bytes

    def return_workspace(self, executor: int) -> None:
        self.workspace_used_bytes -= self._workspaces.pop(executor)

    def keep_workspace(self, executor: int, size_bytes: int) -> None:
        """Reduce an ended batch's workspace to ``size_bytes``, for the next batch."""
        self.workspace_used_bytes -= self._workspaces[executor] - size_bytes
        self._workspaces[executor] = size_bytes

    @property
    def free_lease_bytes(self) -> int:
        return self.lease_bytes - self.lease_used_bytes

    @property
    def lessees(self) -> KeysView[int]:
        return self._leases.keys()

    def take_lease(self, request: int, size_bytes: int) -> None:
        """Reserve a begun request's bytes. Raises MemoryExceeded, and ValueError for a request with a lease."""
        if request in self._leases:
            raise ValueError(f"{self.name}: request {request} has a lease already")
        if size_bytes > self.free_lease_bytes:
            raise MemoryExceeded(f"{self.name} leases", size_bytes, self.free_lease_bytes)
        self._leases[request] = size_bytes
        self.lease_used_bytes += size_bytes

    def leased_bytes(self, request: int) -> int:
        return self._leases[request]

    def grow_lease(self, request: int, size_bytes: int) -> None:
        """Raise a lease to ``size_bytes`` in all. Raises MemoryExceeded."""
        further_bytes = size_bytes - self._leases[request]
        if further_bytes > self.free_lease_bytes:
            raise MemoryExceeded(f"{self.name} leases", further_bytes, self.free_lease_bytes)
        self._leases[request] = size_bytes
        self.lease_used_bytes += further_bytes

    def return_lease(self, request: int) -> None:
        self.lease_used_bytes -= self._leases.pop(request)

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            name=self.name,
            expert_bytes=self.expert_bytes,
            used_bytes=self.used_bytes,
            workspace_bytes=self.spec.workspace_bytes,
            workspace_used_bytes=self.workspace_used_bytes,
            peak_used_bytes=self.peak_used_bytes,
            resident=tuple(entry.copy for entry in self._entries.values() if entry.is_resident),
            loading=tuple(entry.copy for entry in self._entries.values() if not entry.is_resident),
            lease_bytes=self.lease_bytes,
            lease_used_bytes=self.lease_used_bytes,
        )

    def check_invariants(self) -> None:
        """Recount everything from the entries. Raises AssertionError with the mismatch."""
        footprints = [entry.footprint for entry in self._entries.values()]
        shared_bytes = {each.id: each.size_bytes for footprint in footprints for each in footprint.shared}
        own = sum(footprint.own_bytes for footprint in footprints)
        assert own + sum(shared_bytes.values()) == self.used_bytes, f"{self.name}: ledger is not the sum of its copies"
        assert self.used_bytes <= self.expert_bytes, f"{self.name}: weights over budget"
        assert self.workspace_used_bytes <= self.spec.workspace_bytes, f"{self.name}: workspace over budget"
        assert sum(self._workspaces.values()) == self.workspace_used_bytes, f"{self.name}: workspace miscounted"
        assert self.lease_used_bytes <= self.lease_bytes, f"{self.name}: leases over budget"
        assert sum(self._leases.values()) == self.lease_used_bytes, f"{self.name}: leases miscounted"
        assert shared_bytes.keys() == self._shared.keys(), f"{self.name}: shared tensors miscounted"
        for entry in self._entries.values():
            assert entry.uses >= 0, f"{self.name}: {entry.copy} has negative uses"
            in_use = entry.state is Residency.IN_USE
            assert in_use == (entry.uses > 0), f"{self.name}: {entry.copy} is {entry.state} with {entry.uses} uses"
            assert entry.state is not Residency.ABSENT, f"{self.name}: {entry.copy} is listed and absent"

    def _step(self, copy: str, move: Move) -> PoolEntry:
        entry = self._entries.get(copy)
        state = after(copy, entry.state if entry else Residency.ABSENT, move)
        assert entry is not None  # the table has no move from ABSENT but start_load
        entry.state = state
        return entry

    def _hold(self, footprint: Footprint) -> None:
        for shared in footprint.shared:
            self._shared.setdefault(shared.id, SharedBytes(shared.size_bytes, 0)).holders += 1

    def _forget(self, copy: str) -> None:
        footprint = self._entries.pop(copy).footprint
        self.used_bytes -= footprint.own_bytes
        for shared in footprint.shared:
            held = self._shared[shared.id]
            held.holders -= 1
            if not held.holders:
                del self._shared[shared.id]
                self.used_bytes -= shared.size_bytes


def misfits(footprints: Iterable[tuple[str, Footprint, bool]], expert_bytes: int) -> dict[str, int]:
    """Experts that can never run in a memory of this size, with the bytes that each would need.

    ``footprints``: (expert, footprint, pinned). An expert that is not pinned needs room beside all pinned ones.
    """
    return {expert: needed for expert, needed in _needs(footprints).items() if needed > expert_bytes}


def least_bytes(footprints: Iterable[tuple[str, Footprint, bool]]) -> int:
    """Size of the smallest memory in which each of these can run."""
    return max(_needs(footprints).values(), default=0)


def _needs(footprints: Iterable[tuple[str, Footprint, bool]]) -> dict[str, int]:
    listed = tuple(footprints)
    pinned_shared = {each.id: each.size_bytes for _, footprint, pinned in listed if pinned for each in footprint.shared}
    pinned_own = sum(footprint.own_bytes for _, footprint, pinned in listed if pinned)
    pinned_bytes = pinned_own + sum(pinned_shared.values())
    needs: dict[str, int] = {}
    for expert, footprint, pinned in listed:
        further = sum(each.size_bytes for each in footprint.shared if each.id not in pinned_shared)
        needed = pinned_bytes if pinned else pinned_bytes + footprint.own_bytes + further
        needs[expert] = max(needed, needs.get(expert, 0))  # an expert may have several copies in a memory
    return needs


class LeaseWish(NamedTuple):
    """Lease of a request that has not begun; sorts by the time the request was queued."""

    since_s: float
    size_bytes: int


class Leases:
    """Requests that wait to begin, and begun requests, which hold bytes of a memory until their step ends.

    A request of an expert that counts in tokens needs more memory with each token. Its lease lasts from its first
    batch to the end of its step. A lease for the worst case never lacks room (Orca, section 4.2). A smaller lease grows
    while there is room, and ends otherwise. Waiting requests hold no lease, so no two wait for each other.

    Guarantees: no memory's leases exceed its share. With a bounded policy a request leaves free the bytes of all
    requests that wait for the same memory and were queued ``max_overtake_s`` or more before it. So each request
    eventually finds room, and others may use the rest. ``max_overtake_s``: infinity without a bound.
    """

    def __init__(self, pools: Mapping[str, ModelPool], max_overtake_s: float) -> None:
        self._pools = pools
        self._max_overtake_s = max_overtake_s
        self._queues: defaultdict[str, list[LeaseWish]] = defaultdict(list)  # memory -> oldest first
        self._waiting: dict[int, tuple[str, LeaseWish]] = {}  # request -> memory
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
        waiting = LeaseWish(since_s, size_bytes)
        self._waiting[request] = pool, waiting
        insort(self._queues[pool], waiting)

    def can_begin(self, request: int) -> bool:
        name, waiting = self._waiting[request]
        return self._has_room(name, waiting.size_bytes, waiting.since_s)

    def begin(self, request: int) -> None:
        """Take the lease of a request whose first batch starts. Raises MemoryExceeded."""
        name, waiting = self._waiting[request]
        self._pools[name].take_lease(request, waiting.size_bytes)
        self._stop_waiting(request)
        self._begun[request] = name

    def grow(self, request: int, size_bytes: int, since_s: float) -> bool:
        """Raise a begun request's lease to ``size_bytes``; False without room. ``since_s``: time it was queued."""
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
            assert pool.lessees == lessees, f"{name}: leases taken by {set(pool.lessees)}, begun are {lessees}"
            expected = sorted(waiting for where, waiting in self._waiting.values() if where == name)
            assert self._queues[name] == expected, f"{name}: requests that wait for a lease are miscounted"
        both = self._waiting.keys() & self._begun.keys()
        assert not both, f"requests {both} have a lease and wait for one"

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
