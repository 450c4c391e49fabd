"""Caches of moe_experts: the number that a language model holds at a time.

``moe_cache`` of the line file comes first. Without it a model holds all, or as many as its memory has room for beside
texts, batches and pinned experts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.deployment.memory_needs import WORKSPACE_FRACTION
from agent.deployment.memory_split import shares_of
from agent.runtime.expert_copy import moe_block_bytes, moe_experts_of
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.device_profile.records import Allocation
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from experts.packed.weights import PackedExpert

log = logging.getLogger(__name__)

LEAST_PLACES = 1
ROUNDS = 8  # of shrinking caches until all fits; rarely more than one


def places_of(config: LineConfig, expert: str, packed: PackedExpert) -> int | None:
    """moe_experts that fit into the line file's ``moe_cache``; None: all. Raises ConfigError if none fits."""
    cache_bytes = config.catalog.experts[expert].moe_cache_bytes
    if cache_bytes is None:
        return None
    where = ("experts", expert, "moe_cache")
    block_bytes = moe_block_bytes(packed)
    if not block_bytes:
        raise config.document.error("the model has no experts inside - remove this key", *where)
    if cache_bytes < block_bytes:
        raise config.document.error(
            f"{mib(cache_bytes)} is too little - one of the experts inside takes {mib(block_bytes)}", *where
        )
    places = cache_bytes // block_bytes
    return None if places >= moe_experts_of(packed) else places


@dataclass(frozen=True, slots=True, eq=False)
class MoeCaches:
    """Sizes the caches of a line. ``times``: matrix of copies, read for footprints and workspaces."""

    _config: LineConfig
    _box: Box
    _executors: Sequence[ExecutorSpec]
    _allocation: Allocation | None
    _times: Callable[[Mapping[str, Sequence[ExpertCopy]]], PerformanceMatrix]

    def sized(self, copies: Mapping[str, Sequence[ExpertCopy]]) -> dict[str, list[ExpertCopy]]:
        """The copies by processor; a copy that does not fit holds as many moe_experts as do."""
        found = {processor: list(listed) for processor, listed in copies.items()}
        listed = [copy for each in found.values() for copy in each]
        if not any(moe_block_bytes(copy.packed) for copy in listed):
            return found
        places = self._fitting(found)
        for copy in sorted({copy.name: copy for copy in listed if copy.expert.id in places}.values(), key=str):
            held = places[copy.expert.id]
            log.info(
                "moe_experts_offloaded expert=%s held=%d of=%d cache=%s: the model is larger than its memory",
                copy.expert.id, held, moe_experts_of(copy.packed), mib(held * copy.block_bytes),
            )  # fmt: skip
        return _having(found, places)

    def _fitting(self, copies: Mapping[str, Sequence[ExpertCopy]]) -> dict[str, int]:
        """Places by expert, for experts that memory limits."""
        block_bytes: dict[str, int] = {}
        for copy in (copy for listed in copies.values() for copy in listed if not copy.is_offloaded):
            block_bytes[copy.expert.id] = max(copy.block_bytes, block_bytes.get(copy.expert.id, 0))
        misfits = [expert for expert, lack in self._lacking_bytes(copies).items() if lack > 0]
        places = {expert: LEAST_PLACES for expert in misfits if block_bytes.get(expert)}
        if not places:
            return {}
        for expert, lack in self._lacking_bytes(_having(copies, places)).items():
            if expert in places:
                places[expert] += max(-lack // block_bytes[expert], 0)
        for _ in range(ROUNDS):
            lacking = self._lacking_bytes(_having(copies, places))
            short = {expert: lacking[expert] for expert in places if lacking[expert] > 0}
            if not short:
                break
            for expert, lack in short.items():
                places[expert] = max(places[expert] - -(-lack // block_bytes[expert]), LEAST_PLACES)
        return places

    def _lacking_bytes(self, copies: Mapping[str, Sequence[ExpertCopy]]) -> dict[str, int]:
        """Bytes that the memories of each expert lack; negative: bytes left."""
        found: dict[str, int] = {}
        is_settled = self._allocation is not None or self._config.memory.workspace is not None
        for needs, share in shares_of(self._config, self._box, self._executors, self._times(copies), self._allocation):
            budget_bytes = needs.budget_bytes
            # room for larger batches that a probe may find
            kept_bytes = 0 if is_settled else int(budget_bytes * WORKSPACE_FRACTION)
            room_bytes = min(share.expert_bytes, budget_bytes - kept_bytes)
            for expert, needed_bytes in needs.misfits(-1).items():
                lack = needed_bytes - room_bytes
                found[expert] = max(lack, found.get(expert, lack))
        return found


def _having(copies: Mapping[str, Sequence[ExpertCopy]], places: Mapping[str, int]) -> dict[str, list[ExpertCopy]]:
    return {
        processor: [
            replace(copy, moe_places=places[copy.expert.id]) if copy.expert.id in places else copy for copy in listed
        ]
        for processor, listed in copies.items()
    }
