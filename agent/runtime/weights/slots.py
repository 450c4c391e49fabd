"""SlotStore: the bytes of one memory, cut into slots that experts are loaded into, and the skeletons bound to them.

Guarantees: slots and shared parts have the bytes that the Engine's ledger counts, and with spare regions never exceed
the budget. A shared part is stored once. A load finds the room that the ledger counts: spares are closed first, then
an arena's regions slide together, each while no batch uses it. Loading an expert over another of its layout moves bytes
only: the skeleton stays bound. After a failed slide or rebinding, the copies of that region are damaged: they can only
be evicted.

Assumes: ``reserve`` and ``evict`` are called in the order of the Engine's effects, from one thread; ``materialise``,
``commit`` and ``abandon`` from the thread that loads that slot; ``using`` from any thread.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING

from agent.faults.errors import CopyDamaged, IllegalMove, WorkOverdue
from agent.runtime.machine.memories import ArenaMemory, ArenaRegion
from experts.errors import LoadError, MemoryExceeded
from experts.llm.tiers.moe_experts import MoeStatistics
from experts.packed.weights import tensor_views

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.memories import Memory, Region
    from agent.runtime.weights.moe_loads import MoeLoads, OffloadedCopy
    from agent.runtime.weights.skeletons import SkeletonShelf
    from experts.backends.base import Skeleton
    from experts.packed.weights import PackedExpert, Segment


MOVE_S = 60.0  # a copy within one memory takes milliseconds
MOVE_ADVICE = "look for errors of the device and of its driver in dmesg"


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """One memory. Counters run since the start. ``moe_experts``: use by copies that hold only some."""

    pool: str
    used_bytes: int
    regions_allocated: int
    regions_moved: int
    binds: int
    moe_experts: MoeStatistics


@dataclass(frozen=True, slots=True)
class BoundSkeleton:
    """Skeleton bound to a region and to the regions of its shared parts."""

    packed: PackedExpert
    skeleton: Skeleton
    shared_regions: tuple[Region, ...]

    def shows(self, packed: PackedExpert, shared_regions: Sequence[Region]) -> bool:
        """True if overwriting the bytes suffices to run this expert."""
        return self.packed.layout == packed.layout and [*map(id, self.shared_regions)] == [*map(id, shared_regions)]


@dataclass(slots=True, eq=False)
class Housing:
    """Region with its bound skeletons, one per torch device; a shared part's region has none."""

    region: Region
    bindings: dict[str, BoundSkeleton] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SharedSegment:
    """Segment shared by several slots. The loading thread holds ``filling``; other threads wait for the lock."""

    segment: Segment
    holders: int = 0
    housing: Housing | None = None
    is_filled: bool = False
    filling: Lock = field(default_factory=Lock)

    @property
    def region(self) -> Region:
        return _housed(self.housing).region


@dataclass(slots=True, eq=False)
class Slot:
    """Place of one copy in a memory: its own region and its shared parts."""

    copy: ExpertCopy
    parts: tuple[SharedSegment, ...]
    is_ready: bool = False
    is_damaged: bool = False  # a move failed
    uses: int = 0
    housing: Housing | None = None
    moe: OffloadedCopy | None = None

    @property
    def region(self) -> Region:
        return _housed(self.housing).region

    @property
    def state(self) -> str:
        if self.uses:
            return "in use"
        return "ready" if self.is_ready else "loading"

    def stands_on(self, region: Region) -> bool:
        housings = () if self.housing is None else (self.housing, *(part.housing for part in self.parts))
        return any(housing is not None and housing.region is region for housing in housings)

    def region_of(self, segment: Segment) -> Region:
        if segment.sha256 == self.copy.packed.own.sha256:
            return self.region
        return next(part.region for part in self.parts if part.segment.sha256 == segment.sha256)

    def skeleton(self, device: str) -> Skeleton:
        """Module that runs this copy on a torch device. Raises LoadError if the store binds none for that device."""
        binding = _housed(self.housing).bindings.get(device)
        if binding is None:
            raise LoadError(self.copy.expert.id, f"its copy in this memory is not bound for {device}")
        return binding.skeleton


def _housed(housing: Housing | None) -> Housing:
    assert housing is not None, "materialise comes first"
    return housing


class SlotStore:
    """Slots of one memory. ``devices``: torch devices that run from the memory; none for a cache.

    ``moe_loads``: for copies that hold only some of their moe_experts; None without such copies.
    """

    def __init__(
        self, memory: Memory, budget_bytes: int, devices: Sequence[str], shelf: SkeletonShelf,
        moe_loads: MoeLoads | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.pool = memory.pool
        self._budget_bytes = budget_bytes
        self.devices_of: Callable[[str], Sequence[str]] = lambda copy: devices  # devices that a copy is bound for
        self._shelf = shelf
        self._moe_loads = moe_loads
        self._moe_of_gone = MoeStatistics()
        self._slots: dict[str, Slot] = {}
        self._parts: dict[str, SharedSegment] = {}
        self._spares: list[Housing] = []  # oldest first
        self._ending: list[Housing] = []  # of evicted copies whose threads may still write there
        self._lock = Lock()  # guards all fields above
        self._calm = Condition(self._lock)  # notified at the end of a use, move or load of a slot
        self._stilled: Region | None = None  # region to be moved: no new use may begin
        self._is_moving = False
        self._changing = Lock()  # taken while regions are allocated, closed or bound
        self._held_bytes = 0
        self._regions_allocated = self._regions_moved = self._binds = 0

    def set_budget(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        if not self._changing.acquire(blocking=False):
            return
        try:
            while self._held_bytes > self._budget_bytes and (housing := self._oldest_spare()) is not None:
                self._drop(housing)
        finally:
            self._changing.release()

    def reserve(self, copy: ExpertCopy) -> Slot:
        """Place for a copy, without memory yet. Raises IllegalMove for a copy that already has one."""
        with self._lock:
            present = self._slots.get(copy.name)
            if present is not None:
                raise IllegalMove(copy.name, present.state, "reserve")
            parts = tuple(self._parts.setdefault(segment.sha256, SharedSegment(segment)) for segment in copy.parts)
            for part in parts:
                part.holders += 1
            slot = self._slots[copy.name] = Slot(copy, parts)
            return slot

    def materialise(self, slot: Slot) -> None:
        """Allocate the memory of a reserved slot and bind its skeletons; the caller fills the bytes.

        Raises MemoryExceeded, BackendUnavailable, WeightsError; the slot must then be abandoned.
        """
        with self._calm:
            self._calm.wait_for(lambda: not self._ending)
        with self._changing:
            for part in slot.parts:
                if part.housing is None:
                    part.housing = self._shared_housing(slot, part.segment)
            slot.housing = self._own_housing(slot)
            devices = self.devices_of(slot.copy.name)
            if slot.copy.is_offloaded and devices:
                assert self._moe_loads is not None, "no loads of moe_experts"
                slot.moe = self._moe_loads.offload(slot.copy, lambda: slot.region, self.memory)
            for device in devices:
                self._bind(slot, device)

    def commit(self, slot: Slot) -> None:
        with self._calm:
            slot.is_ready = True
            self._calm.notify_all()

    def abandon(self, slot: Slot) -> None:
        with self._calm:
            self._release(slot)
            self._calm.notify_all()

    def evict(self, copy: str) -> None:
        """Release a copy at once; a later load waits for the threads of its moe_experts.

        Raises IllegalMove for a copy that is absent, loading or in use, WorkOverdue if a move takes longer than MOVE_S.
        """
        with self._calm:
            if not self._calm.wait_for(lambda: not (self._is_moving and self._is_stilled(copy)), MOVE_S):
                raise WorkOverdue(f"moving {copy} in {self.pool}", MOVE_S, MOVE_ADVICE, self.pool, is_batch=False)
            slot = self._ready(copy, "evict")
            if slot.uses:
                raise IllegalMove(copy, slot.state, "evict")
            self._release(slot)

    def ready(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(name for name, slot in self._slots.items() if slot.is_ready)

    @contextmanager
    def using(self, copy: str) -> Iterator[Slot]:
        """Context in which a copy is not evicted. Raises IllegalMove unless the copy is ready, CopyDamaged."""
        with self.using_together((copy,)) as slots:
            yield slots[copy]

    @contextmanager
    def using_together(self, copies: Collection[str]) -> Iterator[dict[str, Slot]]:
        """``using`` for several copies at once: one by one could deadlock with a load that moves their shared part."""
        with self._calm:
            self._calm.wait_for(lambda: not any(self._is_stilled(copy) for copy in copies))
            slots = {copy: self._ready(copy, "use") for copy in copies}
            for slot in slots.values():
                slot.uses += 1
        try:
            yield slots
        finally:
            try:
                for slot in slots.values():
                    if slot.moe is not None:
                        slot.moe.settle()
            finally:
                with self._calm:
                    for slot in slots.values():
                        slot.uses -= 1
                    self._calm.notify_all()

    def _ready(self, copy: str, move: str) -> Slot:
        slot = self._slots.get(copy)
        if slot is None or not slot.is_ready:
            raise IllegalMove(copy, "absent" if slot is None else slot.state, move)
        if slot.is_damaged and move == "use":
            raise CopyDamaged(slot.copy.expert.id, f"moving its bytes in {self.pool} failed: it is loaded again")
        return slot

    def statistics(self) -> SlotStatistics:
        with self._lock:
            used_bytes = sum(slot.copy.own_bytes for slot in self._slots.values())
            used_bytes += sum(part.segment.slot_bytes for part in self._parts.values())
            moe_experts = self._moe_of_gone
            for slot in self._slots.values():
                if slot.moe is not None:
                    moe_experts = moe_experts.plus(slot.moe.statistics())
            return SlotStatistics(
                self.pool, used_bytes, self._regions_allocated, self._regions_moved, self._binds, moe_experts
            )

    def close(self) -> None:
        """Release all memory. No copy may be loading or in use."""
        with self._calm:
            self._calm.wait_for(lambda: not self._ending, MOVE_S)
        with self._changing, self._lock:
            for slot in self._slots.values():
                if slot.moe is not None:
                    slot.moe.close()
            for housing in (*self._housings(), *self._spares):
                housing.bindings.clear()
                housing.region.close()
            self._slots.clear()
            self._parts.clear()
            self._spares.clear()
            self._held_bytes = 0
            self._shelf.clear()  # its skeletons may still show this memory
            if self._moe_loads is not None:
                self._moe_loads.close()
            if isinstance(self.memory, ArenaMemory):
                self.memory.close()

    def _housings(self) -> list[Housing]:
        holders: tuple[Slot | SharedSegment, ...] = (*self._slots.values(), *self._parts.values())
        return [each.housing for each in holders if each.housing is not None]

    def _release(self, slot: Slot) -> None:
        if slot.moe is not None:
            self._moe_of_gone = self._moe_of_gone.plus(slot.moe.statistics())
            ended = _housed(slot.housing), slot.moe
            self._ending.append(ended[0])
            Thread(target=self._end_moe, args=ended, name=f"end-moe-{slot.copy.name}", daemon=True).start()
        del self._slots[slot.copy.name]
        if slot.housing is not None and slot.moe is None:
            self._spares.append(slot.housing)
        for part in slot.parts:
            part.holders -= 1
            if not part.holders:
                del self._parts[part.segment.sha256]
                if part.housing is not None:
                    self._spares.append(part.housing)

    def _end_moe(self, housing: Housing, moe: OffloadedCopy) -> None:
        """Stop the threads that fill a copy's places, which takes a while, and let loads have its bytes then."""
        try:
            moe.close()
        finally:
            with self._calm:
                self._ending.remove(housing)
                self._spares.append(housing)
                self._calm.notify_all()

    def _own_housing(self, slot: Slot) -> Housing:
        """Region for the copy's own bytes, preferably a spare whose skeleton has its layout."""
        packed, shared = slot.copy.packed, [part.region for part in slot.parts]

        def closeness(housing: Housing) -> int:
            bindings = housing.bindings.values()
            if any(binding.shows(packed, shared) for binding in bindings):
                return 2
            return 1 if any(binding.packed.layout == packed.layout for binding in bindings) else 0

        return self._reused(slot.copy.own_bytes, closeness) or self._allocate(slot, slot.copy.own_bytes)

    def _shared_housing(self, slot: Slot, segment: Segment) -> Housing:
        reused = self._reused(segment.slot_bytes, lambda each: -len(each.bindings))
        if reused is None:
            return self._allocate(slot, segment.slot_bytes)
        self._strip(reused)
        return reused

    def _reused(self, size_bytes: int, merit: Callable[[Housing], int]) -> Housing | None:
        """Take the closest spare of this size, the oldest among equals."""
        with self._lock:
            fitting = [each for each in self._spares if each.region.size_bytes == size_bytes]
            best = max(fitting, key=merit, default=None)
            if best is not None:
                self._spares.remove(best)
            return best

    def _allocate(self, slot: Slot, size_bytes: int) -> Housing:
        """New region for a slot; closes spares for it, oldest first."""
        while self._held_bytes + size_bytes > self._budget_bytes and (housing := self._oldest_spare()) is not None:
            self._drop(housing)
        while (region := self._region_in_one_piece(size_bytes)) is None and (spare := self._oldest_spare()) is not None:
            self._drop(spare)
        if region is None:
            self._slide_together(slot)
            region = self.memory.allocate(size_bytes)
        with self._lock:
            self._held_bytes += size_bytes
            self._regions_allocated += 1
        return Housing(region)

    def _region_in_one_piece(self, size_bytes: int) -> Region | None:
        """New region; None if an arena's free bytes are scattered. Raises MemoryExceeded if too few are free."""
        try:
            return self.memory.allocate(size_bytes)
        except MemoryExceeded as error:
            if error.free_bytes < size_bytes or not isinstance(self.memory, ArenaMemory):
                raise
            return None

    def _slide_together(self, slot: Slot) -> None:
        """Slide all regions, so that the arena's free bytes become one gap, for a load into ``slot``."""
        assert isinstance(self.memory, ArenaMemory), "only an arena's bytes can be scattered"
        for region in self.memory.regions():
            with self._still(region, slot):
                try:
                    moved = self.memory.slide(region)
                    if moved is not region:
                        self._rehouse(region, moved, slot)
                except BaseException:
                    self._damage()
                    raise

    def _damage(self) -> None:
        """Let no copy of the stilled region be used: bytes or bindings may be those of the old place."""
        with self._lock:
            region = self._stilled
            slots = [slot for slot in self._slots.values() if region is not None and slot.stands_on(region)]
            spares = [housing for housing in self._spares if housing.region is region]
            for slot in slots:
                slot.is_damaged = True
            for part in self._parts.values():
                part.is_filled &= part.housing is None or part.region is not region
        for housing in [*spares, *(_housed(slot.housing) for slot in slots)]:
            self._strip(housing)

    @contextmanager
    def _still(self, region: Region, loading: Slot) -> Iterator[None]:
        """Wait until no batch and no other load uses a region, and block new uses."""
        with self._calm:
            self._stilled = region
            self._calm.wait_for(lambda: not self._is_touched(region, loading))
            self._is_moving = True
        try:
            yield
        finally:
            with self._calm:
                self._stilled, self._is_moving = None, False
                self._calm.notify_all()

    def _is_touched(self, region: Region, loading: Slot) -> bool:
        at_work = (slot for slot in self._slots.values() if slot.uses or not slot.is_ready)
        is_ending = any(housing.region is region for housing in self._ending)
        return is_ending or any(slot is not loading and slot.stands_on(region) for slot in at_work)

    def _is_stilled(self, copy: str) -> bool:
        slot = self._slots.get(copy)
        return slot is not None and self._stilled is not None and slot.stands_on(self._stilled)

    def _rehouse(self, region: ArenaRegion, moved: ArenaRegion, loading: Slot) -> None:
        """Point slots and spares to the moved region: rebind the slots' skeletons, shelve the spares'."""
        with self._lock:
            spare = [housing for housing in self._spares if housing.region is region]
            for housing in [*(each for each in self._housings() if each.region is region), *spare]:
                housing.region = moved
            self._stilled = moved  # until its skeletons are rebound
            standing = [slot for slot in self._slots.values() if slot is not loading and slot.stands_on(moved)]
            self._regions_moved += 1
        for housing in spare:
            self._strip(housing)
        for slot in standing:
            for device, binding in tuple(_housed(slot.housing).bindings.items()):
                self._fit(slot, device, binding.skeleton)

    def _oldest_spare(self) -> Housing | None:
        with self._lock:
            return self._spares.pop(0) if self._spares else None

    def _drop(self, housing: Housing) -> None:
        self._strip(housing)
        size_bytes = housing.region.size_bytes
        housing.region.close()
        with self._lock:
            self._held_bytes -= size_bytes

    def _strip(self, housing: Housing) -> None:
        """Shelve the skeletons; a skeleton over a closed region is rebound before its next run."""
        for device, binding in housing.bindings.items():
            self._shelf.put(binding.packed, device, binding.skeleton)
        housing.bindings.clear()

    def _bind(self, slot: Slot, device: str) -> None:
        packed, bindings = slot.copy.packed, _housed(slot.housing).bindings
        binding = bindings.get(device)
        if binding is not None and binding.shows(packed, [part.region for part in slot.parts]) and slot.moe is None:
            return
        bindings.pop(device, None)
        if binding is not None and binding.packed.layout == packed.layout:
            skeleton = binding.skeleton
        else:
            if binding is not None:
                self._shelf.put(binding.packed, device, binding.skeleton)
            skeleton = self._shelf.take(slot.copy, device)
        self._fit(slot, device, skeleton)

    def _fit(self, slot: Slot, device: str, skeleton: Skeleton) -> None:
        tensors: dict[str, Tensor] = {}
        for segment in slot.copy.segments:
            tensors.update(tensor_views(slot.region_of(segment).tensor(device), segment))
        if slot.moe is None:
            skeleton.bind(tensors)
        else:
            slot.moe.bind(skeleton, device, tensors)
        shared_regions = tuple(part.region for part in slot.parts)
        _housed(slot.housing).bindings[device] = BoundSkeleton(slot.copy.packed, skeleton, shared_regions)
        self._binds += 1
