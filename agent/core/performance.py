"""What the core knows of the box: the performance matrix, footprints, usage probabilities, memories. Frozen records.

A *copy* is an expert in one precision; its name is what pools hold. Two processors of one precision share copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.request import Work

SSD, HOST, DEVICE = "ssd", "host", "device"  # where weights lie: on the drive, and the names of the memories


@dataclass(frozen=True, slots=True)
class SharedPart:
    """Weights that several experts share: held once in a memory while any of them is there."""

    id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    own_bytes: int
    shared: tuple[SharedPart, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + sum(part.size_bytes for part in self.shared)


@dataclass(frozen=True, slots=True)
class Performance:
    """One architecture on one processor. A batch of n takes ``K_s * n + B_s``. Source: CoServe, section 4.2.

    What its requests have in tokens comes on top of that, per token; and what each of them may come to hold from its
    first batch on is a lease of so many bytes per token, reserved at the start (Orca, section 4.2), for the worst case
    or for what is expected.
    An expert without leases runs its batches to their end; one with leases runs in quanta.
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

    def work_s(self, work: Work) -> float:
        return self.K_s + self.tokens_s(work)

    def lease_for(self, work: Work) -> int:
        return self.lease_bytes * work.leased

    def most_for(self, work: Work) -> int:
        """Bytes that it may come to hold until it ends: the worst case."""
        return self.lease_bytes * work.most

    def workspace_for(self, batch_size: int) -> int:
        """Bytes one running batch needs beside the weights."""
        return self.workspace_base_bytes + self.workspace_bytes * batch_size


@dataclass(frozen=True, slots=True)
class PreparedForm:
    """What an image becomes for an expert. ``name`` says all that pixels depend on; experts with one name share it."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertProfile:
    """One expert on one kind of processor.

    ``prepared``: what its images become first, alike on every processor; None: nothing that is known of, as of texts.
    ``family``: those that run in quanta may run in one batch with others whose name for it is the same; None: alone.
    """

    copy: str
    performance: Performance
    footprint: Footprint
    load_s: Mapping[str, float]  # from SSD or from a pool's name, into this processor's memory
    family: str | None = None
    prepared: PreparedForm | None = None


@dataclass(frozen=True, slots=True)
class PerformanceMatrix:
    """The performance matrix of a box. ``experts[processor][expert]``; an expert absent there cannot run there."""

    experts: Mapping[str, Mapping[str, ExpertProfile]]
    usage: Mapping[str, float] = field(default_factory=dict)

    def runs_texts(self, executor: ExecutorSpec) -> bool:
        return any(row.performance.runs_in_quanta for row in self.experts[executor.processor].values())


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """One executor: a queue and whoever runs it. ``processor`` names its column of the matrix, ``pool`` its memory."""

    id: int
    processor: str
    pool: str


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One memory. Weights, the workspace of running batches and what begun requests lease have their own shares of it.

    ``cache`` names the memory in front of it, whose copies are nearer than the SSD's (split memory).
    ``is_one_piece``: taken from the box as a whole at the start, so that what leaves it makes no room outside of it.
    """

    name: str
    expert_bytes: int
    workspace_bytes: int
    cache: str | None = None
    is_one_piece: bool = False
    lease_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the core must keep to. ``loads_in_flight`` counts per source (the SSD, the host's copies)."""

    pools: tuple[PoolSpec, ...]
    max_overtake_s: float = 5.0
    long_queue_s: float = 5.0  # a queue that takes longer is run in order, however late its requests may be
    loads_in_flight: int = 2
    prefetch_groups: int = 16
    load_attempts: int = 3  # that fail in a row: probation
    load_backoff_s: float = 0.25  # after a failed load; doubles with each further one, up to longest_pause_s
    away_s: float = 30.0  # a file that is not there or not readable is waited for; only then its failed loads count
    longest_away_pause_s: float = 4.0  # between two looks for it
    batch_attempts: int = 3
    quantum_s: float = 0.05  # that requests with leases run before others may; whoever waits for them waits for as long
    lone_quantum_s: float | None = None  # the same where no images may come; None: the same
    expert_failures: int = 3  # batches of one that fail in a row: probation
    probation_s: float = 1.0  # after failed batches; doubles with each failed trial, up to longest_pause_s
    longest_pause_s: float = 60.0
    budget_pause_s: float = 600.0  # without shortage, before a lowered budget gets some back; doubles each time
    longest_budget_pause_s: float = 86_400.0
    background_requests: int = 64  # that may wait; arbitrary: the oldest is dropped for one more
    prepared_bytes: int = 0  # of images prepared ahead of their batches; 0: each when its batch starts
    pinned: frozenset[str] = frozenset()
