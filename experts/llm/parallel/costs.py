"""Traffic and predicted time of an exchange of tokens, and the choice of the cheapest form.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 5.3. A message costs a latency and a time for each byte, inside a node
and between nodes (Hockney's model); a rank sends its messages one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experts.llm.parallel.shape import MeshShape


class ExchangeForm(StrEnum):
    """Ways of moving tokens to the ranks of their moe_experts and back."""

    LOCAL = "local"  # one rank holds all moe_experts
    FLAT = "flat"  # one all-to-all over all ranks of a replica
    HIERARCHICAL = "hierarchical"  # inside each node, then between nodes (Fig. 8)
    COORDINATED = "coordinated"  # among ranks of one tensor index, whose tokens are alike (Fig. 9)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one rank to others, and their bytes, inside its node and beyond it."""

    inside_messages: int = 0
    inside_bytes: float = 0.0
    between_messages: int = 0
    between_bytes: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(
            self.inside_messages + other.inside_messages,
            self.inside_bytes + other.inside_bytes,
            self.between_messages + other.between_messages,
            self.between_bytes + other.between_bytes,
        )

    @property
    def messages(self) -> int:
        return self.inside_messages + self.between_messages


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Time of a message: ``message_s + byte_s * bytes``."""

    message_s: float
    byte_s: float


@dataclass(frozen=True, slots=True)
class MeshCosts:
    """``call_s``: time of an all-to-all itself, whatever it sends; the hierarchical form has two."""

    inside: LinkCosts
    between: LinkCosts
    call_s: float = 0.0

    def seconds(self, traffic: Traffic) -> float:
        inside = self.inside.message_s * traffic.inside_messages + self.inside.byte_s * traffic.inside_bytes
        between = self.between.message_s * traffic.between_messages + self.between.byte_s * traffic.between_bytes
        return inside + between


def all_to_all(shape: MeshShape, form: ExchangeForm, pair_bytes: float) -> Traffic:
    """Traffic of a rank that sends its group's pairs of token and moe_expert, spread evenly, in one direction.

    ``pair_bytes``: bytes of the pairs of one tensor group, which its ranks share among them.
    """
    ranks, node, tensor = shape.replica_ranks, shape.ranks_a_node, shape.tensor
    own_bytes = pair_bytes / tensor
    if form is ExchangeForm.LOCAL or ranks == 1:
        return Traffic()
    if form is ExchangeForm.FLAT:
        a_message = own_bytes / ranks
        return Traffic(node - 1, (node - 1) * a_message, ranks - node, (ranks - node) * a_message)
    if form is ExchangeForm.HIERARCHICAL:
        nodes = shape.nodes
        return Traffic(node - 1, own_bytes * (node - 1) / node, nodes - 1, own_bytes * (nodes - 1) / nodes)
    a_message = own_bytes / shape.expert
    near = node // tensor - 1
    far = shape.expert - 1 - near
    return Traffic(near, near * a_message, far, far * a_message)


def tensor_gather(shape: MeshShape, token_bytes: float) -> Traffic:
    """Traffic of a rank that sends its part of the tokens' sum to the other ranks of its tensor group."""
    return Traffic(shape.tensor - 1, (shape.tensor - 1) * token_bytes)


def exchange_seconds(shape: MeshShape, form: ExchangeForm, costs: MeshCosts, pair_bytes: float) -> float:
    """Predicted time of both directions. Every form is followed by the same gather, which is left out."""
    calls = {ExchangeForm.LOCAL: 0, ExchangeForm.HIERARCHICAL: 2}.get(form, 1)
    return 2 * (costs.seconds(all_to_all(shape, form, pair_bytes)) + calls * costs.call_s)


def cheapest(shape: MeshShape, costs: MeshCosts, pair_bytes: float) -> ExchangeForm:
    if shape.replica_ranks == 1:
        return ExchangeForm.LOCAL
    forms = [ExchangeForm.FLAT]
    if shape.nodes > 1:
        forms.append(ExchangeForm.HIERARCHICAL)
    if shape.tensor > 1:
        forms.append(ExchangeForm.COORDINATED)
    return min(forms, key=lambda form: exchange_seconds(shape, form, costs, pair_bytes))
