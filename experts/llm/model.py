"""The forward pass of every family, token-flat over an iteration's prefill and decode rows.

Guarantees: a row's tokens equal those of the row alone, up to rounding: padding is masked, and no token is dropped. A
model only borrows tensors, so bytes that are written into them change the model at once.

Rotary positions (RoFormer, arXiv 2104.09864) have the scalings that long-context checkpoints were trained with.
Frequencies are computed in fp32 as the checkpoints' own library does: an error in the last digit would rotate far
positions by more than logits may differ.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.functional import embedding, layer_norm, linear, rms_norm

from experts.llm.attention import Attention
from experts.llm.dispatch import MlpWeights, route, run_mlp, run_moe_experts
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import Norm, QkNorm, Residual, RopeKind, read_spec
from experts.llm.files.names import EMBEDDING, FINAL_NORM, FINAL_NORM_BIAS, HEAD, POSITIONS
from experts.llm.kernels.products import norm_heads, rotate, takes_attention
from experts.llm.layer_weights import AttentionWeights, FeedForwardWeights, held_in_layer
from experts.llm.low_rank import AdaptedRows, adapter_of, added
from experts.llm.plain_layers import PlainLayers, plain_layers
from experts.llm.quant import RootMeanSquare, looked_up, matrix_of, project, takes_rows
from experts.llm.scoped_attention import ScopedAttention, scopes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from experts.llm.attention import BatchKeyValues, KeyValues
    from experts.llm.dispatch import MoeExperts
    from experts.llm.files.config import ArchSpec, LayerSpec, RopeSpec
    from experts.llm.kernels.products import Sequences
    from experts.llm.token_batch import TokenBatch

Step: TypeAlias = "Callable[..., tuple[Tensor, ...]]"  # of a model and the step's inputs
Attend: TypeAlias = "Callable[[int, Tensor, Tensor, Tensor], Tensor]"  # of a layer, queries, keys and values


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of some tokens' angles: (tokens, 1, head size). The sine's first half is negative."""

    cosine: Tensor
    sine: Tensor

    def turn(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys, (tokens, heads, head size): the first half of a head pairs with its second.

        They are changed in place if the CPU can.
        """
        if takes_attention(heads):
            rotate(heads, self.cosine, self.sine)
            return heads
        return torch.addcmul(heads * self.cosine, heads.roll(heads.shape[-1] // 2, -1), self.sine)


class PartialRotation(Rotation):
    """Rotation of the first part of each head."""

    def turn(self, heads: Tensor) -> Tensor:
        size = self.cosine.shape[-1]
        return torch.cat((super().turn(heads[..., :size]), heads[..., size:]), dim=-1)


class Rope:
    def __init__(self, spec: RopeSpec, head_size: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_size).to(device)
        self._magnitude = spec.magnitude
        self._kind = Rotation if spec.head_share == 1 else PartialRotation

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at these positions; angles always in fp32."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cosine, sine = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return self._kind(torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype))


def inverse_frequencies(spec: RopeSpec, head_size: int) -> Tensor:
    """Radians per position of each rotated pair of a head: fp32, (head size / 2), on the CPU."""
    size = int(head_size * spec.head_share)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    if spec.divisors:
        return 1.0 / (torch.tensor(spec.divisors) * spec.theta**exponents)
    trained = 1.0 / spec.theta**exponents
    if spec.kind is RopeKind.DEFAULT:
        return trained
    if spec.kind is RopeKind.LINEAR:
        return trained / spec.factor
    kept = _kept_by_turns(spec, trained) if spec.kind is RopeKind.LLAMA3 else _kept_by_index(spec, head_size)
    return kept * trained + (1 - kept) * trained / spec.factor


def _kept_by_turns(spec: RopeSpec, trained: Tensor) -> Tensor:
    """Unscaled share of each frequency, by its number of turns in the trained context (Llama 3.1)."""
    turns = spec.trained_positions * trained / (2 * math.pi)
    return ((turns - spec.slow_turns) / (spec.fast_turns - spec.slow_turns)).clamp(0, 1)


def _kept_by_index(spec: RopeSpec, head_size: int) -> Tensor:
    """Unscaled share of each frequency, by its place in the head (YaRN, arXiv 2309.00071, section 3.2)."""

    def place(turns: float) -> float:
        return head_size * math.log(spec.trained_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    fast, slow = place(spec.fast_turns), place(spec.slow_turns)
    if spec.is_ramp_rounded:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, head_size - 1)
    width = slow - fast if slow != fast else 0.001  # a ramp of one place is a step
    places = torch.arange(head_size // 2, dtype=torch.float32)
    return 1 - ((places - fast) / width).clamp(0, 1)


class LanguageModel:
    """Language model over borrowed tensors (``names``). ``moe_experts``: by layer, those that a cache runs.

    ``adapters``: of the rows of a pass; the model's own, if it has one, is for all rows.
    """

    def __init__(
        self, spec: ArchSpec, tensors: Mapping[str, Tensor], moe_experts: Mapping[int, MoeExperts] | None = None
    ) -> None:
        self.spec = spec
        self._embedding = matrix_of(tensors, EMBEDDING)
        self._positions = tensors.get(POSITIONS)
        self._norm = tensors[FINAL_NORM]
        self._norm_bias = tensors.get(FINAL_NORM_BIAS)
        self._head = self._embedding if spec.is_tied else matrix_of(tensors, HEAD)
        self._attention: list[AttentionWeights] = []
        self._feed_forward: list[FeedForwardWeights] = []
        for layer in range(len(spec.layers)):
            self._attention.append(AttentionWeights(**held_in_layer(tensors, layer, AttentionWeights)))
            mlp, experts = (_mlp_weights(spec, tensors, f"layers.{layer}.{name}") for name in ("mlp", "experts"))
            own = held_in_layer(tensors, layer, FeedForwardWeights)
            own |= {"mlp": mlp, "experts": (moe_experts or {}).get(layer, experts)}
            self._feed_forward.append(FeedForwardWeights(**own))
        self._rope = None if spec.rope is None else Rope(spec.rope, spec.head_size, self.device)
        self._local_rope = None if spec.local_rope is None else Rope(spec.local_rope, spec.head_size, self.device)
        self._is_stored_less_one = spec.norm is Norm.RMS_ABOVE_ONE
        scale = spec.embedding_scale  # rounded as transformers does
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=self.dtype))
        self.scopes = None if spec.is_attention_plain else scopes_of(spec)
        adapter = adapter_of(tensors)
        self.adapters: tuple[AdaptedRows, ...] = (AdaptedRows(None, adapter),) if adapter else ()

    @property
    def dtype(self) -> torch.dtype:
        return self._norm.dtype

    @property
    def device(self) -> torch.device:
        return self._norm.device

    def forward(self, batch: TokenBatch, key_values: KeyValues) -> Tensor:
        """Logits of each row's next token: (rows, vocabulary), in the model's dtype. Stores keys and values."""
        return self.logits(self.hidden(batch, key_values)[batch.last])

    def hidden(self, batch: TokenBatch, key_values: KeyValues) -> Tensor:
        """Hidden states behind the last layer: (tokens, hidden), not yet normalised."""
        with torch.inference_mode():
            reserved = key_values.reserve(batch)
            decoded = None if batch.prefill_count or self.adapters else self._decoded(batch, reserved.sequences)
            if decoded is not None:
                return decoded
            return run_layers(self, lambda _, step, *inputs: step(self, *inputs), batch, reserved)

    def _decoded(self, batch: TokenBatch, sequences: Sequences | None) -> Tensor | None:
        """Hidden states of single tokens by one compiled call, if the model and the CPU have one."""
        if sequences is None or sequences.dtype is not self.dtype or self._plain_layers is None:
            return None
        tokens = self.embedded(batch.token_ids, batch.positions)
        if not takes_rows(tokens):
            return None
        rotation = self.rotations(batch.positions)[0]
        self._plain_layers.run(tokens, None if rotation is None else (rotation.cosine, rotation.sine), sequences)
        return tokens

    @cached_property
    def _plain_layers(self) -> PlainLayers | None:
        return plain_layers(self.spec, list(zip(self._attention, self._feed_forward, strict=True)))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head for some tokens: (tokens, vocabulary)."""
        with torch.inference_mode():
            return self.predicted(hidden)

    def normed(self, hidden: Tensor) -> Tensor:
        """States that the head is multiplied with."""
        with torch.inference_mode():
            return self._normed(hidden, self._norm, self._norm_bias)

    # -- steps of a pass: ``experts.llm.serving.family`` runs several models in one --

    @property
    def parts(self) -> tuple[object, ...]:
        """Weights of its steps without adapters: embedding, each layer's attention and feed-forward part, head."""
        layers = zip(self._attention, self._feed_forward, strict=True)
        of_layers = (part for layer in layers for part in layer)
        return ((self._embedding, self._positions), *of_layers, (self._norm, self._norm_bias, self._head))

    def adapted(self, adapters: tuple[AdaptedRows, ...]) -> LanguageModel:
        """The model with these adapters in the place of its own."""
        if not adapters and not self.adapters:
            return self
        other = copy(self)
        other.adapters = adapters
        return other

    def rotations(self, positions: Tensor) -> list[Rotation | None]:
        """By layer."""
        usual = None if self._rope is None else self._rope.at(positions, self.dtype)
        if self._local_rope is None:
            return [usual] * len(self.spec.layers)
        local = self._local_rope.at(positions, self.dtype)
        return [local if layer.has_local_rope else usual for layer in self.spec.layers]

    def embedded_tokens(self, token_ids: Tensor) -> Tensor:
        """Tokens without their positions."""
        tokens = looked_up(token_ids, self._embedding).to(self.dtype)
        return tokens if self._embedding_scale is None else tokens * self._embedding_scale

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        tokens = self.embedded_tokens(token_ids)
        return tokens if self._positions is None else tokens + embedding(positions, self._positions)

    def attention_inputs(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before rotation, as the heads of one tensor, and values: (tokens, heads, head size)."""
        spec, weights = self.spec, self._attention[layer]
        norm = self._mean_square(weights.attention_norm, weights.attention_norm_bias)
        normed = tokens if norm else self._normed(tokens, weights.attention_norm, weights.attention_norm_bias)
        projected = project(normed, weights.qkv, weights.qkv_bias, norm=norm)
        before = norm.applied if norm else None
        projected = added(projected, normed, self.adapters, f"layers.{layer}.qkv", before)
        turned, values = projected.split((spec.query_size + spec.kv_size, spec.kv_size), dim=-1)
        if spec.qk_norm is QkNorm.WHOLE:
            queries, keys = turned.split((spec.query_size, spec.kv_size), dim=-1)
            normed = self._whole_normed(queries, weights.q_norm), self._whole_normed(keys, weights.k_norm)
            turned = torch.cat(normed, dim=-1)
        if spec.qkv_limit is not None:
            turned, values = (one.clamp(-spec.qkv_limit, spec.qkv_limit) for one in (turned, values))
        turned = turned.reshape(-1, spec.heads + spec.kv_heads, spec.head_size)
        if spec.qk_norm is QkNorm.HEAD:
            assert weights.q_norm is not None, "the layout of names has it where the spec has it"
            assert weights.k_norm is not None, "and this one"
            size = spec.head_size
            if takes_attention(turned) and weights.q_norm.dtype is turned.dtype and not self._is_stored_less_one:
                norm_heads(turned, spec.heads, (weights.q_norm, weights.k_norm), spec.norm_epsilon)
                return turned, values.reshape(-1, spec.kv_heads, spec.head_size)
            norm = torch.cat((weights.q_norm.expand(spec.heads, size), weights.k_norm.expand(spec.kv_heads, size)))
            if self._is_stored_less_one:
                exact = rms_norm(turned.float(), (size,), None, spec.norm_epsilon)
                turned = torch.addcmul(exact, exact, norm.float()).to(turned.dtype)
            else:
                turned = rms_norm(turned, (size,), None, spec.norm_epsilon) * norm
        return turned, values.reshape(-1, spec.kv_heads, spec.head_size)

    def attention_output(self, layer: int, attended: Tensor) -> Tensor:
        weights, rows = self._attention[layer], attended.reshape(-1, self.spec.query_size)
        projected = project(rows, weights.output, weights.output_bias)
        return added(projected, rows, self.adapters, f"layers.{layer}.output")

    def normed_outputs(self, layer: int, attended: Tensor) -> Tensor:
        """What ``attention_output`` gave, of models with norms behind it."""
        return self._normed(attended, self._attention[layer].output_norm)

    def normed_feed_forward(self, layer: int, tokens: Tensor) -> Tensor:
        return self._normed(tokens, self._feed_forward[layer].mlp_output_norm)

    def feed_forward(self, layer: int, tokens: Tensor) -> Tensor:
        weights, own = self._feed_forward[layer], self.spec.layers[layer]
        if self.adapters and weights.mlp is not None:
            weights = replace(weights, mlp=replace(weights.mlp, adapters=self.adapters, name=f"layers.{layer}.mlp"))
        norm = self._mean_square(weights.mlp_norm, weights.mlp_norm_bias)
        if own.moe is None and norm is not None and weights.mlp is not None:
            return run_mlp(tokens, weights.mlp, norm)
        return feed_forward(self._normed(tokens, weights.mlp_norm, weights.mlp_norm_bias), own, weights)

    def _whole_normed(self, tokens: Tensor, weight: Tensor | None) -> Tensor:
        return self._normed(tokens, weight)

    def gate_logits(self, layer: int, tokens: Tensor) -> Tensor | None:
        """Logits by which ``feed_forward`` chooses, (tokens, moe_experts); None for a dense layer."""
        weights = self._feed_forward[layer]
        if weights.gate is None:
            return None
        return linear(self._normed(tokens, weights.mlp_norm, weights.mlp_norm_bias), weights.gate)

    def predicted(self, hidden: Tensor) -> Tensor:
        norm, cap = self._mean_square(self._norm, self._norm_bias), self.spec.logit_cap
        normed = hidden if norm else self._normed(hidden, self._norm, self._norm_bias)
        logits = project(normed, self._head, norm=norm)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _mean_square(self, weight: Tensor, bias: Tensor | None) -> RootMeanSquare | None:
        """A norm that ``project`` takes along; None for others."""
        is_plain = bias is None and not self._is_stored_less_one
        return RootMeanSquare(weight, self.spec.norm_epsilon) if is_plain else None

    def _normed(self, tokens: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None, "the layout of names has it where the spec has it"
        if bias is not None:  # which LayerNorm alone has
            return layer_norm(tokens, weight.shape, weight, bias, self.spec.norm_epsilon)
        if self._is_stored_less_one:  # added here: 16 bits of the sum would be fewer than those of the stored weight
            exact = rms_norm(tokens.float(), weight.shape, weight.float() + 1, self.spec.norm_epsilon)
            return exact.to(tokens.dtype)
        return rms_norm(tokens, weight.shape, weight, self.spec.norm_epsilon)


def run_layers(model: LanguageModel, run: Step, batch: TokenBatch, reserved: BatchKeyValues) -> Tensor:
    """Pass of one model or several: all tokens behind the last layer, not yet normalised.

    ``run(part, step, *inputs)`` runs one step over all tokens; ``part``: place of the step's weights in ``parts``.
    """
    scopes = model.scopes
    attention = Attention(batch, reserved) if scopes is None else ScopedAttention(batch, reserved, scopes)
    return run_steps(model, run, batch.token_ids, batch.positions, attention.run)


def run_steps(model: LanguageModel, run: Step, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """All tokens behind the last layer, with any attention; ``run`` as in ``run_layers``."""
    rotations = model.rotations(positions)
    (tokens,) = run(0, lambda one, *own: (one.embedded(*own),), token_ids, positions)
    for layer, rotation in enumerate(rotations):
        tokens = _run_layer(model.spec, layer, run, tokens, attend, rotation)
    return tokens


def _run_layer(
    spec: ArchSpec, layer: int, run: Step, tokens: Tensor, attend: Attend, rotation: Rotation | None
) -> Tensor:
    before, behind = 1 + 2 * layer, 2 + 2 * layer
    turned, values = run(before, lambda one, own: one.attention_inputs(layer, own), tokens)
    if rotation is not None:
        turned = rotation.turn(turned)
    queries, keys = turned.split((spec.heads, spec.kv_heads), dim=1)
    attended = attend(layer, queries, keys, values)
    (added,) = run(before, lambda one, own: (one.attention_output(layer, own),), attended)
    if spec.has_output_norms:
        (added,) = run(before, lambda one, own: (one.normed_outputs(layer, own),), added)
    tokens = tokens + added
    (added,) = run(behind, lambda one, own: (one.feed_forward(layer, own),), tokens)
    if spec.has_output_norms:
        (added,) = run(behind, lambda one, own: (one.normed_feed_forward(layer, own),), added)
    return tokens + added


def feed_forward(tokens: Tensor, layer: LayerSpec, weights: FeedForwardWeights) -> Tensor:
    """Run a layer's MLP, moe_experts, or both, by its spec: (tokens, hidden), without the residual connection."""
    beside = None if weights.mlp is None else run_mlp(tokens, weights.mlp)
    if layer.moe is None:
        assert beside is not None, "a layer without experts is an MLP"
        return beside
    assert weights.gate is not None, "a layer with experts has a gate"
    assert weights.experts is not None, "and their weights"
    table = route(linear(tokens, weights.gate), layer.moe)
    mixed = run_moe_experts(tokens, table, weights.experts)
    if beside is None:
        return mixed
    if weights.shared_gate is not None:
        return mixed + linear(tokens, weights.shared_gate).sigmoid() * beside
    if layer.residual is Residual.ADD:
        return mixed + beside
    assert weights.coefficient is not None, "residual: softmax has a coefficient"
    shares = linear(tokens, weights.coefficient, weights.coefficient_bias).softmax(dim=-1)
    return mixed * shares[:, :1] + beside * shares[:, 1:]


def load_model(directory: Path, expert: str, dtype: torch.dtype | None = None) -> LanguageModel:
    """A Hugging Face directory's model, on the CPU. Raises as ``read_spec`` and ``open_checkpoint``."""
    spec = read_spec(directory, expert)
    return LanguageModel(spec, open_checkpoint(directory, expert, spec).read_all(dtype))


def _mlp_weights(spec: ArchSpec, tensors: Mapping[str, Tensor], name: str) -> MlpWeights | None:
    if f"{name}.up" not in tensors:
        return None
    up_bias, down_bias = tensors.get(f"{name}.up_bias"), tensors.get(f"{name}.down_bias")
    return MlpWeights(
        spec.mlp, matrix_of(tensors, f"{name}.up"), matrix_of(tensors, f"{name}.down"), up_bias, down_bias
    )
