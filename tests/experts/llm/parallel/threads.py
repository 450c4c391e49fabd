"""Many ranks as threads of one process: a RankGroup without a network, for exchanges of up to 256 ranks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from experts.llm.parallel.costs import Traffic
from experts.llm.parallel.groups import TrafficRecord
from experts.llm.parallel.shape import MeshShape

WAIT_S = 60.0


class Network:
    def __init__(self, ranks):
        self.boxes = [[SimpleQueue() for _ in range(ranks)] for _ in range(ranks)]  # by destination, then source


@dataclass
class ThreadGroup:
    network: Network
    members: list  # ranks, in order
    rank: int
    ranks_a_node: int
    record: TrafficRecord

    @property
    def size(self):
        return len(self.members)

    @property
    def place(self):
        return self.members.index(self.rank)

    def all_to_all(self, rows, sent, received, purpose):
        for member, part in zip(self.members, rows.split(list(sent)), strict=True):
            self.network.boxes[member][self.rank].put(part)
            if member != self.rank:
                is_near = member // self.ranks_a_node == self.rank // self.ranks_a_node
                one = Traffic(1, part.nbytes) if is_near else Traffic(0, 0, 1, part.nbytes)
                self.record.add(purpose, one)
        parts = [self.network.boxes[self.rank][member].get(timeout=WAIT_S) for member in self.members]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)

    def gather(self, tensor, purpose):
        ones = [1] * self.size
        return self.all_to_all(tensor.unsqueeze(0).expand(self.size, *tensor.shape), ones, ones, purpose)


class ThreadMesh:
    def __init__(self, network, shape: MeshShape, rank):
        self.shape, self.rank, self.record = shape, rank, TrafficRecord()
        self.tensor_index = rank % shape.tensor
        ranks, node = range(shape.ranks), shape.ranks_a_node
        self.replica = self._group(network, ranks)
        self.expert = self._group(network, ranks[self.tensor_index :: shape.tensor])
        self.inside = self._group(network, ranks[rank - rank % node : rank - rank % node + node])
        self.between = self._group(network, ranks[rank % node :: node])

    def _group(self, network, members):
        return ThreadGroup(network, list(members), self.rank, self.shape.ranks_a_node, self.record)


def on_threads(shape, run):
    """What ``run(mesh)`` returns for each rank of one replica."""
    network = Network(shape.ranks)
    with ThreadPoolExecutor(shape.ranks) as threads:
        running = [threads.submit(run, ThreadMesh(network, shape, rank)) for rank in range(shape.ranks)]
        return [one.result(timeout=WAIT_S) for one in running]
