"""moe_experts of copies that do not hold all of theirs: brought while the copy runs, from packed files into its places.

Guarantees: they go over the same link as every load, one after the other, behind whatever was let through before; what
is loaded ahead waits until nothing is under way that the Engine asked for. Each is checked as packed files are. Between
two batches nobody fills a place, so a region may be moved, or given to another, without asking anybody here.

Where a copy runs from host memory, a block is read straight into its place. Where it runs from a device's, blocks pass
through host memory, which keeps as many as it was given room for; there, few tokens may be computed on the CPU instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Event as Flag
from threading import Lock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from agent.runtime.moe_usage import read_usage, write_usage
from experts.errors import BackendUnavailable, LoadError
from experts.llm.names import EXPERTS, layer_of
from experts.llm.tiers.cache import MoeCache
from experts.llm.tiers.costs import measured_costs
from experts.llm.tiers.moe_experts import MoeResidency
from experts.llm.tiers.offload import BlockForm, BlockTensor, HostTier, OffloadedMoe
from experts.packed.weights import slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.memories import HostMemory, Memory
    from agent.runtime.slots import Slot
    from agent.runtime.transfer import PacedLink
    from experts.backends.base import Skeleton
    from experts.llm.config import ArchSpec, Mlp
    from experts.llm.dispatch import MoeExperts
    from experts.llm.tiers.moe_experts import MoeExpert
    from experts.llm.tiers.offload import OffloadStatistics
    from experts.llm.tiers.predict import MoveCosts
    from experts.packed.weights import Segment, SegmentStore

LOADS_AT_ONCE = 2  # while the one's block is checked, or its sleep for the link ends, the drive reads the other's
LEAST_HOST_PLACES = LOADS_AT_ONCE  # blocks on their way to a device


@runtime_checkable
class Offloads(Protocol):
    """A skeleton of a model whose moe_experts somebody else may hold."""

    @property
    def spec(self) -> ArchSpec: ...

    def bind_offloaded(self, tensors: Mapping[str, Tensor], moe_experts: Mapping[int, MoeExperts]) -> None:
        """Run from the tensors of the dense part; whoever is named by layer runs the rest."""


@dataclass(slots=True, eq=False)
class MoeLoads:
    """The loads of one agent. ``host``: memory that blocks pass through on their way to a device.

    ``usage``: copy -> how likely a token needs each moe_expert. ``kept``: folder of learned usage; None: it is lost.
    """

    _segments: SegmentStore
    _link: PacedLink
    _host: HostMemory
    usage: Mapping[str, Mapping[MoeExpert, float]] = field(default_factory=dict)
    kept: Path | None = None
    _tiers: dict[str, _HostBlocks] = field(default_factory=dict)
    _costs: dict[str, MoveCosts] = field(default_factory=dict)
    _ending: Flag = field(default_factory=Flag)
    _lock: Lock = field(default_factory=Lock)

    def offload(self, slot: Slot, memory: Memory) -> OffloadedCopy:
        """What runs the moe_experts of a copy in its slot of this memory, with nothing in their places yet."""
        copy = slot.copy
        host = None if slot.region.buffer is not None else self._blocks_of(copy)
        learned = {} if self.kept is None else read_usage(self.kept, copy)
        return OffloadedCopy(slot, memory, self, host, learned or self.usage.get(copy.name, {}))

    def remember(self, copy: ExpertCopy, usage: Mapping[MoeExpert, float]) -> None:
        if usage and self.kept is not None:
            write_usage(self.kept, copy, usage)

    def read(self, copy: ExpertCopy, moe_expert: MoeExpert, target: memoryview) -> None:
        """One block from the drive. Raises what reading raises, LoadError when the agent ends meanwhile."""
        segment = layers_of(copy)[moe_expert.layer]
        delivered_at_s = self._link.reserve(copy.block_bytes)
        self._segments.read_block(segment, moe_expert.number, target, copy.expert.id)
        if self._ending.wait(max(delivered_at_s - time.monotonic(), 0.0)):
            raise LoadError(copy.expert.id, "the agent is stopping")

    def may_load_ahead(self) -> bool:
        return not self._link.is_demanded

    def costs_of(self, copy: ExpertCopy, measure: Callable[[], MoveCosts]) -> MoveCosts:
        """The measured constants of a copy's form; measured at its first load."""
        if copy.packed.layout not in self._costs:
            self._costs[copy.packed.layout] = measure()
        return self._costs[copy.packed.layout]

    def close(self) -> None:
        """End, and give host memory back. Nothing may run any more. Idempotent."""
        self._ending.set()
        with self._lock:
            for blocks in self._tiers.values():
                blocks.close()
            self._tiers.clear()

    def _blocks_of(self, copy: ExpertCopy) -> _HostBlocks:
        """The copy's tier in host memory: it stays when the copy leaves its device."""
        with self._lock:
            if copy.name not in self._tiers:
                self._tiers[copy.name] = _HostBlocks(copy, self, self._host)
            return self._tiers[copy.name]


class OffloadedCopy:
    """The moe_experts of a copy in its slot: the places behind its own bytes, and what fills them."""

    def __init__(
        self, slot: Slot, memory: Memory, loads: MoeLoads, host: _HostBlocks | None, usage: Mapping[MoeExpert, float]
    ) -> None:
        copy = slot.copy
        assert copy.moe_places is not None, "it holds all of them"
        self._slot = slot
        self._memory = memory
        self._loads = loads
        self._host = host
        self._tier: HostTier | None = None
        self._form = form_of(copy)
        self._shown: dict[str, OffloadedMoe] = {}
        residency = MoeResidency(copy.moe_places, max(layers_of(copy)) + 1, usage, loads_at_once=LOADS_AT_ONCE)
        self._cache = MoeCache(residency, self._fill, name=f"moe-{copy.name}", loads_at_once=LOADS_AT_ONCE)

    def bind(self, skeleton: Skeleton, device: str, tensors: Mapping[str, Tensor]) -> None:
        """Have a skeleton run from the slot's bytes as they lie now. Raises BackendUnavailable for one that cannot."""
        if not isinstance(skeleton, Offloads):
            raise BackendUnavailable(self._slot.copy.expert.architecture, "its moe_experts cannot come and go")
        if device not in self._shown:
            self._shown[device] = self._moe_of(skeleton.spec, device)
        skeleton.bind_offloaded(tensors, self._shown[device].show(tensors, self._places(device)))

    def settle(self) -> None:
        self._cache.settle()
        if self._tier is not None:
            self._tier.settle()

    def statistics(self) -> OffloadStatistics:
        """A frozen snapshot; of the device that was bound first. Raises ValueError before any was."""
        if not self._shown:
            raise ValueError(f"{self._slot.copy.name} is bound to no device")
        return next(iter(self._shown.values())).statistics()

    def close(self) -> None:
        """End what fills its places. Idempotent."""
        self._cache.close()
        self._loads.remember(self._slot.copy, self._cache.usage())

    def _moe_of(self, spec: ArchSpec, device: str) -> OffloadedMoe:
        if self._host is not None:
            costs = self._loads.costs_of(self._slot.copy, lambda: self._measure(spec, device))
            self._tier = self._host.tier(spec.mlp, costs)
        return OffloadedMoe(spec, self._form, self._cache, host=self._tier, may_predict=self._loads.may_load_ahead)

    def _measure(self, spec: ArchSpec, device: str) -> MoveCosts:
        assert self._host is not None, "where nothing is moved there is nothing to compare"
        block = self._host.block(0)
        region, start = self._slot.region, self._slot.copy.packed.own.slot_bytes
        return measured_costs(
            self._form, spec.mlp, block, self._places(device)[: self._form.size_bytes],
            lambda size_bytes: self._memory.fill(region, start, block[:size_bytes]),
        )  # fmt: skip

    def _places(self, device: str) -> Tensor:
        return self._slot.region.tensor(device)[self._slot.copy.packed.own.slot_bytes :]

    def _fill(self, moe_expert: MoeExpert, place: int) -> None:
        for shown in tuple(self._shown.values()):
            shown.await_reads(place)
        region, size_bytes = self._slot.region, self._form.size_bytes
        start = self._slot.copy.packed.own.slot_bytes + place * size_bytes
        if region.buffer is not None:
            self._loads.read(self._slot.copy, moe_expert, region.buffer.view[start : start + size_bytes])
            return
        assert self._tier is not None, "blocks of a device pass through host memory"
        with self._tier.holding(moe_expert) as block:
            self._memory.fill(region, start, block)


class _HostBlocks:
    """Blocks of one copy in host memory, on their way to a device or waiting there."""

    def __init__(self, copy: ExpertCopy, loads: MoeLoads, memory: HostMemory) -> None:
        self._copy = copy
        self._loads = loads
        self._form = form_of(copy)
        places = max(copy.moe_host_places, LEAST_HOST_PLACES)
        self._region = memory.allocate(slot_bytes(places * self._form.size_bytes))
        residency = MoeResidency(places, max(layers_of(copy)) + 1, loads_at_once=LOADS_AT_ONCE)
        self._cache = MoeCache(residency, self._fill, name=f"moe-host-{copy.name}", loads_at_once=LOADS_AT_ONCE)
        self._tier: HostTier | None = None

    def tier(self, kind: Mlp, costs: MoveCosts) -> HostTier:
        if self._tier is None:
            self._tier = HostTier(self._cache, self.block, self._form, kind, costs)
        return self._tier

    def block(self, place: int) -> Tensor:
        start = place * self._form.size_bytes
        return self._region.tensor("cpu")[start : start + self._form.size_bytes]

    def close(self) -> None:
        self._cache.close()
        self._region.close()

    def _fill(self, moe_expert: MoeExpert, place: int) -> None:
        start = place * self._form.size_bytes
        view = self._region.buffer.view[start : start + self._form.size_bytes]
        self._loads.read(self._copy, moe_expert, view)


def form_of(copy: ExpertCopy) -> BlockForm:
    first = copy.packed.moe_layers[0]
    tensors = tuple(
        BlockTensor(spec.name.partition(EXPERTS)[2], getattr(torch, spec.dtype), spec.shape[1:], spec.offset_bytes)
        for spec in first.tensors
    )
    return BlockForm(copy.block_bytes, tensors)


def layers_of(copy: ExpertCopy) -> dict[int, Segment]:
    return {layer_of(segment.tensors[0].name): segment for segment in copy.packed.moe_layers}
