"""Gate-ahead: predicts which moe_experts a later layer will need.

The hidden states of neighbouring layers are alike. So a later layer's gate, on the tokens of an earlier one, mostly
chooses as it will choose later. A wrong guess costs a load, never a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.config import MoeSpec


@dataclass(frozen=True, slots=True)
class GateAhead:
    """A later layer's gate, (experts, hidden), for tokens that an earlier norm has scaled."""

    spec: MoeSpec
    gate: Tensor
    bias: Tensor | None

    @classmethod
    def between(
        cls, spec: MoeSpec, gate: Tensor, here: tuple[Tensor, Tensor | None], there: tuple[Tensor, Tensor | None]
    ) -> GateAhead:
        """``here`` and ``there``: the two norms' scales and biases. A channel without scale here tells nothing."""
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
