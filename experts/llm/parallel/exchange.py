"""Exchange of rows among the ranks that hold pieces of moe_experts: flat, hierarchical, coordinated.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 5.3. Rows go out sorted by rank and piece; counts go before them, so
no row is padded or dropped. Guarantees: every form delivers the same rows in the same order, by source rank, then
piece, and ``Route.combine`` returns results in the order in which rows went out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.llm.parallel.costs import ExchangeForm

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.parallel.groups import Mesh, RankGroup

COUNTS, ROWS = "counts", "rows"  # purposes in a TrafficRecord


@dataclass(frozen=True, slots=True)
class _Hop:
    """One all-to-all. ``order``: places of the rows as they went out; None: as they came."""

    group: RankGroup
    sent: list[int]
    received: list[int]
    order: Tensor | None = None

    def there(self, rows: Tensor) -> Tensor:
        rows = rows if self.order is None else rows[self.order]
        return self.group.all_to_all(rows, self.sent, self.received, ROWS)

    def back(self, rows: Tensor) -> Tensor:
        rows = self.group.all_to_all(rows, self.received, self.sent, ROWS)
        return rows if self.order is None else rows[inverse(self.order)]


@dataclass(frozen=True, slots=True)
class Route:
    """Plan for some rows. ``counts``: received rows, (source ranks, pieces)."""

    hops: tuple[_Hop, ...]
    counts: Tensor

    def combine(self, results: Tensor) -> Tensor:
        """Send the rows' results back, in the order of the dispatched rows."""
        for hop in reversed(self.hops):
            results = hop.back(results)
        return results


class FlatExchange:
    """One all-to-all over a group: p - 1 messages. Over ranks of one tensor index it is the coordinated form."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return self._group.size

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Route]:
        """Send rows, sorted by rank and piece; ``counts``: rows, (ranks, pieces of each rank)."""
        hop, received = _hop(self._group, counts)
        return hop.there(rows), Route((hop,), received)


class HierarchicalExchange:
    """All-to-all inside each node, then among ranks of one place in their nodes: (G - 1) + (p / G - 1) messages.

    A row goes first to the rank of its node that has its destination's place. Before each hop rows are laid out anew.
    """

    def __init__(self, inside: RankGroup, between: RankGroup) -> None:
        self._inside = inside
        self._between = between

    @property
    def size(self) -> int:
        return self._inside.size * self._between.size

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Route]:
        by_node = counts.view(self._between.size, self._inside.size, -1)
        near, there = _hop(self._inside, by_node.transpose(0, 1), transposed(by_node))
        there = there.view(by_node.transpose(0, 1).shape)  # (source in the node, node, pieces)
        far, received = _hop(self._between, there.transpose(0, 1), transposed(there))
        return far.there(near.there(rows)), Route((near, far), received.view(counts.shape))


def exchange_of(form: ExchangeForm, mesh: Mesh) -> FlatExchange | HierarchicalExchange:
    if form is ExchangeForm.HIERARCHICAL:
        return HierarchicalExchange(mesh.inside, mesh.between)
    return FlatExchange(mesh.expert if form is ExchangeForm.COORDINATED else mesh.replica)


def _hop(group: RankGroup, counts: Tensor, order: Tensor | None = None) -> tuple[_Hop, Tensor]:
    """A hop for rows of these counts, (ranks, ...), and the counts that come, of the same shape."""
    flat = counts.reshape(group.size, -1)
    ones = [1] * group.size
    received = group.all_to_all(flat, ones, ones, COUNTS)
    return _Hop(group, flat.sum(dim=1).tolist(), received.sum(dim=1).tolist(), order), received


def transposed(counts: Tensor) -> Tensor:
    """Order in which rows in blocks of these counts, (a, b, ...), are in blocks of (b, a, ...)."""
    sizes = counts.flatten()
    starts = sizes.cumsum(dim=0) - sizes
    blocks = torch.arange(len(sizes), device=counts.device).view(counts.shape).transpose(0, 1).flatten()
    sizes, starts = sizes[blocks], starts[blocks]
    shifts = starts - (sizes.cumsum(dim=0) - sizes)
    return torch.repeat_interleave(shifts, sizes) + torch.arange(int(sizes.sum()), device=counts.device)


def inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
