"""Tokens to their experts and back: layout transform, expert networks, combination.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 5.4. ``scatter`` copies tokens into the order of the mapping table, so
that each expert's are adjacent; ``combine`` brings what the experts made of them back and weighs it. Cost: tokens times
width times choices; the sparse einsum form also multiplies by experts (see ``experts.llm.sparse_einsum``).

Guarantees: every pair of the table is computed, none dropped; nothing is summed in an order that may change from run to
run: what returns is written to places of its own, then summed over a token's choices in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import gelu, grouped_mm, linear, silu

from experts.llm.config import Mlp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.llm.gate import MappingTable

GROUPED_PAIRS_AT_LEAST = 64  # below, few experts have tokens, and a loop over those costs less
GROUPED_ALIGNMENT_BYTES = 16  # what grouped_mm asks of addresses and strides


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A feed-forward network, or several of one form with the experts as first dimension.

    ``up``: (width, hidden); for ``SWIGLU`` (2 * width, hidden), the gate's rows first. ``down``: (hidden, width).
    """

    kind: Mlp
    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def of(self, moe_expert: int) -> MlpWeights:
        """One of several experts."""
        up_bias = None if self.up_bias is None else self.up_bias[moe_expert]
        down_bias = None if self.down_bias is None else self.down_bias[moe_expert]
        return MlpWeights(self.kind, self.up[moe_expert], self.down[moe_expert], up_bias, down_bias)


def run_mlp(tokens: Tensor, weights: MlpWeights) -> Tensor:
    """(tokens, hidden) through one network."""
    return linear(activate(linear(tokens, weights.up, weights.up_bias), weights.kind), weights.down, weights.down_bias)


def activate(raised: Tensor, kind: Mlp) -> Tensor:
    """What lies between a network's two matrices."""
    if kind is Mlp.GELU:
        return gelu(raised)
    gate, up = raised.chunk(2, dim=-1)
    return silu(gate) * up


def run_moe_experts(tokens: Tensor, table: MappingTable, weights: MlpWeights) -> Tensor:
    """(tokens, hidden) through the experts that the table names, weighed and summed."""
    scattered = scatter(tokens, table)
    run = run_grouped if is_grouped_better(scattered, weights) else run_each
    return combine(run(scattered, table, weights), table, tokens.dtype)


def scatter(tokens: Tensor, table: MappingTable) -> Tensor:
    """The layout transform: one row for each pair, in the table's order."""
    return tokens.index_select(0, table.source)


def combine(computed: Tensor, table: MappingTable, dtype: torch.dtype) -> Tensor:
    """The transform back: each pair's row to its token's choice, then their weighted sum in fp32."""
    tokens, per_token = table.weight.shape
    placed = torch.empty_like(computed)
    placed[table.order] = computed
    choices = placed.view(tokens, per_token, computed.shape[-1]).float()
    return torch.bmm(table.weight.unsqueeze(1), choices).squeeze(1).to(dtype)


def is_grouped_better(scattered: Tensor, weights: MlpWeights) -> bool:
    """Whether one grouped multiplication beats a loop over the experts, and may be used at all."""
    if len(scattered) < GROUPED_PAIRS_AT_LEAST:
        return False
    return all(_is_aligned(matrix) for matrix in (scattered, weights.up, weights.down))


def _is_aligned(matrix: Tensor) -> bool:
    row_bytes = matrix.shape[-1] * matrix.element_size()
    return row_bytes % GROUPED_ALIGNMENT_BYTES == 0 and matrix.data_ptr() % GROUPED_ALIGNMENT_BYTES == 0


def run_each(scattered: Tensor, table: MappingTable, weights: MlpWeights) -> Tensor:
    """Each expert that has tokens, one after the other."""
    computed = torch.empty_like(scattered)
    start = 0
    for moe_expert, end in enumerate(_ends(table)):
        if end > start:
            computed[start:end] = run_mlp(scattered[start:end], weights.of(moe_expert))
        start = end
    return computed


def run_grouped(scattered: Tensor, table: MappingTable, weights: MlpWeights) -> Tensor:
    """All experts in one multiplication for each matrix."""
    raised = grouped_mm(scattered, weights.up.transpose(1, 2), offs=table.ends)
    if weights.up_bias is not None:
        raised += weights.up_bias[table.moe_expert]
    computed = grouped_mm(activate(raised, weights.kind), weights.down.transpose(1, 2), offs=table.ends)
    if weights.down_bias is not None:
        computed += weights.down_bias[table.moe_expert]
    return computed


def _ends(table: MappingTable) -> Sequence[int]:
    ends: list[int] = table.ends.tolist()
    return ends
