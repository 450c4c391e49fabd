"""Dispatch by one-hot masks and sparse einsums (GShard, arXiv 2006.16668, algorithm 1): what the table replaces.

For tests, which compare results, and the benchmark, which compares times. Tokens S, experts E, places C of an expert;
a mask of S * E * C numbers says who stands where, and most of what is multiplied with it is zero. C is as many
as the fullest expert has, so that nothing is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import one_hot

from experts.llm.dispatch import activate, plain

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.config import MoeSpec
    from experts.llm.dispatch import MlpWeights


@dataclass(frozen=True, slots=True)
class SparseMasks:
    """(tokens, experts, places): ``dispatch`` is 1 where a token stands, ``combine`` its weight there."""

    dispatch: Tensor
    combine: Tensor


def sparse_route(logits: Tensor, spec: MoeSpec) -> SparseMasks:
    """The masks for gate logits (tokens, experts)."""
    weight, chosen = logits.float().softmax(dim=-1).topk(spec.per_token, dim=-1)
    if spec.is_normalised:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    taken = one_hot(chosen, spec.moe_experts)  # tokens, choices, experts
    before = (taken.flatten(0, 1).cumsum(dim=0) - taken.flatten(0, 1)).view_as(taken)
    places = (before * taken).sum(dim=-1)  # tokens, choices
    capacity = int(taken.sum(dim=(0, 1)).max()) if len(logits) else 0
    standing = one_hot(places, capacity).float() if capacity else torch.zeros((*chosen.shape, 0))
    combine = torch.einsum("sk,ske,skc->sec", weight, taken.float(), standing)
    return SparseMasks(dispatch=torch.einsum("ske,skc->sec", taken.float(), standing), combine=combine)


def sparse_scatter(tokens: Tensor, masks: SparseMasks) -> Tensor:
    return torch.einsum("sec,sm->ecm", masks.dispatch.to(tokens.dtype), tokens)  # (experts, places, hidden)


def sparse_combine(computed: Tensor, masks: SparseMasks) -> Tensor:
    return torch.einsum("sec,ecm->sm", masks.combine.to(computed.dtype), computed)  # (tokens, hidden)


def run_sparse(tokens: Tensor, masks: SparseMasks, weights: MlpWeights) -> Tensor:
    """(tokens, hidden) through the experts that the masks name: every place of every expert is computed."""
    raised = torch.bmm(sparse_scatter(tokens, masks), plain(weights.up).transpose(1, 2))
    if weights.up_bias is not None:
        raised = raised + weights.up_bias.unsqueeze(1)
    computed = torch.bmm(activate(raised, weights.kind), plain(weights.down).transpose(1, 2))
    if weights.down_bias is not None:
        computed = computed + weights.down_bias.unsqueeze(1)
    return sparse_combine(computed, masks)
