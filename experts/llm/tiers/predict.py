"""What is done ahead of a layer: which of its experts it will need, and whether their weights are worth moving.

Gate-ahead: the hidden states of neighbouring layers are alike, so a later layer's gate, on the tokens as they are now,
mostly chooses as it will. A wrong guess costs a load, never a token. Fiddler's rule (arXiv 2402.07033, section 3.2):
where weights lie in host memory, few tokens may be taken to the weights sooner than the weights to the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.config import MoeSpec


class Way(StrEnum):
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class RowsTime:
    """Seconds that a processor takes for one moe_expert and so many rows: ``K_s * rows + B_s``."""

    K_s: float
    B_s: float

    def at(self, rows: int) -> float:
        return self.K_s * rows + self.B_s


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Profiled constants of one model's moe_experts on one box."""

    link_bytes_per_s: float
    link_s: float  # of any copy, beside its bytes
    row_bytes: int  # one token's hidden state
    device: RowsTime
    cpu: RowsTime

    def weights_s(self, block_bytes: int, rows: int) -> float:
        return self.link_s + block_bytes / self.link_bytes_per_s + self.device.at(rows)

    def activations_s(self, rows: int) -> float:
        return 2 * (self.link_s + rows * self.row_bytes / self.link_bytes_per_s) + self.cpu.at(rows)


def cheaper_way(block_bytes: int, rows: int, costs: MoveCosts) -> Way:
    """What to move for one moe_expert of so many bytes that lies in host memory; weights where both cost the same."""
    moves_weights = costs.weights_s(block_bytes, rows) <= costs.activations_s(rows)
    return Way.WEIGHTS if moves_weights else Way.ACTIVATIONS


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
        """Who is likely needed, the likeliest first: those that it chooses for any of the tokens, by for how many."""
        logits = linear(normed, self.gate, self.bias)
        chosen = logits.topk(self.spec.per_token, dim=-1).indices  # softmax would not change the order
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.moe_experts)
        order = torch.sort(counts, descending=True, stable=True).indices[: int(counts.count_nonzero())]
        numbers: list[int] = order.tolist()
        return tuple(numbers)
