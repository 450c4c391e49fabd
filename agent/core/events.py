"""What the shell tells the Engine: past facts. Each StartLoad and StartBatch is answered by exactly one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.request import IMAGE

if TYPE_CHECKING:
    from agent.core.performance import PerformanceMatrix
    from agent.core.request import Rejected, Work
    from experts.expert import Prediction
    from experts.graph import ExpertGraph


@dataclass(frozen=True, slots=True)
class Started:
    """The shell is ready: experts may be placed."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request, for a component's route or for one expert directly; exactly one of the two is set.

    ``work`` is what it has for those of its experts that count in tokens.
    """

    request: int
    component: str | None = None
    expert: str | None = None
    work: Work = IMAGE


@dataclass(frozen=True, slots=True)
class Offered:
    """A request for an expert in the shadow of another, which nobody waits for: background work.

    It ends in one Complete or Fail as others do, once there was time for it or it was dropped.
    """

    request: int
    expert: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load is complete: the copy can run, or be copied on."""

    load: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load came to nothing. ``permanent``: the weights are bad, trying again is pointless.

    ``out_of_memory``: the box had less than the ledger counts on.
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
    """A batch's quantum is over. ``unfinished``: who goes on in a later one, with the work that each has left.

    Together the two name each request of the batch once. Whose work tells of a larger lease than it has goes on with
    that one, or is preempted.
    """

    batch: int
    finished: tuple[tuple[int, Prediction | Rejected], ...]
    unfinished: tuple[tuple[int, Work], ...]


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A batch did not run. ``out_of_memory``: a smaller one may."""

    batch: int
    reason: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Whoever asked does not want the answer any more."""

    request: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request that has begun and waits between two quanta lost what it held: it begins anew when its turn comes.

    ``work``: what it has to do then, and the lease that it needs for that; None: what it held is to be read again.
    """

    request: int
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The shell found out by itself that an expert cannot be served."""

    expert: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody would like an expert to be in memory, where there is room that nobody needs sooner."""

    expert: str


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Somebody would like an expert to be out of memory; whoever asks for it brings it back."""

    expert: str


@dataclass(frozen=True, slots=True)
class LineChanged:
    """Other experts and routes from now on, on the same executors and memories.

    ``graph`` still names the experts that ``retired`` names, and ``matrix`` those of them that something accepted under
    an earlier line may need: it is finished by them, and then they are not asked any more. Whoever sends this has found
    that each expert fits.
    """

    graph: ExpertGraph
    matrix: PerformanceMatrix
    pinned: frozenset[str]
    retired: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, nothing else."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; finish what was taken."""


Event = (
    Started
    | Arrived
    | Offered
    | Loaded
    | LoadFailed
    | Finished
    | Progressed
    | BatchFailed
    | Cancelled
    | Preempted
    | Quarantined
    | Wanted
    | Unwanted
    | LineChanged
    | Tick
    | Drain
)
