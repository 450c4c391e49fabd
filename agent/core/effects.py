"""Effects, from the Engine to the shell: imperatives, in the order to carry them out, and decisions for the record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from agent.core.eviction import EvictionCandidate
    from agent.core.request import Batch, Outcome


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Bring a copy into ``pool`` from ``source``, the SSD or the caching pool. Answer Loaded or LoadFailed.

    ``size_bytes``: reserved in the ledger; shared tensors that are there already are neither counted nor moved.
    """

    load: int
    expert: str
    copy: str
    source: str
    pool: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Run a batch, at once or behind the running one. Answer Finished, Progressed (a quantum), or BatchFailed."""

    batch: Batch


class Prepare(NamedTuple):
    """Prepare a request's image for an expert, earliest ``due_s`` first; nothing is answered.

    Earlier forms of the image are reused; forms not named any more are released. ``later``: experts that may follow,
    for which up to ``later_bytes`` are kept. ``executor``: runs the batch. A tuple: one per image and step.
    """

    request: int
    expert: str
    later: tuple[str, ...]
    later_bytes: int
    due_s: float
    executor: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Release a request's prepared image, but for the form that a running batch uses."""

    request: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Release the memory of a begun request. Its text stays, and is read again after the prompt."""

    request: int
    executor: int


@dataclass(frozen=True, slots=True)
class EvictionDecision:
    """Why a copy left. ``for_copy``: the newcomer, "" where memory ran short; ``candidates`` in ranked order."""

    for_copy: str
    needed_bytes: int
    candidates: tuple[EvictionCandidate, ...]


@dataclass(frozen=True, slots=True)
class Evict:
    """A copy leaves a pool; its memory is free at once. ``stage``: 1 or 2 as in section 4.3, 3 = it has a queued use,
    0 = not by rank (LRU, FIFO, quarantine, probation, a spare copy)."""

    expert: str
    copy: str
    pool: str
    freed_bytes: int
    stage: int
    decision: EvictionDecision


class AssignmentCandidate(NamedTuple):
    """One executor as the assignment saw it. A tuple: one per executor and request."""

    executor: int
    queue_s: float
    addition_s: float


@dataclass(frozen=True, slots=True)
class Assigned:
    """The executor of a request, and why. Nothing to carry out."""

    request: int
    expert: str
    executor: int
    joined: bool
    candidates: tuple[AssignmentCandidate, ...]


class Standing(StrEnum):
    """Whether requests may use an expert."""

    SERVING = "serving"
    PROBATION = "probation"  # not now: its requests end UNKNOWN, and a trial follows
    QUARANTINE = "quarantine"  # never again


@dataclass(frozen=True, slots=True)
class StandingChanged:
    """An expert failed, or serves again. ``retry_s``: seconds until a trial on probation. Nothing to carry out."""

    expert: str
    standing: Standing
    reason: str
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class FellBack:
    """An expert failed too often in a memory: its requests there wait on other executors.

    ``retry_s``: seconds until a retry there. Nothing to carry out.
    """

    expert: str
    copy: str
    pool: str
    requests: int
    reason: str
    retry_s: float


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """A new budget for the weights in a memory: lower, as the box has less than was planned, or higher again."""

    pool: str
    before_bytes: int
    after_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeasesChanged:
    """A new budget for leases in a memory, for the same reasons as ``BudgetChanged``."""

    pool: str
    before_bytes: int
    after_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Complete:
    """A request has its outcome: OK, NG, or UNKNOWN with a reason."""

    request: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fail:
    """A request's verdict is UNKNOWN; ``outcome`` has the reason and the steps that did run."""

    request: int
    outcome: Outcome


Effect = (
    StartLoad | StartBatch | Prepare | Forget | Preempt | Evict | Assigned | StandingChanged | FellBack
    | BudgetChanged | LeasesChanged | Complete | Fail
)  # fmt: skip
