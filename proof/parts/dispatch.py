"""Dispatch in a mixture-of-experts layer: the mapping table against the sparse einsums that it replaces.

Both ways compute the same layer from the same gate logits, and drop no token; the einsums' experts have as many places
as the fullest one needs. ``routing`` is everything but the experts' own matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.llm.config import Mlp, MoeSpec
from experts.llm.dispatch import MlpWeights, combine, run_moe_experts, scatter
from experts.llm.gate import route
from profiler.bench.measured import Column, Measured, this_machine
from profiler.bench.turns import Plan, by_turns
from profiler.targets import at_least
from proof.parts.sparse_einsum import run_sparse, sparse_combine, sparse_route, sparse_scatter

if TYPE_CHECKING:
    from torch import Tensor

TARGET_LAYER, TARGET_ROUTING = 4.0, 6.0
TOLERANCE = 1e-4
COLUMNS = (
    Column("part", "part"),
    Column("einsum ms", "einsum_s", ".2f", 1e3),
    Column("table ms", "table_s", ".2f", 1e3),
    Column("einsum / table", "gain", ".2f"),
)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of experts as wide as the model, in fp32."""

    tokens: int = 1024
    moe_experts: int = 128
    hidden: int = 256
    per_token: int = 1


@dataclass(frozen=True, slots=True)
class DispatchTimes:
    """Medians of both ways through a layer, or through its routing alone."""

    part: str
    einsum_s: float
    table_s: float

    @property
    def gain(self) -> float:
        return self.einsum_s / self.table_s


def measure_dispatch(shape: LayerShape | None = None, rounds: int = 15) -> Measured:
    """Time one layer both ways. ValueError where their results differ."""
    shape = shape or LayerShape()
    with torch.inference_mode():
        layer = _Layer(shape)
        difference = float((layer.by_table() - layer.by_einsum()).abs().max())
        if difference > TOLERANCE:
            raise ValueError(f"the two ways differ by {difference:.2g}: one of them computes another layer")
        ways = (layer.by_einsum, layer.by_table, layer.routing_by_einsum, layer.routing_by_table)
        times = by_turns({way.__name__: way for way in ways}, Plan(rounds))
    median_s = [each.median_s for each in times.values()]
    rows = DispatchTimes("MoE layer", *median_s[:2]), DispatchTimes("routing", *median_s[2:])
    wanted = (TARGET_LAYER, TARGET_ROUTING)
    targets = tuple(
        at_least(f"{row.part}, einsum / table", row.gain, least) for row, least in zip(rows, wanted, strict=True)
    )
    note = (
        f"{shape.tokens} tokens, {shape.moe_experts} experts, {shape.hidden} wide, {shape.per_token} a token, "
        f"{rounds} rounds; results differ by {difference:.1e} at most"
    )
    return Measured(this_machine(f"{torch.get_num_threads()} threads"), COLUMNS, rows, targets, (note,))


class _Layer:
    """Random experts and tokens of one shape, and both ways to bring them together."""

    def __init__(self, shape: LayerShape) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator) / shape.hidden**0.5

        self._spec = MoeSpec(shape.moe_experts, shape.per_token, shape.hidden, is_normalised=False)
        self._tokens = random(shape.tokens, shape.hidden)
        self._logits = torch.randn((shape.tokens, shape.moe_experts), generator=generator)
        matrices = (shape.moe_experts, shape.hidden, shape.hidden)
        self._weights = MlpWeights(Mlp.GELU, random(*matrices), random(*matrices))

    def by_table(self) -> Tensor:
        return run_moe_experts(self._tokens, route(self._logits, self._spec), self._weights)

    def by_einsum(self) -> Tensor:
        return run_sparse(self._tokens, sparse_route(self._logits, self._spec), self._weights)

    def routing_by_table(self) -> Tensor:
        table = route(self._logits, self._spec)
        return combine(scatter(self._tokens, table), table, self._tokens.dtype)

    def routing_by_einsum(self) -> Tensor:
        masks = sparse_route(self._logits, self._spec)
        return sparse_combine(sparse_scatter(self._tokens, masks), masks)
