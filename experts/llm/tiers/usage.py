"""How likely a token needs each moe_expert, counted where a model reads prompts: what a cache knows beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from experts.llm.dispatch import run_moe_experts
from experts.llm.key_values import ContiguousKeyValues
from experts.llm.tiers.moe_experts import MoeExpert
from experts.llm.token_batch import Chunk, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.llm.dispatch import MlpWeights, MoeExperts
    from experts.llm.gate import MappingTable
    from experts.llm.model import Model


def count_routing(model: Model, prompts: Sequence[Sequence[int]]) -> dict[MoeExpert, float]:
    """Share of the prompts' tokens that go to each moe_expert. Raises ValueError without a token to count."""
    tokens = sum(len(prompt) for prompt in prompts)
    if not tokens:
        raise ValueError("a prompt with tokens is needed: there is nothing to count")
    counts = {
        number: torch.zeros(layer.moe.moe_experts, dtype=torch.int64)
        for number, layer in enumerate(model.spec.layers)
        if layer.moe is not None
    }
    counting = model.running_through(lambda layer, moe_experts: _Counting(moe_experts, counts[layer]))
    key_values = ContiguousKeyValues(model.spec, model.dtype, model.device)
    for number, prompt in enumerate(prompts):
        if prompt:
            counting.hidden(TokenBatch.of([Chunk(number, 0, prompt)], model.device), key_values)
            key_values.release(number)
    return {
        MoeExpert(layer, number): count / tokens
        for layer, found in counts.items()
        for number, count in enumerate(found.tolist())
    }


class _Counting:
    def __init__(self, moe_experts: MlpWeights | MoeExperts, counts: Tensor) -> None:
        self._moe_experts = moe_experts
        self._counts = counts

    def run(self, tokens: Tensor, table: MappingTable) -> Tensor:
        self._counts += torch.bincount(table.moe_expert, minlength=len(self._counts)).cpu()
        return run_moe_experts(tokens, table, self._moe_experts)
