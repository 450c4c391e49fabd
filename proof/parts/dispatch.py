"""What the mapping table saves: one MoE layer's dispatch, against the sparse einsums that it replaces.

Both compute the same layer from the same gate logits, and drop no token; the einsums' experts have as many places as
the fullest one needs. Taken in turns, medians. ``routing`` is everything but the experts' own matrices: who goes where,
and the transform there and back.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.llm.config import Mlp, MoeSpec
from experts.llm.dispatch import MlpWeights, combine, run_moe_experts, scatter
from experts.llm.gate import route
from experts.llm.sparse_einsum import run_sparse, sparse_combine, sparse_route, sparse_scatter
from profiler.bench.software import software
from profiler.targets import at_least

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from profiler.targets import Target

TOKENS, MOE_EXPERTS, HIDDEN = 1024, 128, 256
REPEATS = 15
TARGET_LAYER, TARGET_ROUTING = 4.0, 6.0
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class DispatchTimes:
    """Seconds of one layer, and of its routing alone, by table and by einsums; and how far their results differ."""

    tokens: int
    moe_experts: int
    hidden_size: int
    per_token: int
    repeats: int
    table_layer_s: float
    einsum_layer_s: float
    table_routing_s: float
    einsum_routing_s: float
    largest_difference: float

    @property
    def targets(self) -> tuple[Target, Target]:
        return (
            at_least("MoE layer, einsum / table", self.einsum_layer_s / self.table_layer_s, TARGET_LAYER),
            at_least("routing, einsum / table", self.einsum_routing_s / self.table_routing_s, TARGET_ROUTING),
        )


def measure_dispatch(
    tokens: int = TOKENS, moe_experts: int = MOE_EXPERTS, hidden_size: int = HIDDEN, *, per_token: int = 1,
    repeats: int = REPEATS,
) -> DispatchTimes:  # fmt: skip
    """Time one layer of experts as wide as the model, in fp32. ValueError where the two ways give different results."""
    with torch.inference_mode():
        layer = _Layer(tokens, moe_experts, hidden_size, per_token)
        difference = float((layer.by_table() - layer.by_einsum()).abs().max())
        if difference > TOLERANCE:
            raise ValueError(f"the two ways differ by {difference:.2g}: one of them computes another layer")
        ways = (layer.by_table, layer.by_einsum, layer.routing_by_table, layer.routing_by_einsum)
        measured = [[_seconds(way) for way in ways] for _ in range(repeats)]
    table, einsum, table_routing, einsum_routing = (statistics.median(times) for times in zip(*measured, strict=True))
    return DispatchTimes(
        tokens, moe_experts, hidden_size, per_token, repeats,
        table_layer_s=table, einsum_layer_s=einsum,
        table_routing_s=table_routing, einsum_routing_s=einsum_routing, largest_difference=difference,
    )  # fmt: skip


def report(times: DispatchTimes) -> str:
    """Figures in words, with their machine and targets."""
    pairs = (
        ("layer", times.einsum_layer_s, times.table_layer_s),
        ("routing", times.einsum_routing_s, times.table_routing_s),
    )
    return "\n".join(
        (
            f"machine    {platform.machine()}, {software()}, {torch.get_num_threads()} threads",
            f"shape      {times.tokens} tokens, {times.moe_experts} experts, {times.hidden_size} wide, "
            f"{times.per_token} a token, {times.repeats} repeats",
            *(f"{what:<10} einsum {slow * 1e3:.2f} ms, table {fast * 1e3:.2f} ms" for what, slow, fast in pairs),
            f"difference {times.largest_difference:.1e} at most",
            *(f"{one.what}: {one.found}, {one.wanted} - {one.remark}" for one in times.targets),
        )
    )


class _Layer:
    """Random experts and tokens of one shape, and both ways to bring them together."""

    def __init__(self, tokens: int, moe_experts: int, hidden_size: int, per_token: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / hidden_size**0.5

        self._spec = MoeSpec(moe_experts, per_token, hidden_size, is_normalised=False)
        self._tokens = random(tokens, hidden_size)
        self._logits = torch.randn((tokens, moe_experts), generator=generator)
        up, down = random(moe_experts, hidden_size, hidden_size), random(moe_experts, hidden_size, hidden_size)
        self._weights = MlpWeights(Mlp.GELU, up, down)

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


def _seconds(way: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started
