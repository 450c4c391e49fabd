"""Records of the box for the core, frozen: performance matrix, footprints, usage probabilities, memories.

A *copy* is an expert in one precision, known by its name. Two processors of one precision share copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.request import Work

SSD, HOST, DEVICE = "ssd", "host", "device"  # sources of weights: the drive; memories have names


def tier_of(memory: str) -> str:
    """Tier of a memory: "host" for the host memory of each worker, as "w1/host"."""
    return memory.rpartition("/")[2]


def worker_of(memory: str) -> str:
    """Worker that owns a memory: "w1" for "w1/host", "" for the agent itself."""
    return memory.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Weights that several experts share: a memory holds them once, while any of the experts is in it."""

    id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    own_bytes: int
    shared: tuple[SharedTensors, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + sum(shared.size_bytes for shared in self.shared)


@dataclass(frozen=True, slots=True)
class Performance:
    """One architecture on one processor. A batch of n takes ``K_s * n + B_s``. Source: CoServe, section 4.2.

    Tokens add to that. From its first batch on, each request leases ``lease_bytes`` per token,
    reserved at the start (Orca, section 4.2), for the worst case or for the expected one.
    An expert without leases runs its batches to their end; an expert with leases runs in quanta.
    """

    K_s: float
    B_s: float
    max_batch: int
    workspace_bytes: int  # of each image in a batch
    workspace_base_bytes: int = 0
    K_prompt_s: float = 0.0  # per token that is read
    K_output_s: float = 0.0  # per token that is written
    lease_bytes: int = 0  # per token that is held

    @property
    def runs_in_quanta(self) -> bool:
        return self.lease_bytes > 0

    def latency_s(self, batch_size: int) -> float:
        """Predicted seconds of one batch; valid for 1 <= batch_size <= max_batch."""
        return self.K_s * batch_size + self.B_s

    def tokens_s(self, work: Work) -> float:
        return self.K_prompt_s * work.prompt + self.K_output_s * work.output

    def lease_for(self, work: Work) -> int:
        return self.lease_bytes * work.leased

    def most_for(self, work: Work) -> int:
        """Bytes that a request may need until it ends: the worst case."""
        return self.lease_bytes * work.most

    def workspace_for(self, batch_size: int) -> int:
        """Bytes that a running batch needs beside the weights."""
        return self.workspace_base_bytes + self.workspace_bytes * batch_size


@dataclass(frozen=True, slots=True)
class PreparedForm:
    """Pixels of an image as an expert takes them. ``name``: key of preprocessing; experts of one name share them."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertProfile:
    """One expert on one kind of processor.

    ``prepared``: form of its images, equal on all processors; None: unknown, or texts. ``family``: experts of one
    family that run in quanta may run in one batch; None: alone.
    """

    copy: str
    performance: Performance
    footprint: Footprint
    load_s: Mapping[str, float]  # by tier of the source, into this processor's memory
    family: str | None = None
    prepared: PreparedForm | None = None


@dataclass(frozen=True, slots=True)
class PerformanceMatrix:
    """The performance matrix of a box. ``experts[processor][expert]``; an expert absent there cannot run there."""

    experts: Mapping[str, Mapping[str, ExpertProfile]]
    usage: Mapping[str, float] = field(default_factory=dict)

    def changed(self, change: Callable[[str, str, ExpertProfile], ExpertProfile]) -> PerformanceMatrix:
        """The matrix with ``change(processor, expert, row)`` in place of each row."""
        experts = {
            processor: {expert: change(processor, expert, row) for expert, row in column.items()}
            for processor, column in self.experts.items()
        }
        return PerformanceMatrix(experts, self.usage)

    def runs_texts(self, executor: ExecutorSpec) -> bool:
        return any(row.performance.runs_in_quanta for row in self.experts[executor.processor].values())


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """One executor. ``processor``: its column of the matrix; ``pool``: its memory. ``graphs_bytes``: of CUDA graphs."""

    id: int
    processor: str
    pool: str
    graphs_bytes: int = 0

    @property
    def worker(self) -> str:
        return worker_of(self.pool)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One memory. Weights, workspaces of running batches and leases of begun requests have separate shares of it.

    ``cache``: the memory in front of it, which loads faster than the SSD (split memory). ``is_one_piece``: allocated
    whole at the start, so an eviction frees no memory outside of it. ``drive``: its SSD, maybe of others, too.
    """

    name: str
    expert_bytes: int
    workspace_bytes: int
    cache: str | None = None
    is_one_piece: bool = False
    lease_bytes: int = 0
    drive: str = SSD

    @property
    def worker(self) -> str:
        return worker_of(self.name)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the core. ``loads_in_flight`` counts per source (an SSD, the copies in a memory).

    ``prepared_bytes``: in each worker. ``placement``: memories that a plan gives an expert; its requests go there while
    such a memory has executors. ``transfer_s``: predicted seconds to send an image to a worker that has not got it.
    """

    pools: tuple[PoolSpec, ...]
    max_overtake_s: float = 5.0
    loads_in_flight: int = 2
    quantum_s: float = 0.05  # of begun texts, while any other request waits
    lone_quantum_s: float | None = None  # of begun texts on a line without images; None: equal to quantum_s
    prepared_bytes: int = 0  # of images prepared ahead of their batches; 0: prepared when the batch starts
    pinned: frozenset[str] = frozenset()
    placement: Mapping[str, frozenset[str]] = field(default_factory=dict)
    transfer_s: float = 0.0
    absence_s: float = 300.0  # requests wait so long for lost executors that nothing replaces


def pinned_homes(
    pinned: frozenset[str], executors: Sequence[ExecutorSpec], profiles: Mapping[str, Mapping[str, ExpertProfile]]
) -> dict[str, ExecutorSpec]:
    """Home of each pinned expert: the first executor that can run it."""
    homes = {}
    for expert in sorted(pinned):
        home = next((spec for spec in executors if expert in profiles[spec.processor]), None)
        if home is not None:
            homes[expert] = home
    return homes


def footprints_in(
    pool: str,
    executors: Sequence[ExecutorSpec],
    profiles: Mapping[str, Mapping[str, ExpertProfile]],
    homes: Mapping[str, ExecutorSpec],
) -> list[tuple[str, Footprint, bool]]:
    """(expert, footprint, pinned) of every copy that may run in a memory."""
    processors = sorted({spec.processor for spec in executors if spec.pool == pool})
    copies = {
        profile.copy: (expert, profile.footprint, expert in homes and homes[expert].pool == pool)
        for processor in processors
        for expert, profile in sorted(profiles[processor].items())
    }
    return list(copies.values())
