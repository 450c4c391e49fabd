"""ModelPool: the byte ledger of one memory.

Guarantees: weights never exceed ``expert_bytes``, the workspaces of running batches never exceed ``workspace_bytes``,
and what begun requests lease never exceeds ``lease_bytes``; a reservation that would is refused with MemoryExceeded and
changes nothing; a part that several copies share is counted once, while any of them is there; a copy in use, pinned or
on its way is not evictable.
Every change of a copy's residency goes through the table in ``residency``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.residency import Move, Residency, after
from experts.errors import MemoryExceeded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, KeysView

    from agent.core.performance import Footprint, PoolSpec


@dataclass(slots=True)
class Entry:
    copy: str
    expert: str
    footprint: Footprint
    pinned: bool
    loaded_order: int  # when it came, counted over the pool's life
    used_order: int  # when it was last used
    state: Residency = Residency.ABSENT
    uses: int = 0

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
class Part:
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
    _entries: dict[str, Entry] = field(default_factory=dict)
    _parts: dict[str, Part] = field(default_factory=dict)
    _workspaces: dict[int, int] = field(default_factory=dict)
    _leases: dict[int, int] = field(default_factory=dict)  # request -> bytes
    _order: int = 0
    missing_bytes: int = 0  # of what the spec says: the box has less
    missing_lease_bytes: int = 0

    @property
    def expert_bytes(self) -> int:
        return self.spec.expert_bytes - self.missing_bytes

    def set_budget(self, expert_bytes: int) -> None:
        """Keep to so much from now on. Raises MemoryExceeded for more than was planned, or less than what lies here."""
        if expert_bytes > self.spec.expert_bytes:
            raise MemoryExceeded(self.name, expert_bytes, self.spec.expert_bytes)
        if expert_bytes < self.used_bytes:
            raise MemoryExceeded(self.name, self.used_bytes, expert_bytes)
        self.missing_bytes = self.spec.expert_bytes - expert_bytes

    @property
    def lease_bytes(self) -> int:
        return self.spec.lease_bytes - self.missing_lease_bytes

    def set_lease_budget(self, lease_bytes: int) -> None:
        """Lease so much from now on. Raises MemoryExceeded for more than was planned, or less than what is leased."""
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

    def entry(self, copy: str) -> Entry | None:
        return self._entries.get(copy)

    def entries(self) -> Iterator[Entry]:
        """Every copy loading or resident, in the order they came."""
        return iter(self._entries.values())

    def is_resident(self, copy: str) -> bool:
        entry = self._entries.get(copy)
        return entry is not None and entry.is_resident

    def is_evictable(self, copy: str) -> bool:
        entry = self._entries.get(copy)
        return entry is not None and entry.is_evictable

    def holders(self, part: str) -> int:
        held = self._parts.get(part)
        return held.holders if held else 0

    def needed_bytes(self, footprint: Footprint) -> int:
        """What a copy would add to the ledger now: its own bytes and the shared parts that are not held yet."""
        return footprint.own_bytes + sum(part.size_bytes for part in footprint.shared if part.id not in self._parts)

    def freed_bytes(self, copy: str) -> int:
        footprint = self._entries[copy].footprint
        return footprint.own_bytes + sum(
            part.size_bytes for part in footprint.shared if self._parts[part.id].holders == 1
        )

    def can_reserve(self, footprint: Footprint) -> bool:
        return self.needed_bytes(footprint) <= self.free_bytes

    def start_load(self, copy: str, expert: str, footprint: Footprint, *, pinned: bool) -> int:
        """Reserve room and begin; the bytes that were reserved. Raises MemoryExceeded, IllegalMove."""
        held = self._entries.get(copy)
        state = after(copy, held.state if held else Residency.ABSENT, Move.START_LOAD)
        needed = self.needed_bytes(footprint)
        if needed > self.free_bytes:
            raise MemoryExceeded(self.name, needed, self.free_bytes)
        self._order += 1
        self._entries[copy] = Entry(copy, expert, footprint, pinned, self._order, self._order, state)
        self._hold(footprint)
        self.used_bytes += needed
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return needed

    def loaded(self, copy: str) -> None:
        self._step(copy, Move.LOADED)

    def load_failed(self, copy: str) -> None:
        self._step(copy, Move.LOAD_FAILED)
        self._forget(copy)

    def evict(self, copy: str) -> int:
        """Let go of a copy; the bytes that it freed. Raises IllegalMove for one in use or on its way."""
        freed = self.freed_bytes(copy)
        self._step(copy, Move.EVICT)
        self._forget(copy)
        return freed

    def start_use(self, copy: str) -> None:
        """A batch runs on it, or it is being copied on: it stays until the last use ends."""
        entry = self._step(copy, Move.START_USE)
        entry.uses += 1
        self._order += 1
        entry.used_order = self._order

    def end_use(self, copy: str) -> None:
        entry = self._entries[copy]
        if entry.uses == 1:
            self._step(copy, Move.END_USE)
        entry.uses -= 1

    def workspace_for(self, executor: int) -> int:
        """Bytes an idle executor may take for a batch: what is free, less what the others are still owed."""
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
        """Leave an ended batch's workspace to the next one, but for what exceeds ``size_bytes``."""
        self.workspace_used_bytes -= self._workspaces[executor] - size_bytes
        self._workspaces[executor] = size_bytes

    @property
    def free_lease_bytes(self) -> int:
        return self.lease_bytes - self.lease_used_bytes

    @property
    def lessees(self) -> KeysView[int]:
        return self._leases.keys()

    def take_lease(self, request: int, size_bytes: int) -> None:
        """A request begins, and may come to hold so much. Raises MemoryExceeded, and ValueError for one that has."""
        if request in self._leases:
            raise ValueError(f"{self.name}: request {request} has a lease already")
        if size_bytes > self.free_lease_bytes:
            raise MemoryExceeded(f"{self.name} leases", size_bytes, self.free_lease_bytes)
        self._leases[request] = size_bytes
        self.lease_used_bytes += size_bytes

    def leased_bytes(self, request: int) -> int:
        return self._leases[request]

    def grow_lease(self, request: int, size_bytes: int) -> None:
        """A request that has begun may come to hold so much in all. Raises MemoryExceeded."""
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
        """Recount everything from the entries. Raises AssertionError saying what does not add up."""
        parts = {part.id: part.size_bytes for entry in self._entries.values() for part in entry.footprint.shared}
        own = sum(entry.footprint.own_bytes for entry in self._entries.values())
        assert own + sum(parts.values()) == self.used_bytes, f"{self.name}: ledger is not the sum of what is held"
        assert self.used_bytes <= self.expert_bytes, f"{self.name}: weights over budget"
        assert self.workspace_used_bytes <= self.spec.workspace_bytes, f"{self.name}: workspace over budget"
        assert sum(self._workspaces.values()) == self.workspace_used_bytes, f"{self.name}: workspace miscounted"
        assert self.lease_used_bytes <= self.lease_bytes, f"{self.name}: leases over budget"
        assert sum(self._leases.values()) == self.lease_used_bytes, f"{self.name}: leases miscounted"
        assert parts.keys() == self._parts.keys(), f"{self.name}: shared parts miscounted"
        for entry in self._entries.values():
            assert entry.uses >= 0, f"{self.name}: {entry.copy} has negative uses"
            in_use = entry.state is Residency.IN_USE
            assert in_use == (entry.uses > 0), f"{self.name}: {entry.copy} is {entry.state} with {entry.uses} uses"
            assert entry.state is not Residency.ABSENT, f"{self.name}: {entry.copy} is listed and absent"

    def _step(self, copy: str, move: Move) -> Entry:
        entry = self._entries.get(copy)
        state = after(copy, entry.state if entry else Residency.ABSENT, move)
        assert entry is not None  # the table has no move from ABSENT but start_load
        entry.state = state
        return entry

    def _hold(self, footprint: Footprint) -> None:
        for part in footprint.shared:
            self._parts.setdefault(part.id, Part(part.size_bytes, 0)).holders += 1

    def _forget(self, copy: str) -> None:
        footprint = self._entries.pop(copy).footprint
        self.used_bytes -= footprint.own_bytes
        for part in footprint.shared:
            held = self._parts[part.id]
            held.holders -= 1
            if not held.holders:
                del self._parts[part.id]
                self.used_bytes -= part.size_bytes


def misfits(footprints: Iterable[tuple[str, Footprint, bool]], expert_bytes: int) -> dict[str, int]:
    """Experts that can never run in a memory of this size, with the bytes each would need there.

    ``footprints``: (expert, footprint, pinned). One that is not pinned needs its room beside all the pinned ones.
    """
    return {expert: needed for expert, needed in _needs(footprints).items() if needed > expert_bytes}


def least_bytes(footprints: Iterable[tuple[str, Footprint, bool]]) -> int:
    """The smallest memory in which each of these can run."""
    return max(_needs(footprints).values(), default=0)


def _needs(footprints: Iterable[tuple[str, Footprint, bool]]) -> dict[str, int]:
    listed = tuple(footprints)
    pinned_parts = {part.id: part.size_bytes for _, footprint, pinned in listed if pinned for part in footprint.shared}
    pinned_own = sum(footprint.own_bytes for _, footprint, pinned in listed if pinned)
    pinned_bytes = pinned_own + sum(pinned_parts.values())
    needs: dict[str, int] = {}
    for expert, footprint, pinned in listed:
        parts = sum(part.size_bytes for part in footprint.shared if part.id not in pinned_parts)
        needed = pinned_bytes if pinned else pinned_bytes + footprint.own_bytes + parts
        needs[expert] = max(needed, needs.get(expert, 0))  # an expert may be there in several forms
    return needs
