"""Metrics and health of a line: families in tables, each a projection of its ``LineState``.

Folders are labelled by their number in the line file, from 1; cameras, experts and receivers by name.
"""

from __future__ import annotations

import math
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from agent.core.names import line_name
from agent.doors.http.metrics.readings import Condition, Distribution, Histogram, Labels, Metric, MetricKind
from agent.service.desk.line_state import LineState, state_of
from agent.sources.cameras.supervision import CameraState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from agent.core.pool import PoolStatistics
    from agent.core.state import EngineStatistics, QueueStatistics
    from agent.records.delivery.deliveries import DeliveryStatistics
    from agent.records.group_commit import StoreStatistics
    from agent.records.retention.archive import KeeperStatistics
    from agent.runtime.executor import ExecutorStatistics
    from agent.runtime.weights.transfer import TransferStatistics
    from agent.service.desk.line_state import LineParts
    from agent.service.inspections.admission import Admission
    from agent.subject import SourceStatus
    from experts.llm.tiers.moe_experts import MoeStatistics

Name = TypeVar("Name", bound=str)
Known = TypeVar("Known")
Table: TypeAlias = tuple[tuple[MetricKind, str, str, Callable[[Known], float]], ...]  # kind, name, help, value

COUNTER, GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
LINE: Table[LineState] = (
    (GAUGE, "ready", "1 while it takes work.", lambda one: condition_of(one) == Condition()),
    (GAUGE, "alarms", "Alarms: see coserve status.", lambda one: len(one.alarms)),
    (GAUGE, "boards_open", "Boards that wait for images.", lambda one: one.boards_open),
    (GAUGE, "journal_requests", "Accepted, and not judged yet.", lambda one: one.unfinished),
    (COUNTER, "orders_accepted", "Callers' orders taken.", lambda one: one.tally.accepted),
    (GAUGE, "shadow_images_waiting", "Images that wait for a shadow.", lambda one: one.shadows.waiting),
    (GAUGE, "texts_under_way", "Texts taken that have not ended.", lambda one: one.texts.under_way),
)
ENGINE: Table[EngineStatistics] = (
    (COUNTER, "requests", "Requests that the agent has taken.", lambda one: one.arrived),
    (GAUGE, "requests_in_flight", "Requests that have no outcome yet.", lambda one: one.in_flight),
    (COUNTER, "switches", "Loads that a request had to wait for.", lambda one: one.switches),
    (COUNTER, "evictions", "Experts that left a memory for another one.", lambda one: one.evictions),
    (GAUGE, "prepared_used_bytes", "Images prepared ahead of their batches.", lambda one: one.prepared.used_bytes),
    (GAUGE, "prepared_later_bytes", "Images prepared ahead for later steps.", lambda one: one.prepared.later_bytes),
    (GAUGE, "prepared_budget_bytes", "Budget of images prepared ahead.", lambda one: one.prepared.budget_bytes),
    (GAUGE, "experts_on_probation", "Experts that fail, and are tried again.", lambda one: len(one.on_probation)),
    (GAUGE, "experts_quarantined", "Experts that cannot be served.", lambda one: len(one.quarantined)),
)
TRANSFERS: Table[TransferStatistics] = (
    (COUNTER, "load_failures", "Loads that failed.", lambda one: one.failed),
    (GAUGE, "loads_in_flight", "Loads under way.", lambda one: one.in_flight),
    (COUNTER, "load_read_bytes", "Bytes of weights read from the SSD.", lambda one: one.bytes_read),
    (COUNTER, "load_copied_bytes", "Bytes of weights copied between memories.", lambda one: one.bytes_copied),
)
QUEUE: Table[QueueStatistics] = (
    (GAUGE, "queue_requests", "Requests in an executor's queue.", lambda one: one.requests),
    (GAUGE, "queue_seconds", "Predicted seconds of an executor's queue.", lambda one: one.length_s),
    (GAUGE, "batch_requests", "Requests in the batch that an executor runs.", lambda one: one.running),
)
EXECUTOR: Table[ExecutorStatistics] = (
    (COUNTER, "executor_batches", "Batches that an executor has run.", lambda one: one.batches),
    (COUNTER, "executor_failed_batches", "Batches that failed.", lambda one: one.failed),
    (COUNTER, "executor_images", "Images that an executor has run.", lambda one: one.images),
    (COUNTER, "executor_read_tokens", "Tokens of texts that an executor has read.", lambda one: one.read_tokens),
    (COUNTER, "executor_written_tokens", "Tokens that an executor has written.", lambda one: one.written_tokens),
    (COUNTER, "executor_drafted_tokens", "Tokens of drafts that it verified.", lambda one: one.drafted_tokens),
    (COUNTER, "executor_accepted_tokens", "Tokens of these that were written.", lambda one: one.accepted_tokens),
    (COUNTER, "executor_busy_seconds", "Seconds that an executor was at work.", lambda one: one.busy_s),
    (COUNTER, "executor_waited_seconds", "Busy seconds of waiting for decoded images.", lambda one: one.waited_s),
)
POOL: Table[PoolStatistics] = (
    (GAUGE, "memory_used_bytes", "Weights in a memory.", lambda one: one.used_bytes),
    (GAUGE, "memory_budget_bytes", "Budget of weights in a memory.", lambda one: one.expert_bytes),
    (GAUGE, "memory_peak_bytes", "Peak of weights in a memory since the start.", lambda one: one.peak_used_bytes),
    (GAUGE, "workspace_used_bytes", "Workspace of running batches in a memory.", lambda one: one.workspace_used_bytes),
    (GAUGE, "workspace_budget_bytes", "Budget of workspace in a memory.", lambda one: one.workspace_bytes),
    (GAUGE, "lease_used_bytes", "Memory that texts under way lease.", lambda one: one.lease_used_bytes),
    (GAUGE, "lease_budget_bytes", "Memory that texts may lease.", lambda one: one.lease_bytes),
    (GAUGE, "experts_resident", "Experts in a memory.", lambda one: len(one.resident)),
)
MOE_EXPERTS: Table[MoeStatistics] = (
    (COUNTER, "moe_loaded_bytes", "Bytes of moe_experts brought to where they run.", lambda one: one.bytes_loaded),
    (COUNTER, "moe_wait_seconds", "Seconds of waiting for moe_experts.", lambda one: one.waited_s),
)
FOLDER: Table[SourceStatus] = (
    (GAUGE, "folder_up", "1 while files are taken and put away.", lambda one: one.alarm is None),
    (COUNTER, "folder_files", "Files taken, refused ones included.", lambda one: one.received),
    (GAUGE, "folder_waiting_files", "Files not complete, or not read yet.", lambda one: one.waiting),
    (GAUGE, "folder_left_alone_files", "Files there whose ending is no image's.", lambda one: one.left_alone),
    (GAUGE, "folder_held_bytes", "Images read and not judged yet.", lambda one: one.held_bytes),
)
CAMERA: Table[SourceStatus] = (
    (COUNTER, "camera_frames", "Frames taken.", lambda one: one.received),
    (COUNTER, "camera_broken_frames", "Frames that could not be read.", lambda one: one.broken),
    (COUNTER, "camera_lost_triggers", "Triggers that got no frame.", lambda one: one.lost),
    (COUNTER, "camera_reconnects", "Connections begun after the first.", lambda one: one.reconnects),
    (GAUGE, "camera_waiting", "Triggers and frames not taken yet.", lambda one: one.waiting),
)
RECEIVER: Table[DeliveryStatistics] = (
    (GAUGE, "outbox_messages", "Messages that wait.", lambda one: one.waiting),
    (COUNTER, "outbox_delivered", "Messages told.", lambda one: one.delivered),
    (COUNTER, "outbox_refused", "Messages refused for good.", lambda one: one.refused),
    (COUNTER, "outbox_given_way", "Messages that gave way, since the results were begun.", lambda one: one.given_way),
)
STORE: Table[StoreStatistics] = (
    (GAUGE, "store_pending", "Rows and other writes that are not on the disk yet.", lambda one: one.pending),
    (COUNTER, "store_failed_commits", "Commits that failed, and were tried again.", lambda one: one.failed_commits),
)
IMAGES: Table[KeeperStatistics] = (
    (COUNTER, "images_kept", "Images of cameras and callers that were kept.", lambda one: one.kept),
    (COUNTER, "images_not_kept", "Images that could not be kept.", lambda one: one.not_kept),
)
ADMISSION: Table[Admission] = (
    (GAUGE, "admitted_images", "Callers' images and texts under way.", lambda one: one.images),
    (GAUGE, "admitted_bytes", "Bytes of callers' images and texts under way.", lambda one: one.size_bytes),
)
RESULTS: Table[Path] = (
    (GAUGE, "results_bytes", "Size of the results file.", lambda file: _size_bytes(file)),
    (GAUGE, "results_wal_bytes", "Size of its log.", lambda file: _size_bytes(file.with_name(f"{file.name}-wal"))),
    (GAUGE, "state_free_bytes", "Free on the disk of the state.", lambda file: _free_bytes(file.parent)),
)
COUNTED: tuple[tuple[MetricKind, str, str, Labels, Callable[[LineState], Mapping[Labels, float]]], ...] = (
    (GAUGE, "build_info", "Version, Python, line and device of the agent.", ("version", "python", "line", "device"),
     lambda one: {(version("coserve"), platform.python_version(), one.agent.config.line, one.agent.box.name): 1}),
    (COUNTER, "verdicts", "Results stored.", ("verdict",), lambda one: _by_name(one.tally.verdicts)),
    (COUNTER, "board_verdicts", "Board verdicts stored.", ("verdict",), lambda one: _by_name(one.tally.boards)),
    (COUNTER, "orders_refused", "Callers' orders refused.", ("reason",), lambda one: _by_name(one.tally.refused)),
    (COUNTER, "texts_ended", "Texts that have ended, by why.", ("ending",), lambda one: _by_name(one.texts.ended)),
    (COUNTER, "shadow_images", "Images for shadows of experts, by what became of them.", ("ending",),
     lambda one: {(ending,): getattr(one.shadows, ending) for ending in ("ran", "failed", "dropped")}),
    (GAUGE, "expert_proven", "1 for an expert that is proven by known answers, as it is served.", ("expert",),
     lambda one: {(name,): name not in one.lacks for name, expert in one.agent.config.catalog.experts.items()
                  if not expert.takes_texts}),
    (GAUGE, "executor_info", "Processor of an executor.", ("executor", "processor"),
     lambda one: {(str(each.executor), each.processor): 1 for each in one.loop.executors}),
    (COUNTER, "expert_loads", "Loads of an expert into a memory.", ("expert", "tier"), lambda one: _loads(one)),
    (COUNTER, "loads", "Loads, by where from and where to.", ("source", "tier"),
     lambda one: _by_way(one.loop.transfers.loads)),
    (COUNTER, "load_seconds", "Seconds of loads, by where from and where to.", ("source", "tier"),
     lambda one: _by_way(one.loop.transfers.seconds)),
    (COUNTER, "moe_experts_needed", "Uses of moe_experts: there, on their way, or not there.", ("pool", "found"),
     lambda one: {(store.pool, found): count for store in one.loop.slots for found, count in (
         ("hit", store.moe_experts.hits), ("late", store.moe_experts.late), ("miss", store.moe_experts.misses))}),
    (GAUGE, "camera_state", "1 for the state that a camera is in.", ("camera", "state"),
     lambda one: {(name, str(state)): camera.state == str(state) for name, camera in _cameras(one).items()
                  for state in CameraState}),
    (GAUGE, "camera_frame_age_seconds", "Seconds since the last frame.", ("camera",),
     lambda one: {(name,): camera.frame_age_s for name, camera in _cameras(one).items()
                  if camera.frame_age_s is not None}),
)  # fmt: skip
SPREAD: tuple[tuple[str, str, Labels, Callable[[LineState], Mapping[Labels, Distribution]]], ...] = (
    ("verdict_seconds", "From arrival to stored verdict.", ("source",), lambda one: _by_name(one.tally.seconds)),
    ("text_first_token_seconds", "Seconds until a text showed something.", (),
     lambda one: {(): one.texts.first_token_s}),
)  # fmt: skip


class LineMetrics:
    """Implements ``agent.doors.http.metrics.readings.ObservedLine``."""

    def __init__(self, parts: LineParts) -> None:
        self._line = parts
        self._dropped: Counter[str] = Counter()  # frames by camera: highest count seen

    def condition(self) -> Condition:
        return condition_of(state_of(self._line))

    def metrics(self) -> Sequence[Metric | Histogram]:
        line = state_of(self._line)
        loop = line.loop
        folders = [source for source in line.sources if source.kind == "folder"]
        return [
            *_metrics_of(LINE, line),
            *(Metric(kind, name, words, values(line), labels) for kind, name, words, labels, values in COUNTED),
            *(Histogram(name, words, values(line), labels) for name, words, labels, values in SPREAD),
            *_metrics_of(ENGINE, loop.engine),
            *_metrics_of(TRANSFERS, loop.transfers),
            *_each(QUEUE, "executor", {str(one.executor): one for one in loop.engine.queues}),
            *_each(EXECUTOR, "executor", {str(one.executor): one for one in loop.executors}),
            *_each(POOL, "pool", {pool.name: pool for pool in loop.engine.pools}),
            *_each(MOE_EXPERTS, "pool", {store.pool: store.moe_experts for store in loop.slots}),
            *_metrics_of(ADMISSION, self._line.admission),
            *_each(FOLDER, "folder", {str(number): one for number, one in enumerate(folders, start=1)}),
            *_each(CAMERA, "camera", _cameras(line)),
            *_each(RECEIVER, "receiver", {one.receiver: one for one in line.receivers}),
            *_metrics_of(STORE, line.store),
            *_metrics_of(IMAGES, self._line.images.statistics()),
            *_metrics_of(RESULTS, line.agent.config.results_file),
            *self._of_more_than_now(line),
        ]

    def _of_more_than_now(self, line: LineState) -> Iterator[Metric]:
        for name, one in _cameras(line).items():  # a frame in transit counts as dropped: a counter must not decrease
            self._dropped[name] = max(self._dropped[name], one.dropped)
        dropped = _by_name(self._dropped)
        yield Metric(COUNTER, "camera_dropped_frames", "Frames that gave way to later ones.", dropped, ("camera",))
        now, oldest = datetime.now(UTC), self._line.deliveries.oldest().items()
        ages = {name: 0.0 if since is None else max((now - since).total_seconds(), 0.0) for name, since in oldest}
        words = "Seconds since the oldest waiting one was judged."
        yield Metric(GAUGE, "outbox_oldest_age_seconds", words, _by_name(ages), ("receiver",))
        up: dict[Labels, float] = {(name,): name in line.agent.loop.workers for name in line.agent.setup.workers}
        if up:
            yield Metric(GAUGE, "worker_up", "1 while a worker is there.", up, ("worker",))


def condition_of(line: LineState) -> Condition:
    crash = None if line.crash is None else str(line.crash)
    return Condition(crash, line.unready or _idle(line.sources))


def _idle(sources: Sequence[SourceStatus]) -> str | None:
    """Why no source takes images, if the line has any."""
    idle = [
        f"{each.name}: {each.alarm or each.state}" for each in sources
        if (each.alarm is not None if each.kind == "folder" else each.state != CameraState.STREAMING)
    ]  # fmt: skip
    return f"no source takes images: {'; '.join(idle)}" if idle and len(idle) == len(sources) else None


def _metrics_of(table: Table[Known], one: Known) -> list[Metric]:
    return [Metric(kind, name, words, {(): value(one)}) for kind, name, words, value in table]


def _each(table: Table[Known], label: str, found: Mapping[str, Known]) -> list[Metric]:
    return [
        Metric(kind, name, words, {(one,): value(known) for one, known in found.items()}, (label,))
        for kind, name, words, value in table
    ]


def _by_name(found: Mapping[Name, Known]) -> dict[Labels, Known]:
    return {(str(name),): known for name, known in found.items()}


def _by_way(found: Mapping[str, float]) -> dict[Labels, float]:
    return {tuple(way.split("_", 1)): value for way, value in found.items()}


def _loads(line: LineState) -> Counter[Labels]:
    """Loads by the line file's name of each expert; the Engine renames a replaced expert."""
    loads: Counter[Labels] = Counter()
    for (expert, pool), count in line.loop.transfers.of_experts.items():
        loads[line_name(expert), pool] += count
    return loads


def _cameras(line: LineState) -> dict[str, SourceStatus]:
    return {source.name: source for source in line.sources if source.kind == "camera"}


def _size_bytes(file: Path) -> float:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError:
        return math.nan


def _free_bytes(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # the writer raises the alarm
        return math.nan
