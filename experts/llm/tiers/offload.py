"""Model with only some moe_experts in memory: a layer runs the resident ones while the others load.

Each moe_expert's matrices are one block of bytes, in a place of a cache. Guarantees: the result does not depend on
which were in memory; no moe_expert stays needed once a layer has run, or failed. Assumes: the tensors of norms and
gates are filled before the first pass, and stay until the next ``show``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from experts.llm.dispatch import MlpWeights, combine, run_mlp, scatter
from experts.llm.quant import matrix_of
from experts.llm.tiers.moe_experts import MoeExpert

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from experts.llm.config import ArchSpec, Mlp, MoeSpec
    from experts.llm.dispatch import MappingTable, MoeExperts
    from experts.llm.tiers.cache import MoeCache


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Tensor of a moe_expert: ``up``, ``down``, their biases or scales, and its offset in the block."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Layout of a moe_expert in its block of bytes, equal for all of a model."""

    size_bytes: int
    tensors: tuple[BlockTensor, ...]

    def weights(self, block: Tensor, kind: Mlp) -> MlpWeights:
        """The network that a block holds: views of it. ``block``: uint8, one-dimensional, on any device."""
        views = {one.name: _view(block, one) for one in self.tensors}
        up, down = matrix_of(views, "up"), matrix_of(views, "down")
        return MlpWeights(kind, up, down, views.get("up_bias"), views.get("down_bias"))


@dataclass(frozen=True, slots=True)
class GateAhead:
    """A later layer's gate, (experts, hidden), applied to the tokens of an earlier layer, which its norm has scaled.

    Hidden states of neighbouring layers are alike, so the gate mostly chooses as it will later. A wrong prediction
    costs a load, never a token.
    """

    spec: MoeSpec
    gate: Tensor
    bias: Tensor | None

    @classmethod
    def between(
        cls, spec: MoeSpec, gate: Tensor, here: tuple[Tensor, Tensor | None], there: tuple[Tensor, Tensor | None]
    ) -> GateAhead:
        """``here`` and ``there``: the two norms' scales and biases. A channel of scale 0 here counts for nothing."""
        (scale_here, bias_here), (scale_there, bias_there) = here, there
        ratio = (scale_there.float() / scale_here.float()).masked_fill(scale_here == 0, 0.0)
        adjusted = gate.float() * ratio
        bias = None
        if bias_here is not None and bias_there is not None:
            bias = (gate.float() @ bias_there.float() - adjusted @ bias_here.float()).to(gate.dtype)
        return cls(spec, adjusted.to(gate.dtype), bias)

    def likely(self, normed: Tensor) -> tuple[int, ...]:
        """Likely moe_experts, likeliest first: those chosen for any token, by the number of tokens."""
        logits = linear(normed, self.gate, self.bias)
        chosen = logits.topk(self.spec.per_token, dim=-1).indices  # softmax would not change the order
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.moe_experts)
        order = torch.sort(counts, descending=True, stable=True).indices[: int(counts.count_nonzero())]
        numbers: list[int] = order.tolist()
        return tuple(numbers)


class OffloadedMoe:
    """moe_experts of one copy. ``may_predict``: False while the Engine's loads need the link."""

    def __init__(
        self, spec: ArchSpec, form: BlockForm, cache: MoeCache, may_predict: Callable[[], bool] = lambda: True
    ) -> None:
        self._spec = spec
        self._form = form
        self._cache = cache
        self._may_predict = may_predict
        self._layers = tuple(number for number, layer in enumerate(spec.layers) if layer.moe is not None)
        self._bytes: Tensor | None = None
        self._tensors: Mapping[str, Tensor] = {}
        self._ahead: dict[int, GateAhead] = {}
        self._weights: dict[int, MlpWeights] = {}

    def show(self, tensors: Mapping[str, Tensor], cache_bytes: Tensor) -> Mapping[int, MoeExperts]:
        """Set the bytes to run over: uint8, on the device, by place. Called again after the bytes have moved."""
        self._bytes, self._tensors = cache_bytes, tensors
        self._weights.clear()
        self._ahead.clear()
        return {layer: partial(self.run, layer) for layer in self._layers}

    def run(self, layer: int, tokens: Tensor, table: MappingTable) -> Tensor:
        """Implements ``experts.llm.dispatch.MoeExperts`` for a layer. Raises what loading raises."""
        rows = _rows_by_number(table)
        scattered = scatter(tokens, table)
        computed = torch.empty_like(scattered)
        wanted = {MoeExpert(layer, number): own for number, own in rows.items()}
        self._cache.need(layer, list(rows))
        try:
            self._predict(layer, tokens)
            self._run_all(wanted, scattered, computed)
        finally:
            self._cache.used(wanted)
        if layer == self._layers[-1]:
            self._cache.end_pass()
        return combine(computed, table, tokens.dtype)

    def _run_all(self, wanted: dict[MoeExpert, slice], scattered: Tensor, computed: Tensor) -> None:
        """Run the present moe_experts, then the others as they arrive; empties ``wanted``."""
        while wanted:
            placed = self._cache.first_of(wanted)
            rows = wanted.pop(placed.moe_expert)
            computed[rows] = run_mlp(scattered[rows], self._weights_at(placed.place))
            self._cache.used((placed.moe_expert,))

    def _predict(self, layer: int, tokens: Tensor) -> None:
        following = next((later for later in self._layers if later > layer), None)
        if following is None or not self._may_predict():
            return
        if layer not in self._ahead:
            self._ahead[layer] = self._gate_ahead(layer, following)
        self._cache.predict(following, self._ahead[layer].likely(tokens))

    def _gate_ahead(self, layer: int, following: int) -> GateAhead:
        moe = self._spec.layers[following].moe
        assert moe is not None, "it has experts"
        here, there = f"layers.{layer}", f"layers.{following}"
        return GateAhead.between(
            moe, self._tensors[f"{there}.gate"],
            (self._tensors[f"{here}.mlp_norm"], self._tensors.get(f"{here}.mlp_norm_bias")),
            (self._tensors[f"{there}.mlp_norm"], self._tensors.get(f"{there}.mlp_norm_bias")),
        )  # fmt: skip

    def _weights_at(self, place: int) -> MlpWeights:
        weights = self._weights.get(place)
        if weights is None:
            assert self._bytes is not None, "show comes first"
            start = place * self._form.size_bytes
            block = self._bytes[start : start + self._form.size_bytes]
            weights = self._weights[place] = self._form.weights(block, self._spec.mlp)
        return weights


def _rows_by_number(table: MappingTable) -> dict[int, slice]:
    ends: list[int] = table.ends.tolist()
    return {number: slice(start, end) for number, (start, end) in enumerate(pairwise([0, *ends])) if end > start}


def _view(block: Tensor, one: BlockTensor) -> Tensor:
    size_bytes = math.prod(one.shape) * one.dtype.itemsize
    return block[one.offset_bytes : one.offset_bytes + size_bytes].view(one.dtype).view(one.shape)
