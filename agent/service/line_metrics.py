"""Metrics and health of a line, for ``agent.doors.http`` (``agent.doors.http.metrics.readings``).

Folders are labelled by their number in the line file, from 1; cameras, experts and receivers by name.
"""

from __future__ import annotations

import math
import platform
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from agent.deployment.line_change import line_name
from agent.doors.http.metrics.readings import Condition, Histogram, Metric, MetricKind
from agent.service.desk.line_desk import unready
from agent.sources.cameras.supervision import CameraState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.core.pool import PoolStatistics
    from agent.core.state import EngineStatistics, QueueStatistics
    from agent.doors.desk import ShadowsView
    from agent.doors.http.metrics.readings import Distribution, Labels
    from agent.records.delivery.deliveries import DeliveryStatistics
    from agent.records.results import StoreStatistics
    from agent.records.retention.archive import KeeperStatistics
    from agent.runtime.executor import ExecutorStatistics
    from agent.runtime.loop import LoopStatistics
    from agent.runtime.weights.transfer import TransferStatistics
    from agent.service.desk.line_desk import LineParts
    from agent.service.inspections.admission import Admission
    from agent.service.upkeep import Upkeep
    from agent.subject import SourceStatus

Name = TypeVar("Name", bound=str)
Known = TypeVar("Known")
Table: TypeAlias = tuple[tuple[MetricKind, str, str, Callable[[Known], float]], ...]  # kind, name, help, value

COUNTER, GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
OLDEST = "Seconds since the oldest waiting one was judged."
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


class LineMetrics:
    """Implements ``agent.doors.http.metrics.readings.Line``."""

    def __init__(self, parts: LineParts, upkeep: Upkeep) -> None:
        self._line = parts
        self._upkeep = upkeep
        self._dropped: Counter[str] = Counter()  # frames by camera: highest count seen

    def condition(self) -> Condition:
        line = self._line
        wrong, crash = unready(line) or _idle(line.sources()), line.inspector.crash
        return Condition(None if crash is None else str(crash), wrong)

    def metrics(self) -> Sequence[Metric | Histogram]:
        line, loop = self._line, self._line.inspector.agent.loop.statistics()
        sources = self._line.sources()
        watched = [source for source in sources if source.kind == "folder"]
        folders = {str(number): folder for number, folder in enumerate(watched, start=1)}
        places: dict[Labels, float] = {(str(one.executor), one.processor): 1 for one in loop.executors}
        receivers, now = {one.receiver: one for one in self._upkeep.deliveries.statistics()}, datetime.now(UTC)
        oldest = self._upkeep.deliveries.oldest().items()
        ages = {name: 0.0 if since is None else max((now - since).total_seconds(), 0.0) for name, since in oldest}
        return [
            *self._identity(),
            *self._counts(),
            *_metrics_of(ENGINE, loop.engine),
            *_metrics_of(TRANSFERS, loop.transfers),
            *_loads(loop),
            *_shadows(line.inspector.shadow_counts()),
            self._proven(),
            *_moe_experts(loop),
            *self._workers(),
            Metric(GAUGE, "executor_info", "Processor of an executor.", places, ("executor", "processor")),
            *_each(QUEUE, "executor", {str(one.executor): one for one in loop.engine.queues}),
            *_each(EXECUTOR, "executor", {str(one.executor): one for one in loop.executors}),
            *_each(POOL, "pool", {pool.name: pool for pool in loop.engine.pools}),
            *_metrics_of(ADMISSION, line.admission),
            *self._texts(),
            *_each(FOLDER, "folder", folders),
            *self._cameras({source.name: source for source in sources if source.kind == "camera"}),
            *_each(RECEIVER, "receiver", receivers),
            Metric(GAUGE, "outbox_oldest_age_seconds", OLDEST, _by_name(ages), ("receiver",)),
            *_metrics_of(STORE, line.store.statistics()),
            *_metrics_of(IMAGES, self._upkeep.images.statistics()),
            *_metrics_of(RESULTS, line.inspector.agent.config.results_file),
        ]

    def _identity(self) -> Iterator[Metric]:
        agent = self._line.inspector.agent
        about = {"version": version("coserve"), "python": platform.python_version()}
        about |= {"line": agent.config.line, "device": agent.box.name}
        words = "Version, Python, line and device of the agent."
        yield Metric(GAUGE, "build_info", words, {tuple(about.values()): 1.0}, tuple(about))
        yield Metric(GAUGE, "ready", "1 while it takes work.", {(): self.condition() == Condition()})
        yield Metric(GAUGE, "alarms", "Alarms: see coserve status.", {(): len(self._line.alarms())})

    def _proven(self) -> Metric:
        inspector = self._line.inspector
        lacks, experts = inspector.trust.lacks, inspector.agent.config.catalog.experts
        proven: dict[Labels, float] = {(name,): name not in lacks for name in experts if not experts[name].takes_texts}
        words = "1 for an expert that is proven by known answers, as it is served."
        return Metric(GAUGE, "expert_proven", words, proven, ("expert",))

    def _workers(self) -> Iterator[Metric]:
        """One row for each worker; none without."""
        agent = self._line.inspector.agent
        up: dict[Labels, float] = {(name,): float(name in agent.loop.workers) for name in agent.setup.workers}
        if up:
            yield Metric(GAUGE, "worker_up", "1 while a worker is there.", up, ("worker",))

    def _counts(self) -> Iterator[Metric | Histogram]:
        line, tally = self._line, self._line.tally.statistics()
        boards = line.boards.statistics().open
        yield Metric(COUNTER, "verdicts", "Results stored.", _by_name(line.tally.verdicts), ("verdict",))
        yield Histogram("verdict_seconds", "From arrival to stored verdict.", _by_name(tally.seconds), ("source",))
        yield Metric(COUNTER, "board_verdicts", "Board verdicts stored.", _by_name(tally.boards), ("verdict",))
        yield Metric(GAUGE, "boards_open", "Boards that wait for images.", {(): boards})
        yield Metric(GAUGE, "journal_requests", "Accepted, and not judged yet.", {(): line.journaled.unfinished})
        yield Metric(COUNTER, "orders_accepted", "Callers' orders taken.", {(): tally.accepted})
        yield Metric(COUNTER, "orders_refused", "Callers' orders refused.", _by_name(tally.refused), ("reason",))

    def _texts(self) -> Iterator[Metric | Histogram]:
        texts = self._line.texts.statistics()
        yield Metric(GAUGE, "texts_under_way", "Texts taken that have not ended.", {(): texts.under_way})
        yield Metric(COUNTER, "texts_ended", "Texts that have ended, by why.", _by_name(texts.ended), ("ending",))
        first: dict[Labels, Distribution] = {(): texts.first_token_s}
        yield Histogram("text_first_token_seconds", "Seconds until a text showed something.", first, ())

    def _cameras(self, seen: Mapping[str, SourceStatus]) -> Iterator[Metric]:
        yield from _each(CAMERA, "camera", seen)
        for name, one in seen.items():  # a frame in transit briefly counts as dropped: a counter must not decrease
            self._dropped[name] = max(self._dropped[name], one.dropped)
        dropped = _by_name(self._dropped)
        yield Metric(COUNTER, "camera_dropped_frames", "Frames that gave way to later ones.", dropped, ("camera",))
        states: dict[Labels, float] = {
            (name, str(state)): one.state == str(state) for name, one in seen.items() for state in CameraState
        }
        yield Metric(GAUGE, "camera_state", "1 for the state that a camera is in.", states, ("camera", "state"))
        ages = {name: one.frame_age_s for name, one in seen.items() if one.frame_age_s is not None}
        yield Metric(GAUGE, "camera_frame_age_seconds", "Seconds since the last frame.", _by_name(ages), ("camera",))


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


def _shadows(seen: ShadowsView) -> Iterator[Metric]:
    ended: dict[Labels, float] = {("ran",): seen.ran, ("failed",): seen.failed, ("dropped",): seen.dropped}
    yield Metric(COUNTER, "shadow_images", "Images for shadows of experts, by what became of them.", ended, ("ending",))
    yield Metric(GAUGE, "shadow_images_waiting", "Images that wait for a shadow.", {(): seen.waiting})


def _loads(loop: LoopStatistics) -> Iterator[Metric]:
    """Loads by the line file's name of each expert; the Engine renames a replaced expert."""
    loads: Counter[Labels] = Counter()
    for (expert, pool), count in loop.transfers.of_experts.items():
        loads[line_name(expert), pool] += count
    yield Metric(COUNTER, "expert_loads", "Loads of an expert into a memory.", loads, ("expert", "tier"))
    for name, words, found in (
        ("loads", "Loads, by where from and where to.", loop.transfers.loads),
        ("load_seconds", "Seconds of loads, by where from and where to.", loop.transfers.seconds),
    ):
        by_way: dict[Labels, float] = {tuple(way.split("_", 1)): value for way, value in found.items()}
        yield Metric(COUNTER, name, words, by_way, ("source", "tier"))


def _moe_experts(loop: LoopStatistics) -> Iterator[Metric]:
    """Language models with partly resident moe_experts, by memory."""
    stores = {store.pool: store.moe_experts for store in loop.slots}
    needed: dict[Labels, float] = {}
    for pool, found in stores.items():
        needed |= {(pool, "hit"): found.hits, (pool, "late"): found.late, (pool, "miss"): found.misses}
    words = "Uses of moe_experts: there, on their way, or not there."
    yield Metric(COUNTER, "moe_experts_needed", words, needed, ("pool", "found"))
    read: dict[Labels, float] = {(pool,): found.bytes_loaded for pool, found in stores.items()}
    yield Metric(COUNTER, "moe_loaded_bytes", "Bytes of moe_experts brought to where they run.", read, ("pool",))
    waited: dict[Labels, float] = {(pool,): found.waited_s for pool, found in stores.items()}
    yield Metric(COUNTER, "moe_wait_seconds", "Seconds of waiting for moe_experts.", waited, ("pool",))


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
