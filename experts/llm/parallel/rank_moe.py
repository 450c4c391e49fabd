"""moe_experts of one layer, held in pieces by the ranks of a mesh.

Guarantees: dropless, as ``experts.llm.dispatch``: every pair of token and moe_expert reaches each piece once, and its
weighed results return to the token's own rank. A rank without tokens takes part, so that others can reach its pieces.
The result is this tensor rank's share: the sum over its tensor group is the layer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from experts.llm.dispatch import MappingTable, plain, run_mlp, way_of_running
from experts.llm.parallel.costs import ExchangeForm
from experts.llm.parallel.exchange import exchange_of, inverse, transposed
from experts.llm.parallel.shape import pieces_of
from experts.llm.parallel.slices import share

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.dispatch import MlpWeights
    from experts.llm.files.config import MoeSpec
    from experts.llm.parallel.groups import Mesh


@dataclass(frozen=True, slots=True)
class _Destinations:
    """Places that a moe_expert's rows are sent to: (moe_experts, most pieces); -1 where one has fewer."""

    ranks: Tensor  # in the exchange
    slots: Tensor  # among the pieces that the rank holds
    most_slots: int


class RankMoe:
    """Implements ``experts.llm.dispatch.MoeExperts``. ``weights``: the rank's own pieces; None without any."""

    def __init__(
        self, mesh: Mesh, moe: MoeSpec, weights: MlpWeights | None, device: torch.device | str = "cpu"
    ) -> None:
        self._mesh = mesh
        self._device = device
        self._moe = moe
        self._weights = weights
        self.exchange_by(ExchangeForm.FLAT)

    def exchange_by(self, form: ExchangeForm) -> None:
        """Exchange by this form from now on: all ranks at once."""
        self._exchange = exchange_of(form, self._mesh)
        self._is_coordinated = form is ExchangeForm.COORDINATED
        self._to = self._destinations()

    def __call__(self, tokens: Tensor, table: MappingTable) -> Tensor:
        """This tensor rank's share of (tokens, hidden)."""
        begin, end = (0, len(tokens)) if self._is_coordinated else self._own(len(tokens))
        chosen = torch.empty_like(table.moe_expert)
        chosen[table.order] = table.moe_expert
        per_token = self._moe.per_token
        chosen = chosen.view(-1, per_token)[begin:end]
        ranks, slots = self._to.ranks[chosen].flatten(), self._to.slots[chosen].flatten()
        places = (ranks >= 0).nonzero().squeeze(1)  # pairs of token and piece that this rank sends
        keys = ranks[places] * self._to.most_slots + slots[places]
        keys, order = torch.sort(keys, stable=True)
        places = places[order]
        counts = torch.bincount(keys, minlength=self._exchange.size * self._to.most_slots)
        a_token = per_token * self._to.ranks.shape[1]
        sent = tokens[begin + places // a_token]
        received, route = self._exchange.dispatch(sent, counts.view(self._exchange.size, -1))
        results = route.combine(self._run(received, route.counts))
        weight = table.weight[begin:end].repeat_interleave(self._to.ranks.shape[1], dim=1).flatten()[places]
        weighed = results.new_zeros((len(ranks), tokens.shape[1]), dtype=torch.float32)
        weighed = weighed.index_copy(0, places, results.float() * weight.unsqueeze(1))
        mixed = weighed.view(end - begin, a_token, tokens.shape[1]).sum(dim=1).to(tokens.dtype)
        return pad(mixed, (0, 0, begin, len(tokens) - end))

    def _own(self, tokens: int) -> tuple[int, int]:
        return share(tokens, self._mesh.shape.tensor, self._mesh.tensor_index)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run received rows, ordered by source rank and piece."""
        if self._weights is None or not len(rows):
            return rows
        order = transposed(counts)
        of_piece = counts.sum(dim=0)
        slots = torch.repeat_interleave(torch.arange(len(of_piece), device=rows.device), of_piece)
        held = len(plain(self._weights.up))
        table = MappingTable(order, order, slots, of_piece[:held].cumsum(dim=0).to(torch.int32), order)
        sorted_rows = rows[order]
        if held == 1:
            computed = run_mlp(sorted_rows, self._weights.of(0))
        else:
            computed = way_of_running(sorted_rows, table, self._weights)(sorted_rows, table, self._weights)
        return computed[inverse(order)]

    def _destinations(self) -> _Destinations:
        mesh, shape = self._mesh, self._mesh.shape
        held: dict[int, int] = {}  # pieces of each rank so far
        to: list[list[tuple[int, int]]] = [[] for _ in range(self._moe.moe_experts)]
        for piece in pieces_of(shape, self._moe.moe_experts, self._moe.size):
            slot = held.setdefault(piece.rank, 0)
            held[piece.rank] += 1
            if not self._is_coordinated:
                to[piece.moe_expert].append((piece.rank, slot))
            elif piece.rank % shape.tensor == mesh.tensor_index:
                to[piece.moe_expert].append((piece.rank // shape.tensor, slot))
        most = max(map(len, to))
        filled = torch.tensor([[*places, *[(-1, -1)] * (most - len(places))] for places in to], dtype=torch.int64)
        filled = filled.view(len(to), most, 2).to(self._device)
        return _Destinations(filled[..., 0], filled[..., 1], max(held.values()))
