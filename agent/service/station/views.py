"""Documents of `/api`, as frozen records: one source for their JSON and for the OpenAPI document.

Times have an offset; absent values are null. Only ``ages`` beside the state holds what changes by the mere time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from agent.doors.desk import ReloadView, TextModelView
from agent.records.boards import Rework
from agent.records.station.audit import AuditEntry
from agent.records.station.reviews import Review
from agent.records.verdict import AlarmRow
from agent.runtime.flight_record import ExpertSeen
from agent.service.texts.text_under_way import TextGlance
from experts.expert import BoundingBox, Verdict

Span = tuple[float, float, str, int]


@dataclass(frozen=True, slots=True)
class JudgingView:
    """FAILING: it takes no work, or cannot store verdicts. STOPPED: it starts, or stops as it was told."""

    state: Literal["JUDGING", "IDLE", "STOPPED", "FAILING"]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ParetoBar:
    component: str
    label: str | None
    images: int


@dataclass(frozen=True, slots=True)
class TaktView:
    """Median of the last boards of one type, null before its second one, and that type's own target."""

    board_type: str
    takt_s: float | None
    takt_target_s: float


@dataclass(frozen=True, slots=True)
class ShiftView:
    """Since the shift began. ``takts``: by board type, the newest first; ``takt_s``, ``takt_target_s``: of that one;
    ``reviews``: by finding; ``pareto``: of NG and UNKNOWN images."""

    since: datetime
    verdicts: Mapping[Verdict, int]
    boards: Mapping[Verdict, int]
    takt_s: float | None
    takt_target_s: float | None
    takts: tuple[TaktView, ...]
    reviews: Mapping[str, int]
    pareto: tuple[ParetoBar, ...]


@dataclass(frozen=True, slots=True)
class BoardTile:
    """``number``, ``verdict``, ``closed_at``: null while it is open. ``missing``: images that did not come; ``reason``:
    which ones, and what keeps a closed board from OK besides its parts."""

    number: int | None
    serial: str
    board_type: str
    verdict: Verdict | None
    opened_at: datetime
    closed_at: datetime | None
    takt_s: float | None
    counts: Mapping[Verdict, int]
    missing: int
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultView:
    """A stored result. ``ref``: place on the board; ``image``: name of its file or frame. ``file``: identity of the
    results file that numbers are of. ``unproven``: an expert of it was."""

    seq: int
    file: str
    key: str
    board: str | None
    board_type: str | None
    ref: str | None
    component: str | None
    image: str
    verdict: Verdict
    label: str | None
    score: float | None
    reason: str | None
    experts: tuple[str, ...]
    unproven: bool
    arrived_at: datetime
    finished_at: datetime
    seconds: float
    has_image: bool
    has_maps: bool
    review: Review | None


@dataclass(frozen=True, slots=True)
class SourceView:
    name: str
    kind: str
    state: str
    alarm: str | None
    received: int
    waiting: int
    per_s: float
    dropped: int


@dataclass(frozen=True, slots=True)
class ReceiverView:
    name: str
    waiting: int
    alarm: str | None


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """``wait_s``: predicted, of a new request; ``busy``: share of the last 10 s, 0 to 1."""

    executor: int
    processor: str
    worker: str
    requests: int
    running: str | None
    wait_s: float
    busy: float


@dataclass(frozen=True, slots=True)
class MemoryView:
    """``experts``: how many are in it; leases are those of texts under way."""

    name: str
    used_bytes: int
    capacity_bytes: int
    experts: int
    lease_bytes: int
    lease_capacity_bytes: int


@dataclass(frozen=True, slots=True)
class LoadsView:
    """Since the start. ``wait_p99_s``: from arrival to verdict, of the last 1,000 images."""

    switches: int
    switches_per_min: float
    evictions: int
    bytes_read: int
    wait_p99_s: float | None


@dataclass(frozen=True, slots=True)
class WritingView:
    """Texts since the start."""

    under_way: int
    ended: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class StandingView:
    """Expert that takes no requests now."""

    expert: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateView:
    """The line now. ``phase``: why it takes no work, if that is intended; ``cases``: newest NG and UNKNOWN results;
    ``unproven``: experts without proof."""

    line: str
    version: str
    config_sha256: str
    phase: str | None
    judging: JudgingView
    shift: ShiftView
    alarms: tuple[AlarmRow, ...]
    boards: tuple[BoardTile, ...]
    cases: tuple[ResultView, ...]
    sources: tuple[SourceView, ...]
    receivers: tuple[ReceiverView, ...]
    executors: tuple[ExecutorView, ...]
    memories: tuple[MemoryView, ...]
    loads: LoadsView
    texts: WritingView | None
    standing: tuple[StandingView, ...]
    unproven: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgesView:
    """``at``: when the state was seen."""

    uptime_s: float
    at: datetime


@dataclass(frozen=True, slots=True)
class StateDocument:
    """The ETag is that of ``state`` alone."""

    state: StateView
    ages: AgesView


@dataclass(frozen=True, slots=True)
class ResultsDocument:
    """Newest first. ``next``: for ``before``, to go on; null at the end."""

    results: tuple[ResultView, ...]
    next: int | None


@dataclass(frozen=True, slots=True)
class MeasuredView:
    """``has_map``: /api/results/SEQ/maps/STEP shows it."""

    score: float
    threshold: float
    has_map: bool


@dataclass(frozen=True, slots=True)
class OutputView:
    label: str
    score: float
    threshold: float
    holds: bool


@dataclass(frozen=True, slots=True)
class StepView:
    """One expert's answer. ``boxes``: in pixels of the part's image, upright."""

    expert: str
    label: str
    score: float
    boxes: tuple[BoundingBox, ...]
    anomaly: MeasuredView | None
    outputs: tuple[OutputView, ...]
    unproven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDetail(ResultView):
    """``box``: of the part on its frame; ``size``: [height, width] of the part's image; ``timeline``: its course."""

    steps: tuple[StepView, ...]
    box: tuple[int, int, int, int] | None
    size: tuple[int, int] | None
    config_sha256: str
    reviews: tuple[Review, ...]
    timeline: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class BoardsDocument:
    boards: tuple[BoardTile, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView(ResultView):
    box: tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class BoardDetail(BoardTile):
    """``size``: [height, width] of its frames; ``frame``: a result whose whole frame is at /api/results/SEQ/frame.
    ``is_cut``: earlier results of this run are left out of ``parts``."""

    parts: tuple[PartView, ...]
    size: tuple[int, int] | None
    frame: int | None
    reworks: tuple[Rework, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class ReviewsDocument:
    reviews: tuple[Review, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertView:
    """``sha256``: of the weights that it serves; ``shadow``: the expert in its shadow. ``usage_profiled``,
    ``usage_seen``: its share of steps, as expected and as counted; ``standing``: why it takes no requests now;
    ``unproven``: why it is. ``false_calls``: among its ``reviewed_ng``, the NG answers that people reviewed."""

    id: str
    sha256: str
    shadow: str | None
    components: tuple[str, ...]
    architecture: str
    memories: tuple[str, ...]
    usage_profiled: float
    usage_seen: float
    loads: int
    evictions: int
    standing: str | None
    unproven: str | None
    false_calls: int
    reviewed_ng: int


@dataclass(frozen=True, slots=True)
class ExpertsDocument:
    experts: tuple[ExpertView, ...]


@dataclass(frozen=True, slots=True)
class LatencyView:
    """Predicted, on one kind of processor. ``load_s``: by where it is loaded from."""

    one_s: float
    batch: int
    batch_s: float
    load_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvictionView:
    """``stage``: of the eviction's rules; ``why``: the claim; ``for``: the newcomer, null where memory ran short."""

    at: datetime
    memory: str
    stage: int
    why: str
    for_: Annotated[str | None, Field(serialization_alias="for")]
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDetail(ExpertView):
    """``drift``: seen less profiled share; ``reviews``: by finding; ``evictions_recent``: newest first."""

    labels: tuple[str, ...]
    task: str | None
    latency: Mapping[str, LatencyView]
    drift: float
    reviews: Mapping[str, int]
    seen: ExpertSeen
    evictions_recent: tuple[EvictionView, ...]


@dataclass(frozen=True, slots=True)
class Resident:
    id: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryDetail:
    name: str
    used_bytes: int
    capacity_bytes: int
    experts: tuple[Resident, ...]
    lease_bytes: int
    lease_capacity_bytes: int


@dataclass(frozen=True, slots=True)
class ExecutorSpans:
    """``spans``: [begin, end, expert, images]; seconds from ``at`` of the document, so they are negative."""

    executor: int
    processor: str
    worker: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class LinkSpans:
    """``spans``: [begin, end, expert, bytes] of loads."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class EngineDocument:
    at: datetime
    span_s: float
    executors: tuple[ExecutorSpans, ...]
    links: tuple[LinkSpans, ...]
    memories: tuple[MemoryDetail, ...]


@dataclass(frozen=True, slots=True)
class TextsDocument:
    """``first_token_s``: mean since the start."""

    models: tuple[TextModelView, ...]
    under_way: tuple[TextGlance, ...]
    tokens_per_s: float
    first_token_s: float | None


@dataclass(frozen=True, slots=True)
class LineDocument:
    """``is_served``: the agent serves this text."""

    file: str
    text: str
    sha256: str
    is_served: bool


@dataclass(frozen=True, slots=True)
class LineProblem:
    line: int | None
    column: int | None
    key: str | None
    message: str


@dataclass(frozen=True, slots=True)
class CheckedDocument:
    problems: tuple[LineProblem, ...]


@dataclass(frozen=True, slots=True)
class PromotedDocument:
    """``shadow``: now holds what served; ``keys``: that differed."""

    expert: str
    shadow: str
    keys: tuple[str, ...]
    reload: ReloadView


@dataclass(frozen=True, slots=True)
class TriggeredDocument:
    """``key``: beginning of the keys of its results."""

    key: str


@dataclass(frozen=True, slots=True)
class AuditDocument:
    entries: tuple[AuditEntry, ...]
    next: int | None
