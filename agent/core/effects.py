"""Effects, from the Engine to the shell: imperatives, in order of execution, and decisions for the record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from agent.core.policy import EvictionCandidate
    from agent.core.request import Batch, Outcome


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Bring a copy into ``pool`` from ``source``, the SSD or the caching pool. Answer Loaded or LoadFailed.

    ``size_bytes``: reserved in the ledger; resident shared tensors are neither counted nor moved.
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
    """Prepare a request's image for an expert, earliest ``due_s`` first. Needs no answer.

    Existing forms of the image are reused; forms no longer named are released. ``later``: experts that may follow,
    for which up to ``later_bytes`` are kept. ``executor``: runs the batch. A tuple for speed: one per image and step.
    """

    request: int
    expert: str
    later: tuple[str, ...]
    later_bytes: int
    due_s: float
    executor: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Release a request's image that ``worker`` prepared, except the form that a running batch uses."""

    request: int
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Release the memory of a begun request. The text written so far is kept, and read again after the prompt."""

    request: int
    executor: int


@dataclass(frozen=True, slots=True)
class EvictionDecision:
    """Reason of an eviction. ``for_copy``: the newcomer, "" where memory ran short; ``candidates`` in ranked order.

    ``claim``: name of the newcomer's row in the table of ``demand``, or of the reason to evict without a newcomer.
    """

    for_copy: str
    needed_bytes: int
    candidates: tuple[EvictionCandidate, ...]
    claim: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict a copy from a pool; its memory is free at once.

    ``stage``: 1 or 2 as in section 4.3, 3 = queued use, 0 = not by rank (LRU, FIFO, quarantine, probation, spare).
    """

    expert: str
    copy: str
    pool: str
    freed_bytes: int
    stage: int
    decision: EvictionDecision


class AssignmentCandidate(NamedTuple):
    """Executor considered for a request. A tuple for speed: one per executor and request."""

    executor: int
    queue_s: float
    addition_s: float


@dataclass(frozen=True, slots=True)
class Assigned:
    """Executor chosen for a request, with the candidates. Only recorded."""

    request: int
    expert: str
    executor: int
    joined: bool
    candidates: tuple[AssignmentCandidate, ...]


class Standing(StrEnum):
    """Permission of requests to use an expert."""

    SERVING = "serving"
    PROBATION = "probation"  # its requests end UNKNOWN until a trial succeeds
    QUARANTINE = "quarantine"  # final


@dataclass(frozen=True, slots=True)
class StandingChanged:
    """An expert failed, or serves again. ``retry_s``: seconds until a trial on probation. Only recorded."""

    expert: str
    standing: Standing
    reason: str
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class FellBack:
    """An expert failed too often in a memory: its requests there moved to other executors.

    ``retry_s``: seconds until a retry there. Only recorded.
    """

    expert: str
    copy: str
    pool: str
    requests: int
    reason: str
    retry_s: float


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """New budget for the weights in a memory: lower after a shortage of memory or for the shell, or raised again."""

    pool: str
    before_bytes: int
    after_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeasesChanged:
    """New budget for leases in a memory, for the same reasons as ``BudgetChanged``."""

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
