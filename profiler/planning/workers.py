"""Plan of a line on several workers: how many it needs, which experts lie where, the cost of a lost one.

Each worker is like the profiled box, with executors, memories, SSD and cores of its own. The agent's Engine is
simulated, with its setup and placement for such workers; not simulated are images on the network and the agent's work.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.core.events import ExecutorsJoined, ExecutorsLost
from agent.core.performance import PerformanceMatrix
from agent.core.policy import PRESETS, Assigning
from agent.core.request import IMAGE
from agent.deployment.placement import with_workers
from experts.errors import ConfigError
from experts.sizes import size_text
from profiler.simulation.forecast import forecast, quantile_s
from profiler.tables import folded, folded_table, wait_text

if TYPE_CHECKING:
    from agent.core.engine import EngineSetup
    from agent.deployment.placement import ExpertPlacement
    from profiler.simulation.forecast import LineForecast, Scenario
    from profiler.simulation.simulator import Change

MOST_WORKERS = 64
ABSENCE = 0.25  # of the trace's time: from the loss of a worker, midway, to its return


@dataclass(frozen=True, slots=True)
class WorkersRow:
    """Forecast of so many workers. ``loads``: after the first placement, into memories that experts run from.

    ``unplaced``: experts without a place. ``p99_wait_s``: images' wait, where there are images. ``failed``: requests
    that no expert answered.
    """

    workers: int
    unplaced: int
    images_per_s: float
    switches: int
    loads: int
    p99_wait_s: float
    failed: int


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """``placement``: the last row's. ``loss``: that row once ``lost``, the busiest worker, ends midway and is back
    after ``absence_s``; None for one worker. ``sufficient``: number of workers from which on no row has a switch,
    ``complete``: with a place for each expert; None: more than were tried.
    """

    rows: tuple[WorkersRow, ...]
    placement: ExpertPlacement
    sufficient: int | None
    complete: int | None
    lost: str
    absence_s: float
    loss: WorkersRow | None

    @property
    def sentences(self) -> tuple[str, ...]:
        sentences = [_sufficient_sentence(self)]
        if self.placement.unplaced:
            names = self.placement.unplaced
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
            sentences.append(f"Experts without a place, which are loaded for their requests: {some}.")
        if self.loss is not None:
            ends = "no request is without its answer" if not self.loss.failed else f"{self.loss.failed} end UNKNOWN"
            sentences.append(
                f"{self.lost}, the busiest, lost midway and back after {wait_text(self.absence_s)}: "
                f"{self.loss.images_per_s:.2f} images/s instead of {self.rows[-1].images_per_s:.2f}, "
                f"{self.loss.switches} switches, p99 {wait_text(self.loss.p99_wait_s)}; {ends}."
            )
        return tuple(sentences)


def plan_workers(scenario: Scenario, setup: EngineSetup, most: int) -> WorkersPlan:
    """Forecasts of 1, 2, ... ``most`` workers with this setup each. Raises ConfigError as ``forecast`` does."""
    if PRESETS[setup.policy].assigning is Assigning.FIRST:
        raise ConfigError(f"--workers: policy {setup.policy} has one executor - plan with another policy")
    rows = []
    for count in range(1, most + 1):
        workers, placement = on_workers(setup, count)
        played = forecast(scenario, workers)
        rows.append(_row(scenario, workers, placement, played))
    further = range(most + 1, MOST_WORKERS + 1)
    counts = [row.workers for row in rows if not row.unplaced]
    if not counts:
        found = bisect_left(further, 1, key=lambda count: not on_workers(setup, count)[1].unplaced)
        counts = [*further[found:]]
    lost = max(placement.workers, key=lambda name: (placement.workers[name].load_s, name))
    absence_s, loss = ABSENCE * played.seconds, None
    if most > 1:
        changes = _absence(workers, lost, played.seconds / 2, absence_s)
        loss = _row(scenario, workers, placement, forecast(scenario, workers, changes))
    short = max((row.workers for row in rows if row.switches), default=0)
    sufficient = short + 1 if short < most else None
    return WorkersPlan(tuple(rows), placement, sufficient, min(counts, default=None), lost, absence_s, loss)


def on_workers(setup: EngineSetup, count: int) -> tuple[EngineSetup, ExpertPlacement]:
    """Setup of an agent that has no executors, and so many workers with this setup, each on a node of its own."""
    limits, matrix = replace(setup.limits, pools=()), PerformanceMatrix({}, setup.matrix.usage)
    agent = replace(setup, executors=(), matrix=matrix, limits=limits)
    return with_workers(agent, {f"w{number}": setup for number in range(1, count + 1)}, node=str)


def _absence(setup: EngineSetup, worker: str, at_s: float, absence_s: float) -> list[Change]:
    part = setup.at(worker)
    lost = ExecutorsLost(frozenset(spec.id for spec in part.executors), f"{worker} was lost")
    return [(at_s, lost), (at_s + absence_s, ExecutorsJoined(part.executors, part.pools))]


def _row(scenario: Scenario, setup: EngineSetup, placement: ExpertPlacement, played: LineForecast) -> WorkersRow:
    waits = zip(played.waits_s, scenario.trace, strict=True)
    images_s = [wait_s for wait_s, each in waits if each.work is IMAGE]
    return WorkersRow(
        workers=len(placement.workers),
        unplaced=len(placement.unplaced),
        images_per_s=played.images_per_s,
        switches=played.switches,
        loads=played.loads_to({spec.pool for spec in setup.executors}),
        p99_wait_s=quantile_s(images_s or played.waits_s, 0.99),
        failed=played.failed,
    )


def workers_json(plan: WorkersPlan) -> dict[str, Any]:
    placement = {name: asdict(share) for name, share in plan.placement.workers.items()}
    pools = {expert: sorted(names) for expert, names in plan.placement.pools.items()}
    placed = {"workers": placement, "pools": pools, "unplaced": list(plan.placement.unplaced)}
    return asdict(plan) | {"placement": placed, "sentences": list(plan.sentences)}


def workers_text(plan: WorkersPlan) -> str:
    counts = folded_table(
        dict.fromkeys(("workers", "images/s", "switches", "loads", "wait p99", "without a place"), "right"),
        (
            (str(row.workers), f"{row.images_per_s:.2f}", str(row.switches), str(row.loads), wait_text(row.p99_wait_s),
             str(row.unplaced))
            for row in plan.rows
        ),
    )  # fmt: skip
    total_s = sum(share.load_s for share in plan.placement.workers.values())
    several = {name for name, share in plan.placement.pools.items() if len(share) > 1}
    places = folded_table(
        {"worker": "left", **dict.fromkeys(("experts", "of them elsewhere, too", "memory", "load"), "right")},
        (
            (name, str(len(share.experts)), str(len(several & set(share.experts))), size_text(share.used_bytes),
             f"{share.load_s / total_s:.0%}" if total_s else "-")
            for name, share in plan.placement.workers.items()
        ),
    )  # fmt: skip
    return folded((counts, LEGEND, places, *plan.sentences))


def _sufficient_sentence(plan: WorkersPlan) -> str:
    fits = "" if plan.complete is None else f"; every expert has a place from {_workers(plan.complete)} on"
    if plan.sufficient is None:
        return f"With {_workers(len(plan.rows))} requests still wait for switches{fits}."
    return f"No request waits for a switch from {_workers(plan.sufficient)} on{fits}."


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


LEGEND = (
    "Each worker is like the profiled box: executors, memories, SSD and cores. loads: after the first placement, into "
    "memories that experts run from. Not in these rows: the images' way over the network, and a floor that no schedule "
    "beats. load: predicted share of all compute, by usage."
)
