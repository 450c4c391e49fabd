"""Shape of a mesh of ranks, and which pieces of a layer's moe_experts each rank holds.

A rank has three places: in the data, expert and tensor dimension; the tensor dimension varies fastest, so that tensor
ranks are neighbours in one node (DeepSpeed-MoE, arXiv 2201.05596, section 5.2 and Fig. 7). Ranks of one tensor group
have the same tokens; all other groups have tokens of their own. Guarantees: every part of every moe_expert is held once
in each replica, also where moe_experts and ranks do not divide each other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from experts.expert import Parallelism

if TYPE_CHECKING:
    from experts.expert import Expert


@dataclass(frozen=True, slots=True)
class MeshShape(Parallelism):
    """Ranks and their nodes. ``node_ranks``: ranks of one node, neighbours; 0: all ranks are in one node."""

    node_ranks: int = 0

    def __post_init__(self) -> None:
        if min(self.data, self.expert, self.tensor) < 1:
            raise ValueError(f"a mesh has at least one rank in each dimension: {self}")
        if self.node_ranks and (self.replica_ranks % self.node_ranks or self.node_ranks % self.tensor):
            raise ValueError(
                f"{self.replica_ranks} ranks do not fill nodes of {self.node_ranks} with whole tensor groups"
            )

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold one whole model."""
        return self.expert * self.tensor

    @property
    def groups(self) -> int:
        """Tensor groups: so many parts of a batch run beside each other."""
        return self.data * self.expert

    @property
    def ranks_a_node(self) -> int:
        return self.node_ranks or self.replica_ranks

    @property
    def nodes(self) -> int:
        """Nodes of one replica."""
        return self.replica_ranks // self.ranks_a_node

    def on_boxes(self, box_ranks: int) -> MeshShape:
        """The shape on boxes of so many ranks, the nodes. Raises ValueError if they do not fill them."""
        if self.ranks % box_ranks:
            raise ValueError(f"{self.ranks} ranks do not fill boxes of {box_ranks}")
        return replace(self, node_ranks=box_ranks if box_ranks < self.replica_ranks else 0)


def shape_of(expert: Expert) -> MeshShape:
    """The shape of an expert with ranks, in one node."""
    assert expert.parallel is not None, "an expert with ranks"
    return MeshShape(**asdict(expert.parallel))


@dataclass(frozen=True, slots=True)
class Meeting:
    """Meeting point of ranks on several boxes. ``ranks_here``: ranks of this box, the first node."""

    address: str
    port: int
    ranks_here: int


@dataclass(frozen=True, slots=True)
class MoePiece:
    """Part of a moe_expert: columns ``begin`` to ``end`` of its width, held by a rank of each replica."""

    moe_expert: int
    rank: int  # in its replica
    begin: int
    end: int


def pieces_of(shape: MeshShape, moe_experts: int, width: int) -> tuple[MoePiece, ...]:
    """Pieces of a layer's moe_experts, by moe_expert: blocks of neighbours, as even as their number allows.

    Where ranks outnumber moe_experts, each is cut over several (expert-slicing, section 5.2). The degree is the layer's
    own: layers of a pyramid have different numbers of moe_experts.
    """
    units = shape.expert if shape.slices_experts else shape.replica_ranks
    ranks_a_unit = shape.replica_ranks // units
    pieces = []
    for moe_expert in range(moe_experts):
        first = moe_expert * units // moe_experts
        last = max((moe_expert + 1) * units // moe_experts, first + 1)
        holders = range(first * ranks_a_unit, last * ranks_a_unit)
        bounds = [width * n // len(holders) for n in range(len(holders) + 1)]
        held = zip(holders, pairwise(bounds), strict=True)
        pieces += [MoePiece(moe_expert, rank, begin, end) for rank, (begin, end) in held if end > begin]
    return tuple(pieces)
