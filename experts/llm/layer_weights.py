"""Weights of one layer, by the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from experts.llm.quant import matrix_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from experts.llm.dispatch import MlpWeights, MoeExperts
    from experts.llm.quant import Matrix


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention of one layer, by the names of its tensors. ``qkv``: queries', keys' and values' matrices stacked."""

    attention_norm: Tensor
    attention_norm_bias: Tensor | None
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    output_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """Feed-forward part of one layer, by the names of its tensors; its LayerSpec decides which fields it has."""

    mlp_norm: Tensor
    mlp_norm_bias: Tensor | None
    mlp: MlpWeights | None
    gate: Tensor | None
    experts: MlpWeights | MoeExperts | None
    shared_gate: Tensor | None
    coefficient: Tensor | None
    coefficient_bias: Tensor | None
    mlp_output_norm: Tensor | None


def held_in_layer(tensors: Mapping[str, Tensor], layer: int, record: type) -> dict[str, Any]:
    """Tensors of a layer for the fields of a record; None where the model has none."""
    names = {field.name: f"layers.{layer}.{field.name}" for field in fields(record)}
    return {field: matrix_of(tensors, name) if name in tensors else None for field, name in names.items()}
