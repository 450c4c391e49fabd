"""Figures of one run, a row for each policy, and the whole measurement as text.

A row holds medians, field by field, so its figures may come from several runs; a count is one that occurred.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from agent.commands.judged_images import outputs_sha256
from agent.core import events
from profiler.bench.measured import Column, Target, at_least, table_of
from profiler.replay.host_load import QUIET_FRACTION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from profiler.bench.naive import NaivePlayed
    from profiler.replay.player import Played

TARGET_ROOFLINE_FRACTION = 0.95
TARGET_PREDICTION_ERROR = 0.10
COLUMNS = (
    Column("policy", "policy"),
    Column("precision", "precision"),
    Column("images/s", "medians.images_per_s", ".2f"),
    Column("roofline", "medians.roofline_fraction", ".3f"),
    Column("predicted", "medians.predicted_images_per_s", ".2f"),
    Column("switches", "medians.switches", "d"),
    Column("loads", "medians.loads_in_all", "d"),
    Column("evicted", "medians.evictions", "d"),
    Column("read GB", "medians.bytes_read", ".2f", 1e-9),
    Column("p99 us", "medians.decision_p99_us", ".0f"),
    Column("RSS MB", "medians.peak_rss_bytes", ".0f", 1e-6),
    Column("outputs", "medians.outputs"),
)
PATHS = ("ssd_host", "host_device", "ssd_device")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Microseconds of a decision."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """Simulated seconds of the trace, and busy seconds of all executors."""

    seconds: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds of any schedule: to compute, and to read the bytes missing at the start."""

    compute_s: float
    io_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.io_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run of one policy, or the medians of several. None where a figure does not apply, or was not asked for.

    ``scheduling_s`` and ``expert_management_s``: CPU time of the deciding thread; ``decision_us``: wall-clock time.
    ``prediction_error``: measured seconds over predicted ones, less one. ``batch_slowness``: busy time of the executors
    over the profile's, the part of that error that is due to K and B. The roofline's time is the larger floor.
    """

    seconds: float
    images_per_s: float
    switches: int
    loads: Mapping[str, int]
    evictions: int
    bytes_read: int
    roofline_images_per_s: float | None
    roofline_fraction: float | None
    compute_floor_s: float | None
    io_floor_s: float | None
    decision_us: Percentiles | None = None
    scheduling_s: float = 0.0
    expert_management_s: float = 0.0
    wait_p50_s: float
    wait_p99_s: float
    busy_s: float  # of all executors together
    peak_rss_bytes: int
    others_fraction: float  # of all cores, used by other processes meanwhile
    predicted_images_per_s: float | None = None
    prediction_error: float | None = None
    batch_slowness: float | None = None
    unknown: int
    outputs_sha256: str

    @property
    def loads_in_all(self) -> int:
        return sum(self.loads.values())

    @property
    def decision_p99_us(self) -> float | None:
        return None if self.decision_us is None else self.decision_us.p99

    @property
    def outputs(self) -> str:
        return self.outputs_sha256[:8]


@dataclass(frozen=True, slots=True)
class PolicyRow:
    policy: str
    requests: int
    precision: str
    memory: Mapping[str, int]  # bytes of weights and of workspaces, by pool
    executors: Mapping[str, int]
    medians: Figures
    runs: tuple[Figures, ...]
    unknown_reasons: tuple[str, ...]

    @property
    def outputs_agree(self) -> bool:
        return len({run.outputs_sha256 for run in self.runs}) == 1

    @property
    def targets(self) -> list[Target]:
        """Targets: of the floor for our policy only, of the prediction for every policy with one."""
        figures, found = self.medians, []
        if self.policy == "coserve" and figures.roofline_fraction is not None:
            found.append(at_least("roofline fraction", figures.roofline_fraction, TARGET_ROOFLINE_FRACTION))
        if figures.prediction_error is not None:
            error, slowness = f"{figures.prediction_error:+.1%}", f"{figures.batch_slowness:.2f}"
            what = f"predicted {error} (batches took {slowness} of their profile),"
            is_near = abs(figures.prediction_error) <= TARGET_PREDICTION_ERROR
            found.append(Target(what, f"within {TARGET_PREDICTION_ERROR:.0%}", error, is_near))
        return found

    def as_json(self) -> dict[str, Any]:
        """JSON with the medians as top-level keys, and all runs below."""
        return {
            "policy": self.policy,
            "requests": self.requests,
            **asdict(self.medians),
            "precision": self.precision,
            "memory": dict(self.memory),
            "executors": dict(self.executors),
            "outputs_agree": self.outputs_agree,
            "unknown_reasons": list(self.unknown_reasons),
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Measurement:
    """A trace on a line. ``ssd_bytes_per_s``: rate of direct reads, or the limit of loads."""

    line: str
    machine: str
    rows: tuple[PolicyRow, ...]
    direct_io: bool
    ssd_bytes_per_s: float | None
    is_held: bool
    compute_s: float | None
    notes: tuple[str, ...]

    def row(self, policy: str) -> PolicyRow:
        return {row.policy: row for row in self.rows}[policy]

    def as_json(self) -> dict[str, Any]:
        return {"rows": [row.as_json() for row in self.rows]} | {
            one.name: getattr(self, one.name) for one in fields(self) if one.name != "rows"
        }


def quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)]


def engine_figures(played: Played, unknown: int, predicted: Predicted, floor: Floor | None) -> Figures:
    requests = len(played.outcomes)
    executed_s = sum(each.busy_s for each in played.after.executors) - sum(
        each.busy_s for each in played.before.executors
    )
    decision_us = [decision.seconds * 1e6 for decision in played.decisions]
    managing = [decision.cpu_s for decision in played.decisions if decision.is_expert_management]
    arriving = [
        decision.cpu_s
        for decision in played.decisions
        if decision.event is events.Arrived and not decision.is_expert_management
    ]
    return _figures(
        played, unknown, floor,
        switches=played.counted(lambda each: each.engine.switches),
        loads={path: played.loads().get(path, 0) for path in PATHS},
        evictions=played.counted(lambda each: each.engine.evictions),
        bytes_read=played.counted(lambda each: each.transfers.bytes_read),
        decision_us=Percentiles(quantile(decision_us, 0.5), quantile(decision_us, 0.99)) if decision_us else None,
        scheduling_s=sum(arriving),
        expert_management_s=sum(managing),
        busy_s=executed_s,
        predicted_images_per_s=requests / predicted.seconds,
        prediction_error=played.seconds / predicted.seconds - 1,
        batch_slowness=executed_s / predicted.busy_s if predicted.busy_s else None,
    )  # fmt: skip


def naive_figures(played: NaivePlayed, floor: Floor | None) -> Figures:
    """Figures of the general model server; a request waited for every load, and nothing was decided."""
    return _figures(
        played, played.labels.count(None), floor,
        switches=played.loads,
        loads=dict.fromkeys(PATHS, 0) | {"ssd_host": played.loads},
        evictions=played.evictions,
        bytes_read=played.bytes_read,
        busy_s=played.seconds,
    )  # fmt: skip


def _figures(
    played: Played | NaivePlayed,
    unknown: int,
    floor: Floor | None,
    **own: Any,  # noqa: ANN401  # of any of the fields
) -> Figures:
    images_per_s = (len(played.labels) - unknown) / played.seconds
    roofline_images_per_s = None if floor is None else len(played.labels) / floor.seconds
    return Figures(
        seconds=played.seconds,
        images_per_s=images_per_s,
        roofline_images_per_s=roofline_images_per_s,
        roofline_fraction=None if roofline_images_per_s is None else images_per_s / roofline_images_per_s,
        compute_floor_s=None if floor is None else floor.compute_s,
        io_floor_s=None if floor is None else floor.io_s,
        wait_p50_s=quantile(played.waits_s, 0.5),
        wait_p99_s=quantile(played.waits_s, 0.99),
        peak_rss_bytes=played.peak_rss_bytes,
        others_fraction=played.others_fraction,
        unknown=unknown,
        outputs_sha256=outputs_sha256(played.labels),
        **own,
    )


def medians(runs: Sequence[Figures]) -> Figures:
    """Medians, field by field; a count is one that was counted, never a mean of two; a digest is the first run's."""
    values = {one.name: [getattr(run, one.name) for run in runs] for one in fields(Figures)}
    return Figures(**{name: _median(column) for name, column in values.items()})


def report(measurement: Measurement) -> str:
    cache = "past the page cache" if measurement.direct_io else "THROUGH the page cache: this disk refuses direct reads"
    speed = f"{(measurement.ssd_bytes_per_s or 0) / 1e6:.0f} MB/s"
    lines = [
        f"machine    {measurement.machine}",
        f"line       {measurement.line}; packed files read {cache}, {speed}{', held' if measurement.is_held else ''}",
        table_of(COLUMNS, measurement.rows),
    ]
    lines += [f"note       {note}" for note in measurement.notes]
    for row in measurement.rows:
        lines += _remarks(row)
    return "\n".join(lines)


def _remarks(row: PolicyRow) -> list[str]:
    figures = row.medians
    remarks = [
        f"target     {row.policy}: {each.what} {each.wanted}: {'reached' if each.reached else 'SHORT of its target'}"
        for each in row.targets
    ]
    if figures.others_fraction > QUIET_FRACTION:
        others = f"other processes had {figures.others_fraction:.0%} of the cores"
        remarks.append(f"SHARED     {row.policy}: {others}: compare rows of one run only")
    if figures.unknown:
        reasons = "; ".join(row.unknown_reasons)
        remarks.append(f"UNKNOWN    {row.policy}: {figures.unknown} of {row.requests} were not judged: {reasons}")
    if not row.outputs_agree:
        remarks.append(f"OUTPUTS    {row.policy}: its runs did not judge every request alike")
    return remarks


def _median(column: Sequence[Any]) -> Any:  # noqa: ANN401  # a field of any type
    first = column[0]
    if first is None or isinstance(first, str):
        return first
    if isinstance(first, Percentiles):
        return Percentiles(
            statistics.median(each.p50 for each in column), statistics.median(each.p99 for each in column)
        )
    if isinstance(first, dict):
        return {key: statistics.median_low(each[key] for each in column) for key in first}
    return statistics.median_low(column) if isinstance(first, int) else statistics.median(column)
