"""Memory needs: experts against workspaces in one memory (CoServe, section 4.4).

Guarantees: an Engine accepts every share: the largest expert fits beside the pinned ones, and each executor has the
workspace of one image. Keys and values of texts have a separate part; the parts add up to the whole budget.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.performance import PoolSpec, footprints_in, pinned_homes
from agent.core.pool import misfits
from agent.runtime.machine.box import torch_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, PerformanceMatrix

WORKSPACE_FRACTION = 0.25  # of a memory, for batches, by default (section 5.2)
LEASE_FRACTION = 0.25  # of a memory that language models run from, for keys and values, by default
LEAST_LEASED_TOKENS = 256  # a question and an answer, of the model with the largest tokens
LIMITED_FRACTION = 0.1  # of the budget; larger maximum batches are "a substantial portion of the memory"


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Needs of one memory with its executors. ``held_bytes[n - 1]``: bytes of the n most used copies together.

    ``budget_bytes``: for experts and workspaces; each of the ``arenas``, one per device that runs texts, has
    ``lease_bytes`` beside. ``footprints``: expert, footprint, is it pinned. ``largest``: the expert that needs most
    room beside the pinned ones. Workspaces: of one image, and of the maximum batch, on every executor at once.
    """

    pool: str
    cache: str | None
    budget_bytes: int
    executors: int
    footprints: tuple[tuple[str, Footprint, bool], ...]
    held_bytes: tuple[int, ...]
    largest: str
    largest_bytes: int
    one_image_bytes: int
    maximum_batch_bytes: int
    lease_bytes: int = 0
    arenas: int = 1
    is_one_piece: bool = False

    @property
    def whole_bytes(self) -> int:
        return self.budget_bytes + self.lease_bytes * self.arenas

    @property
    def is_enough(self) -> bool:
        return self.largest_bytes + self.one_image_bytes <= self.budget_bytes

    @property
    def is_limited(self) -> bool:
        """True if maximum batches are small, so that experts get the rest. The paper: "limited processors"."""
        return self.maximum_batch_bytes <= LIMITED_FRACTION * self.budget_bytes

    @property
    def casual_workspace_bytes(self) -> int:
        return max(min(self.maximum_batch_bytes, int(self.budget_bytes * WORKSPACE_FRACTION)), self.one_image_bytes)

    @property
    def most(self) -> int:
        """Number of the most used copies that fit beside one image per executor."""
        return self.count_in(self.budget_bytes - self.one_image_bytes)

    @property
    def least(self) -> int:
        """Number of the most used copies that fit beside the largest and the pinned experts."""
        return self.count_in(self.largest_bytes)

    def misfits(self, expert_bytes: int) -> dict[str, int]:
        """Experts that never fit into these bytes, and the bytes that each needs beside the pinned ones."""
        return misfits(self.footprints, expert_bytes)

    def count_in(self, expert_bytes: int) -> int:
        return bisect_right(self.held_bytes, expert_bytes)

    def keeping(self, experts: int) -> PoolSpec:
        """Room for this many of the most used copies, at least 1; the rest is workspace."""
        held = self.held_bytes[min(experts, self.most) - 1] if self.held_bytes else 0
        return self.leaving(self.budget_bytes - held)

    def leaving(self, workspace_bytes: int) -> PoolSpec:
        """``workspace_bytes``, clamped; the rest is for experts."""
        workspace = max(min(workspace_bytes, self.budget_bytes - self.largest_bytes), self.one_image_bytes)
        return self.spec(self.budget_bytes - workspace, workspace)

    def spec(self, expert_bytes: int, workspace_bytes: int) -> PoolSpec:
        return PoolSpec(self.pool, expert_bytes, workspace_bytes, self.cache, self.is_one_piece, self.lease_bytes)


def memory_needs(
    budgets: Mapping[str, int],
    executors: Sequence[ExecutorSpec],
    profile: PerformanceMatrix,
    pinned: frozenset[str],
    kv_bytes: int | None = None,
) -> dict[str, MemoryNeeds]:
    """Needs of each memory. ``budgets``: bytes by memory, nearest to the SSD first. A memory holds the copies that run
    from it, and caches copies for the memories behind it; a mere cache has no least size. ``kv_bytes``: for keys and
    values, per memory that language models run from; None: a share."""
    pools = tuple(budgets)
    homes = pinned_homes(pinned, executors, profile.experts)
    found = {}
    for place, pool in enumerate(pools):
        footprints = tuple(footprints_in(pool, executors, profile.experts, homes))
        needs = misfits(footprints, -1)
        largest = max(sorted(needs), key=needs.__getitem__, default="")
        readers = [spec for spec in executors if pools.index(spec.pool) >= place]
        columns = [profile.experts[spec.processor].values() for spec in executors if spec.pool == pool]
        one_image_bytes = sum(_largest_workspace(column, at_maximum=False) for column in columns)
        spare_bytes = budgets[pool] - needs.get(largest, 0) - one_image_bytes
        reading = [spec for spec in executors if spec.pool == pool and profile.runs_texts(spec)]
        arenas = max(len({torch_device(spec.processor) for spec in reading}), 1)
        lease_bytes = _lease_bytes(columns, budgets[pool], spare_bytes, kv_bytes, arenas)
        found[pool] = MemoryNeeds(
            pool=pool,
            cache=pools[place - 1] if place else None,
            budget_bytes=budgets[pool] - lease_bytes * arenas,
            executors=len(columns),
            footprints=footprints,
            held_bytes=held_bytes(_most_used_first(readers, profile)),
            largest=largest,
            largest_bytes=needs.get(largest, 0),
            one_image_bytes=one_image_bytes,
            maximum_batch_bytes=sum(_largest_workspace(column, at_maximum=True) for column in columns),
            lease_bytes=lease_bytes,
            arenas=arenas,
            is_one_piece=place > 0 or any(spec.pool == pool and spec.processor == "mps" for spec in executors),
        )
    return found


def _lease_bytes(
    columns: Sequence[Iterable[ExpertProfile]], budget_bytes: int, spare_bytes: int, kv_bytes: int | None, arenas: int
) -> int:
    """Each arena's bytes for keys and values: 0 without a language model, else its part of ``kv_bytes``. Default:
    LEASE_FRACTION, or less if the largest expert and an image on each executor leave less; at least a short text."""
    token_bytes = max((each.performance.lease_bytes for column in columns for each in column), default=0)
    if not token_bytes or kv_bytes is not None:
        return (kv_bytes or 0) // arenas if token_bytes else 0
    share_bytes = min(int(budget_bytes * LEASE_FRACTION), spare_bytes) // arenas
    return max(share_bytes, LEAST_LEASED_TOKENS * token_bytes)


def held_bytes(footprints: Sequence[Footprint]) -> tuple[int, ...]:
    """Bytes of the first 1, 2, 3... footprints together; a shared part counts once."""
    parts: set[str] = set()
    total = 0
    sizes = []
    for footprint in footprints:
        fresh = {part.id: part.size_bytes for part in footprint.shared if part.id not in parts}
        parts |= fresh.keys()
        total += footprint.own_bytes + sum(fresh.values())
        sizes.append(total)
    return tuple(sizes)


def _most_used_first(executors: Sequence[ExecutorSpec], profile: PerformanceMatrix) -> list[Footprint]:
    """Footprints of all copies that these executors may run, by descending usage (section 4.1)."""
    copies = {
        each.copy: (-profile.usage.get(expert, 0.0), expert, each.footprint)
        for processor in sorted({spec.processor for spec in executors})
        for expert, each in profile.experts[processor].items()
    }
    return [copies[copy][2] for copy in sorted(copies, key=lambda copy: (*copies[copy][:2], copy))]


def _largest_workspace(column: Iterable[ExpertProfile], *, at_maximum: bool) -> int:
    performances = [each.performance for each in column]
    return max((each.workspace_for(each.max_batch if at_maximum else 1) for each in performances), default=0)
