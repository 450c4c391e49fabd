"""Measured costs of a mesh: time of a message and of its bytes, inside a node and between nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from experts.llm.parallel.costs import LinkCosts, MeshCosts

if TYPE_CHECKING:
    from experts.llm.parallel.groups import Mesh, RankGroup

SHORT_BYTES, LONG_BYTES = 64, 1 << 20  # to each rank
REPEATS = 8
FREE = LinkCosts(0.0, 0.0)


def measured_costs(mesh: Mesh) -> MeshCosts:
    """Costs by the first rank's clock, equal on all ranks. Call on every rank at once."""
    inside, between = (_costs(group) for group in (mesh.inside, mesh.between))
    own = torch.tensor([inside.message_s, inside.byte_s, between.message_s, between.byte_s], dtype=torch.float64)
    first: list[float] = mesh.replica.gather(own, "costs")[0].tolist()
    return MeshCosts(LinkCosts(*first[:2]), LinkCosts(*first[2:]))


def _costs(group: RankGroup) -> LinkCosts:
    others = group.size - 1
    if not others:
        return FREE
    short_s, long_s = (_seconds(group, size) for size in (SHORT_BYTES, LONG_BYTES))
    return LinkCosts(short_s / others, max(long_s - short_s, 0.0) / (others * (LONG_BYTES - SHORT_BYTES)))


def _seconds(group: RankGroup, size_bytes: int) -> float:
    """The least time of an all-to-all with so many bytes for each rank."""
    rows = torch.zeros((group.size, size_bytes), dtype=torch.uint8)
    ones = [1] * group.size
    times = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        group.all_to_all(rows, ones, ones, "costs")
        times.append(time.perf_counter() - began_s)
    return min(times)
