"""Loads of moe_experts into copies that do not hold all of them: from packed files, while the copy runs.

Guarantees: blocks share the link with all loads, and those ahead wait for the Engine's. Each block is checked as packed
files are. Between two batches no thread fills a place, so a region may be moved.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Event as Flag
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from agent.runtime.weights.drive import StagingBuffers
from agent.runtime.weights.moe_usage import read_usage, write_usage
from experts.errors import BackendUnavailable, LoadError
from experts.llm.names import EXPERTS, layer_of
from experts.llm.tiers.cache import MoeCache
from experts.llm.tiers.moe_experts import MoeResidency
from experts.llm.tiers.offload import BlockForm, BlockTensor, OffloadedMoe
from experts.packed.weights import slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.memories import Memory, Region
    from agent.runtime.weights.drive import Drive
    from experts.backends.base import Skeleton
    from experts.llm.config import ArchSpec
    from experts.llm.dispatch import MoeExperts
    from experts.llm.tiers.moe_experts import MoeExpert
    from experts.llm.tiers.offload import OffloadStatistics
    from experts.packed.weights import Segment

LOADS_AT_ONCE = 2  # the drive reads one block while another is checked


@runtime_checkable
class Offloads(Protocol):
    """Skeleton of a model whose moe_experts may lie in a cache."""

    @property
    def spec(self) -> ArchSpec: ...

    def bind_offloaded(self, tensors: Mapping[str, Tensor], moe_experts: Mapping[int, MoeExperts]) -> None:
        """Bind the dense part; ``moe_experts``: by layer."""


@dataclass(slots=True, eq=False)
class MoeLoads:
    """The loads of one agent. ``usage``: prior by copy, where nothing was learned.

    ``kept``: folder of learned usage; None: it is lost.
    """

    drive: Drive
    usage: Mapping[str, Mapping[MoeExpert, float]] = field(default_factory=dict)
    kept: Path | None = None
    _ending: Flag = field(default_factory=Flag)

    def offload(self, copy: ExpertCopy, region: Callable[[], Region], memory: Memory) -> OffloadedCopy:
        """Cache of a copy's moe_experts in its slot's ``region``, with all places empty."""
        learned = {} if self.kept is None else read_usage(self.kept, copy)
        return OffloadedCopy(copy, region, memory, self, learned or self.usage.get(copy.name, {}))

    def remember(self, copy: ExpertCopy, usage: Mapping[MoeExpert, float]) -> None:
        if usage and self.kept is not None:
            write_usage(self.kept, copy, usage)

    def read(self, copy: ExpertCopy, moe_expert: MoeExpert, target: memoryview) -> None:
        """Read one block. Raises as reading does, LoadError when the agent ends meanwhile."""
        segment = layers_of(copy)[moe_expert.layer]
        delivered_at_s = self.drive.link.reserve(copy.block_bytes)
        self.drive.segments.read_block(segment, moe_expert.number, target, copy.expert.id)
        if self._ending.wait(max(delivered_at_s - time.monotonic(), 0.0)):
            raise LoadError(copy.expert.id, "the agent is stopping")

    def may_load_ahead(self) -> bool:
        return not self.drive.link.is_demanded

    def close(self) -> None:
        """End loads that wait. Idempotent."""
        self._ending.set()


class OffloadedCopy:
    """moe_experts of a copy in its slot: places behind the copy's own bytes, and the threads that fill them."""

    def __init__(
        self,
        copy: ExpertCopy,
        region: Callable[[], Region],
        memory: Memory,
        loads: MoeLoads,
        usage: Mapping[MoeExpert, float],
    ) -> None:
        assert copy.moe_places is not None, "it holds all of them"
        self._copy = copy
        self._region = region
        self._memory = memory
        self._loads = loads
        self._form = form_of(copy)
        self._staging = StagingBuffers(loads.drive.staging, slot_bytes(self._form.size_bytes))
        self._shown: dict[str, OffloadedMoe] = {}
        residency = MoeResidency(copy.moe_places, max(layers_of(copy)) + 1, usage, loads_at_once=LOADS_AT_ONCE)
        self._cache = MoeCache(residency, self._fill, name=f"moe-{copy.name}", loads_at_once=LOADS_AT_ONCE)

    def bind(self, skeleton: Skeleton, device: str, tensors: Mapping[str, Tensor]) -> None:
        """Bind a skeleton to the slot's bytes. Raises BackendUnavailable for one without a cache."""
        if not isinstance(skeleton, Offloads):
            raise BackendUnavailable(self._copy.expert.architecture, "its moe_experts cannot come and go")
        if device not in self._shown:
            may_predict = self._loads.may_load_ahead
            self._shown[device] = OffloadedMoe(skeleton.spec, self._form, self._cache, may_predict=may_predict)
        places = self._region().tensor(device)[self._copy.packed.own.slot_bytes :]
        skeleton.bind_offloaded(tensors, self._shown[device].show(tensors, places))

    def settle(self) -> None:
        self._cache.settle()

    def statistics(self) -> OffloadStatistics:
        """Of the device that was bound first. Raises ValueError before."""
        if not self._shown:
            raise ValueError(f"{self._copy.name} is bound to no device")
        return next(iter(self._shown.values())).statistics()

    def close(self) -> None:
        """Stop the threads that fill its places. Idempotent."""
        self._cache.close()
        self._staging.close()
        self._loads.remember(self._copy, self._cache.usage())

    def _fill(self, moe_expert: MoeExpert, place: int) -> None:
        region, size_bytes = self._region(), self._form.size_bytes
        start = self._copy.packed.own.slot_bytes + place * size_bytes
        if region.buffer is not None:
            self._loads.read(self._copy, moe_expert, region.buffer.view[start : start + size_bytes])
            return
        with self._staging.borrowed() as buffer:
            self._loads.read(self._copy, moe_expert, buffer.view[:size_bytes])
            self._memory.fill(region, start, buffer.tensor[:size_bytes])


def form_of(copy: ExpertCopy) -> BlockForm:
    first = copy.packed.moe_layers[0]
    tensors = tuple(
        BlockTensor(spec.name.partition(EXPERTS)[2], getattr(torch, spec.dtype), spec.shape[1:], spec.offset_bytes)
        for spec in first.tensors
    )
    return BlockForm(copy.block_bytes, tensors)


def layers_of(copy: ExpertCopy) -> dict[int, Segment]:
    return {layer_of(segment.tensors[0].name): segment for segment in copy.packed.moe_layers}
