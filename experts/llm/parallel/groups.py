"""Groups of ranks and their collective operations, with a record of what each rank sends.

``Mesh`` is torch's DeviceMesh (data, expert, tensor) with one ``RankGroup`` for each dimension that the exchanges use.
Guarantees: a sum has the same bits on each of its ranks, so ranks of one tensor group stay alike. Every operation is
recorded. All ranks of a group must call the same operations in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from experts.llm.parallel.costs import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.llm.parallel.shape import MeshShape


@dataclass(slots=True)
class TrafficRecord:
    """Traffic of one rank since the start, by purpose."""

    by_purpose: dict[str, Traffic] = field(default_factory=dict)

    def add(self, purpose: str, traffic: Traffic) -> None:
        self.by_purpose[purpose] = self.by_purpose.get(purpose, Traffic()).plus(traffic)


class RankGroup:
    """Some ranks of a mesh. ``node``: number of each member's node; ``place``: this rank's among them."""

    def __init__(self, group: dist.ProcessGroup, node: Sequence[int], record: TrafficRecord) -> None:
        self._group = group
        self._node = node
        self._record = record

    @property
    def size(self) -> int:
        return int(self._group.size())

    @property
    def place(self) -> int:
        return int(self._group.rank())

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], purpose: str) -> Tensor:
        """Send ``sent[n]`` of the rows to rank n, in order; returns the received ones, by rank. Differentiable."""
        moved: Tensor = _AllToAll.apply(rows, self, sent, received, purpose)
        return moved

    def gather(self, tensor: Tensor, purpose: str) -> Tensor:
        """All ranks' tensors, which have one shape, stacked."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=self._group)
        self._sends([tensor.nbytes] * self.size, purpose)
        return gathered

    def move(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], purpose: str) -> Tensor:
        moved = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(moved, rows.contiguous(), list(received), list(sent), group=self._group)
        row_bytes = rows[:1].nbytes if len(rows) else 0
        self._sends([count * row_bytes for count in sent], purpose)
        return moved

    def _sends(self, bytes_to: Sequence[int], purpose: str) -> None:
        own = self._node[self.place]
        near = [n for n in range(self.size) if self._node[n] == own and n != self.place]
        far = [n for n in range(self.size) if self._node[n] != own]
        inside, between = sum(bytes_to[n] for n in near), sum(bytes_to[n] for n in far)
        self._record.add(purpose, Traffic(len(near), inside, len(far), between))


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    """All-to-all whose gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch gives it no type
        rows: Tensor,
        group: RankGroup,
        sent: Sequence[int],
        received: Sequence[int],
        purpose: str,
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received, ctx.purpose = group, sent, received, purpose
        return group.move(rows, sent, received, purpose)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return ctx.group.move(gradients[0], ctx.received, ctx.sent, ctx.purpose), None, None, None, None


def total(group: RankGroup, tensor: Tensor, purpose: str) -> Tensor:
    """The sum over a group's ranks, in fp32 and in the order of the ranks."""
    if group.size == 1 or not tensor.numel():
        return tensor
    return group.gather(tensor, purpose).float().sum(dim=0).to(tensor.dtype)


class Mesh:
    """Groups of this rank. Call on every rank at once, after torch.distributed has been initialised."""

    def __init__(self, shape: MeshShape) -> None:
        if dist.get_world_size() != shape.ranks:
            raise ValueError(f"{dist.get_world_size()} ranks were started, and {shape} has {shape.ranks}")
        self.shape = shape
        self.record = TrafficRecord()
        rank = dist.get_rank()
        self.group_number, self.tensor_index = divmod(rank, shape.tensor)
        self.replica_rank = rank % shape.replica_ranks
        degrees = (shape.data, shape.expert, shape.tensor)
        places = init_device_mesh("cpu", degrees, mesh_dim_names=("data", "expert", "tensor"))
        nodes = (shape.data, shape.nodes, shape.ranks_a_node)
        hosts = init_device_mesh("cpu", nodes, mesh_dim_names=("replica", "between", "inside"))
        self.data, self.expert, self.tensor = (self._group(places[name]) for name in ("data", "expert", "tensor"))
        self.between, self.inside = self._group(hosts["between"]), self._group(hosts["inside"])
        self.replica = self._group(places["expert", "tensor"]._flatten())

    def _group(self, mesh: dist.DeviceMesh) -> RankGroup:
        group = mesh.get_group()
        nodes = [rank // self.shape.ranks_a_node for rank in dist.get_process_group_ranks(group)]
        return RankGroup(group, nodes, self.record)
