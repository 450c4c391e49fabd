"""Events, from the shell to the Engine: past facts. Exactly one event answers each StartLoad and StartBatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.request import IMAGE, Precedence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.performance import ExecutorSpec, PerformanceMatrix, PoolSpec
    from agent.core.request import Work
    from experts.expert import Prediction, Rejected
    from experts.graph import ExpertGraph


@dataclass(frozen=True, slots=True)
class Started:
    """The shell is ready: experts may be placed."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request, for a component's route or for one expert directly; exactly one of the two is set.

    ``work``: its tokens, for those of its experts that count in tokens.
    """

    request: int
    component: str | None = None
    expert: str | None = None
    work: Work = IMAGE
    precedence: Precedence = Precedence.LINE


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load is complete: the copy can run, or be copied to another memory."""

    load: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load failed. ``permanent``: the weights are bad. ``out_of_memory``: the box had less than the ledger counts.

    ``is_away``: its file is missing or unreadable, which may be transient.
    """

    load: int
    reason: str
    permanent: bool
    out_of_memory: bool = False
    is_away: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch ran. ``results`` are in the order of its requests."""

    batch: int
    results: tuple[Prediction | Rejected, ...]


@dataclass(frozen=True, slots=True)
class Progressed:
    """A batch's quantum is over. ``unfinished``: requests that continue in a later quantum, with the work left.

    Each request is named once. A request whose work needs a larger lease gets that lease, or is preempted.
    """

    batch: int
    finished: tuple[tuple[int, Prediction | Rejected], ...]
    unfinished: tuple[tuple[int, Work], ...]


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A batch did not run. ``out_of_memory``: a smaller one may run. ``is_damaged``: a copy has to be loaded again."""

    batch: int
    reason: str
    out_of_memory: bool = False
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller no longer wants the answer."""

    request: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request between two quanta lost its memory, and restarts. ``work``: the work left; None: all, read again."""

    request: int
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The shell found that an expert cannot be served."""

    expert: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Load an expert, once there is room that no queue needs sooner."""

    expert: str


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Evict an expert; its next request loads it again."""

    expert: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """The shell uses bytes of a memory's budget for weights, as many of them as unused copies leave; 0: no longer."""

    pool: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LineChanged:
    """Experts and routes have changed, on the same executors and memories; the sender has proved that all fit.

    ``graph`` includes the ``retired`` experts; ``matrix`` has rows for all experts of accepted requests.
    ``placement``: as in ``Limits``.
    """

    graph: ExpertGraph
    matrix: PerformanceMatrix
    pinned: frozenset[str]
    retired: frozenset[str]
    placement: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecutorsLost:
    """Executors ended without answers; their memories go with the last executor that runs or loads from them.

    They use no remaining memory. ``may_return``: the shell tries to bring them back.
    """

    executors: frozenset[int]
    reason: str
    may_return: bool = True


@dataclass(frozen=True, slots=True)
class ExecutorsJoined:
    """Executors are ready, new ones or lost ones; ``pools``: their memories that the Engine has not got."""

    executors: tuple[ExecutorSpec, ...]
    pools: tuple[PoolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: check deadlines."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new request; finish the accepted ones."""


Event = (
    Started | Arrived | Loaded | LoadFailed | Finished | Progressed | BatchFailed | Cancelled | Preempted
    | Quarantined | Wanted | Unwanted | Reserved | LineChanged | ExecutorsLost | ExecutorsJoined | Tick | Drain
)  # fmt: skip
