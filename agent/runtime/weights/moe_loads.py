"""Loads of moe_experts into copies that hold only some of them: from packed files, while the copy runs.

Guarantees: blocks share the link with all loads, and prefetched blocks wait for the Engine's loads. Each block is
verified like a packed file. Between two batches no thread fills a place, so a region may be moved. Usage probabilities,
counted while serving, are kept between starts in one file per copy: written atomically, bound to its weights.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event as Flag
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import torch

from agent.runtime.machine.box import aside
from agent.runtime.machine.memories import MpsMemory
from agent.runtime.weights.drive import StagingBuffers
from experts.errors import LoadError
from experts.filesystem import whole_file
from experts.llm.files.names import EXPERTS, layer_of
from experts.llm.tiers.cache import MoeCache
from experts.llm.tiers.moe_experts import MoeExpert, MoeResidency
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
    from experts.backends.llm import LlmSkeleton
    from experts.llm.tiers.moe_experts import MoeStatistics
    from experts.packed.weights import Segment

logger = logging.getLogger(__name__)

USAGE_FOLDER = "moe-usage"
LOADS_AT_ONCE = 2  # one block is read while another is verified


@dataclass(slots=True, eq=False)
class MoeLoads:
    """Loads of one agent. ``kept``: folder of learned usage; None: not kept.

    ``usage``: prior by copy, until usage has been learned.
    """

    drive: Drive
    usage: Mapping[str, Mapping[MoeExpert, float]] = field(default_factory=dict)
    kept: Path | None = None
    _ending: Flag = field(default_factory=Flag)

    def offload(self, copy: ExpertCopy, region: Callable[[], Region], memory: Memory) -> OffloadedCopy:
        """Cache of a copy's moe_experts in its slot's ``region``, with all places empty."""
        learned = {} if self.kept is None else read_usage(self.kept, copy)
        return OffloadedCopy(copy, region, memory, self, learned or self.usage.get(copy.name, {}))

    def read(self, copy: ExpertCopy, moe_expert: MoeExpert, target: memoryview) -> None:
        """Read one block. Raises as reading does, and LoadError if the agent ends meanwhile."""
        segment = layers_of(copy)[moe_expert.layer]
        delivered_at_s = self.drive.link.reserve(copy.block_bytes)
        self.drive.segments.read_block(segment, moe_expert.number, target, copy.expert.id)
        if self._ending.wait(max(delivered_at_s - time.monotonic(), 0.0)):
            raise LoadError(copy.expert.id, "the agent is stopping")

    def close(self) -> None:
        """Cancel waiting loads. Idempotent."""
        self._ending.set()


class OffloadedCopy:
    """moe_experts of a copy in its slot: places after the copy's own bytes, and the threads that fill them."""

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
        self._staging = StagingBuffers(loads.drive.memory, slot_bytes(self._form.size_bytes), LOADS_AT_ONCE)
        self._shown: dict[str, OffloadedMoe] = {}
        residency = MoeResidency(copy.moe_places, max(layers_of(copy)) + 1, usage, loads_at_once=LOADS_AT_ONCE)
        self._cache = MoeCache(
            residency, self._fill, name=f"moe-{copy.name}", loads_at_once=LOADS_AT_ONCE,
            aside=partial(aside, "mps" if isinstance(memory, MpsMemory) else "cpu"),
        )  # fmt: skip

    def bind(self, skeleton: Skeleton, device: str, tensors: Mapping[str, Tensor]) -> None:
        """Bind a language model's skeleton to the slot's bytes."""
        model, link = cast("LlmSkeleton", skeleton), self._loads.drive.link
        if device not in self._shown:
            self._shown[device] = OffloadedMoe(model.spec, self._form, self._cache, lambda: not link.is_demanded)
        places = self._region().tensor(device)[self._copy.packed.own.slot_bytes :]
        model.bind_offloaded(tensors, self._shown[device].show(tensors, places))

    def settle(self) -> None:
        for shown in self._shown.values():
            shown.let_go()
        self._cache.settle()

    def statistics(self) -> MoeStatistics:
        found = self._cache.statistics()
        return replace(found, bytes_loaded=found.loads * self._form.size_bytes)

    def close(self) -> None:
        """Stop the threads that fill its places. Idempotent."""
        self._cache.close()
        self._staging.close()
        if self._loads.kept is not None and (usage := self._cache.usage()):
            write_usage(self._loads.kept, self._copy, usage)

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


def read_usage(folder: Path, copy: ExpertCopy) -> dict[MoeExpert, float]:
    """Usage probabilities from the last start; empty for other weights and for an unreadable file."""
    try:
        found = json.loads(_file(folder, copy).read_bytes())
        rows = found["usage"] if found["weights"] == _weights(copy) else ()
        return {MoeExpert(int(layer), int(number)): float(share) for layer, number, share in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("moe_usage_unread copy=%s error=%s: it is counted again", copy.name, error)
        return {}


def write_usage(folder: Path, copy: ExpertCopy, usage: Mapping[MoeExpert, float]) -> None:
    rows = [[one.layer, one.number, share] for one, share in usage.items()]
    try:
        folder.mkdir(exist_ok=True)
        with whole_file(_file(folder, copy)) as final:
            final.write(json.dumps({"weights": _weights(copy), "usage": rows}).encode())
    except OSError as error:
        logger.warning("moe_usage_unwritten copy=%s error=%s: it is counted again", copy.name, error)


def _file(folder: Path, copy: ExpertCopy) -> Path:
    return folder / f"{quote(copy.name, safe='')}.json"


def _weights(copy: ExpertCopy) -> str:
    return " ".join(segment.sha256 for segment in copy.packed.moe_layers)
