"""Gating: the moe_experts of each token, as the dense token-to-expert mapping table of DeepSpeed-MoE.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 5.4, which replaces one-hot masks and their sparse einsums by a table.
Dropless: a moe_expert has no capacity, so a token's moe_experts do not depend on its neighbours.
Deterministic: a stable counting sort keeps each moe_expert's tokens in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.config import MoeSpec


@dataclass(frozen=True, slots=True)
class MappingTable:
    """Pairs of a token and one of its experts; pair ``token * per_token + n`` is a token's n-th choice."""

    order: Tensor  # the pairs sorted by expert, then token, int64
    source: Tensor  # their tokens
    moe_expert: Tensor  # their experts
    ends: Tensor  # cumulative, where each expert's pairs end, int32
    weight: Tensor  # (tokens, per_token) fp32


def route(logits: Tensor, spec: MoeSpec) -> MappingTable:
    """Softmax of (tokens, experts) in fp32, then top ``per_token``; Mixtral's, and by ``norm_topk_prob``, sum to 1."""
    weight, chosen = logits.float().softmax(dim=-1).topk(spec.per_token, dim=-1)
    if spec.is_normalised:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    return mapping_table(chosen, weight, spec.moe_experts)


def mapping_table(chosen: Tensor, weight: Tensor, moe_experts: int) -> MappingTable:
    """The table of tokens that chose these experts, both (tokens, per_token)."""
    # keys of a byte or two make torch's stable sort a counting sort
    keys = chosen.reshape(-1).to(torch.uint8 if moe_experts <= 256 else torch.int16)
    moe_expert, order = torch.sort(keys, stable=True)
    counts = torch.bincount(keys, minlength=moe_experts)
    ends = counts.cumsum(dim=0).to(torch.int32)
    return MappingTable(order, order // chosen.shape[1], moe_expert.to(torch.int64), ends, weight)
