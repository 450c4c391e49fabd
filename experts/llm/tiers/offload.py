"""Model with only some moe_experts in memory: a layer runs the resident ones while the others load.

Each moe_expert's matrices are one block of bytes, in a place of a cache. Guarantees: the result does not depend on
which were in memory; no moe_expert stays needed once a layer has run, or failed. Assumes: the tensors of norms and
gates are filled before the first pass, and stay until the next ``show``.

On a device the host waits once in each such layer, in ``copied_down``: only the host can load, so the numbers of the
layer's moe_experts, and of those that the next one will likely need, come down in one copy. A model with all of its
moe_experts in memory has no cache, and no such wait. CUDA runs behind the host, so a place that a kernel reads stays
needed until the kernel has run: until the next layer's copy, or a wait before the host waits for a load anyway.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from experts.devices.copies import copied_down, mark
from experts.llm.dispatch import MlpWeights, combine, run_mlp, scatter
from experts.llm.quant import matrix_of
from experts.llm.tiers.moe_experts import MoeExpert

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from experts.llm.dispatch import MappingTable, MoeExperts
    from experts.llm.files.config import ArchSpec, Mlp, MoeSpec
    from experts.llm.tiers.cache import MoeCache

ON_HOST = ("cpu",)  # types of devices whose numbers the host reads without a copy
BEHIND_HOST = ("cuda",)  # and of those that copy on one stream, and compute on another


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

    def counts(self, normed: Tensor) -> Tensor:
        """How many tokens each moe_expert would likely be chosen for."""
        logits = linear(normed, self.gate, self.bias)
        chosen = logits.topk(self.spec.per_token, dim=-1).indices.flatten()  # softmax would not change the order
        return chosen.new_zeros(self.spec.moe_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def likeliest(counts: Tensor) -> tuple[int, ...]:
    """moe_experts that are chosen for any token, by the number of tokens. ``counts``: on the host."""
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
        self._running: SimpleQueue[tuple[tuple[MoeExpert, ...], Callable[[], None]]] = SimpleQueue()  # behind the host

    def show(self, tensors: Mapping[str, Tensor], cache_bytes: Tensor) -> Mapping[int, MoeExperts]:
        """Set the bytes to run over: uint8, on the device, by place. Called again after the bytes have moved."""
        self._bytes, self._tensors = cache_bytes, tensors
        self._weights.clear()
        self._ahead.clear()
        return {layer: partial(self.run, layer) for layer in self._layers}

    def run(self, layer: int, tokens: Tensor, table: MappingTable) -> Tensor:
        """Implements ``experts.llm.dispatch.MoeExperts`` for a layer. Raises what loading raises."""
        scattered = scatter(tokens, table)
        computed = torch.empty_like(scattered)
        following, ahead = self._following(layer)
        parts, is_on_host = [table.ends], tokens.device.type in ON_HOST
        if not is_on_host:
            parts = copied_down(parts if ahead is None else [*parts, ahead.counts(tokens)], tokens.device)
            self.let_go()
        rows = _rows_by_number(parts[0])
        wanted = {MoeExpert(layer, number): own for number, own in rows.items()}
        self._cache.need(layer, list(rows))
        try:
            if ahead is not None:
                self._cache.predict(following, likeliest(ahead.counts(tokens) if is_on_host else parts[1]))
            self._run_all(wanted, scattered, computed)
        finally:
            self._cache.used(wanted)
        if layer == self._layers[-1]:
            self._cache.end_pass()
        return combine(computed, table, tokens.dtype)

    def let_go(self) -> None:
        """Wait until the device has run all moe_experts that it was given, which are needed no longer."""
        with suppress(Empty):
            while True:
                given, wait = self._running.get_nowait()
                try:
                    wait()
                finally:  # a lost device runs nothing more
                    self._cache.used(given)

    def _run_all(self, wanted: dict[MoeExpert, slice], scattered: Tensor, computed: Tensor) -> None:
        """Run the present moe_experts, then the others as they arrive; empties ``wanted``."""
        is_behind = scattered.device.type in BEHIND_HOST
        given: list[MoeExpert] = []

        def keep() -> None:
            if is_behind and given:
                self._running.put((tuple(given), mark(scattered.device)))
            else:
                self._cache.used(given)
            given.clear()

        def make_room() -> None:
            keep()
            self.let_go()

        try:
            while wanted:
                placed = self._cache.first_of(wanted, make_room)
                rows = wanted.pop(placed.moe_expert)
                given.append(placed.moe_expert)
                computed[rows] = run_mlp(scattered[rows], self._weights_at(placed.place))
                if not is_behind:
                    keep()
        finally:
            keep()

    def _following(self, layer: int) -> tuple[int, GateAhead | None]:
        """The next layer with moe_experts, and how to predict them; None: they are not predicted."""
        following = next((later for later in self._layers if later > layer), None)
        if following is None or not self._may_predict():
            return layer, None
        if layer not in self._ahead:
            self._ahead[layer] = self._gate_ahead(layer, following)
        return following, self._ahead[layer]

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


def _rows_by_number(ends: Tensor) -> dict[int, slice]:
    steps = enumerate(pairwise([0, *ends.tolist()]))
    return {number: slice(start, end) for number, (start, end) in steps if end > start}


def _view(block: Tensor, one: BlockTensor) -> Tensor:
    size_bytes = math.prod(one.shape) * one.dtype.itemsize
    return block[one.offset_bytes : one.offset_bytes + size_bytes].view(one.dtype).view(one.shape)
