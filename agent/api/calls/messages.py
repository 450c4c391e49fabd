"""The desk's nouns as messages of coserve.v1, and back.

Guarantees: what a message is made of comes out of it again; text that is no Unicode, as of a file's name in another
encoding, is told with its odd bytes escaped instead of stopping the message.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from agent.api.calls.desk import (
    AnomalyView,
    BoardView,
    ImageOrder,
    PoolView,
    QueueView,
    ReloadView,
    ShadowsView,
    StatusView,
    TextsView,
    VerdictView,
)  # fmt: skip
from agent.api.proto import inspection_pb2 as pb
from agent.subject import CALLER_PREFIX, CALLERS, SourceStatus, Subject
from experts.errors import OrderRefused, Refusing
from experts.expert import BoundingBox, LabelScore, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.timestamp_pb2 import Timestamp
    from numpy.typing import NDArray

VERDICTS = {
    Verdict.UNKNOWN: pb.VERDICT_UNKNOWN,
    Verdict.OK: pb.VERDICT_OK,
    Verdict.NG: pb.VERDICT_NG,
}
OF_SOURCE = ("name", "kind", "state", "received", "waiting", "dropped", "alarm")
VERDICT_OF = {number: verdict for verdict, number in VERDICTS.items()}


def text(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode("utf-8")


def order_of(request: pb.InspectRequest) -> ImageOrder:
    """Order of a request. Raises OrderRefused for a contradiction."""
    if request.component and request.expert:
        raise OrderRefused(Refusing.INVALID, "component and expert are both set - name what judges the image once")
    return ImageOrder(
        subject=Subject(
            request.key,
            CALLERS,
            request.key,
            datetime.now(UTC).astimezone(),
            component=request.component or None,
            expert=request.expert or None,
            board=request.board or None,
            board_type=request.board_type or None,
            ref=request.ref or None,
        ),
        image=_image_of(request),
        is_kept=not request.is_question,
        wants_maps=request.wants_maps,
    )


def _image_of(request: pb.InspectRequest) -> bytes | NDArray[np.uint8]:
    kind = request.WhichOneof("image")
    if kind == "pixels":
        return pixels(request.pixels.height, request.pixels.width, request.pixels.rgb)
    if kind == "file" and request.file:
        return request.file
    raise OrderRefused(Refusing.INVALID, "no image - set file (an encoded image file) or pixels")


def pixels(height: int, width: int, rgb: bytes) -> NDArray[np.uint8]:
    """An image by its bytes. Raises OrderRefused where their number is another one."""
    if height < 1 or width < 1 or height * width * 3 != len(rgb):
        raise OrderRefused(
            Refusing.INVALID, f"an image of {height} x {width} pixels has 3 bytes each, and here are {len(rgb)}"
        )
    return np.frombuffer(rgb, np.uint8).reshape(height, width, 3)


def part_message(part: VerdictView) -> pb.Part:
    subject = part.subject
    message = pb.Part(
        key=text(subject.key.removeprefix(CALLER_PREFIX)),
        component=text(subject.component or ""),
        verdict=VERDICTS[part.verdict],
        seq=part.seq,
        score=part.score,
        experts=[text(each) for each in part.experts],
        boxes=[_box_message(box) for box in part.boxes],
        anomalies=[_anomaly_message(each) for each in part.anomalies],
        outputs=[pb.LabelScore(label=text(o.label), score=o.score, threshold=o.threshold) for o in part.outputs],
        seconds=part.seconds,
        queue_s=part.queue_s,
        compute_s=part.compute_s,
        is_repeat=part.is_repeat,
    )
    for name in ("expert", "board", "board_type", "ref"):
        if (words := getattr(subject, name)) is not None:
            setattr(message, name, text(words))
    for name in ("label", "reason"):
        if (words := getattr(part, name)) is not None:
            setattr(message, name, text(words))
    _set_time(message.arrived_at, subject.arrived_at)
    _set_time(message.finished_at, part.finished_at)
    return message


def part_of(message: pb.Part) -> VerdictView:
    return VerdictView(
        subject=Subject(
            message.key,
            "",
            message.key,
            _time(message.arrived_at),
            component=message.component or None,
            expert=message.expert if message.HasField("expert") else None,
            board=message.board if message.HasField("board") else None,
            board_type=message.board_type if message.HasField("board_type") else None,
            ref=message.ref if message.HasField("ref") else None,
        ),
        verdict=VERDICT_OF.get(message.verdict, Verdict.UNKNOWN),
        seq=message.seq if message.HasField("seq") else None,
        label=message.label if message.HasField("label") else None,
        score=message.score if message.HasField("score") else None,
        reason=message.reason if message.HasField("reason") else None,
        experts=tuple(message.experts),
        boxes=tuple(_box_of(box) for box in message.boxes),
        finished_at=_time(message.finished_at) if message.HasField("finished_at") else None,
        seconds=message.seconds,
        queue_s=message.queue_s,
        compute_s=message.compute_s,
        anomalies=tuple(_anomaly_of(each) for each in message.anomalies),
        is_repeat=message.is_repeat,
        outputs=tuple(LabelScore(each.label, each.score, each.threshold) for each in message.outputs),
    )


def _anomaly_message(anomaly: AnomalyView) -> pb.Anomaly:
    return pb.Anomaly(
        expert=text(anomaly.expert), score=anomaly.score, threshold=anomaly.threshold, map=anomaly.map_png
    )


def _anomaly_of(message: pb.Anomaly) -> AnomalyView:
    shown = message.map if message.HasField("map") else None
    return AnomalyView(message.expert, message.score, message.threshold, shown)


def _box_message(box: BoundingBox) -> pb.BoundingBox:
    return pb.BoundingBox(
        label=text(box.label), score=box.score, left=box.left, top=box.top, right=box.right, bottom=box.bottom
    )


def _box_of(message: pb.BoundingBox) -> BoundingBox:
    return BoundingBox(message.label, message.score, message.left, message.top, message.right, message.bottom)


def board_message(board: BoardView) -> pb.Board:
    message = pb.Board(
        serial=text(board.serial),
        board_type=text(board.board_type),
        is_open=board.verdict is None,
        verdict=VERDICTS[board.verdict or Verdict.UNKNOWN],
        missing={text(component): images for component, images in board.missing.items()},
        ok=board.counts.get(Verdict.OK, 0),
        ng=board.counts.get(Verdict.NG, 0),
        unknown=board.counts.get(Verdict.UNKNOWN, 0),
        parts=[part_message(part) for part in board.parts],
        is_revision=board.is_revision,
    )
    _set_time(message.opened_at, board.opened_at)
    _set_time(message.closed_at, board.closed_at)
    return message


def board_of(message: pb.Board) -> BoardView:
    return BoardView(
        serial=message.serial,
        board_type=message.board_type,
        verdict=None if message.is_open else VERDICT_OF.get(message.verdict, Verdict.UNKNOWN),
        opened_at=_time(message.opened_at),
        closed_at=_time(message.closed_at) if message.HasField("closed_at") else None,
        missing=dict(message.missing),
        counts={Verdict.OK: message.ok, Verdict.NG: message.ng, Verdict.UNKNOWN: message.unknown},
        parts=tuple(part_of(part) for part in message.parts),
        is_revision=message.is_revision,
    )


def status_message(status: StatusView) -> pb.StatusReply:
    return pb.StatusReply(
        line=status.line,
        version=status.version,
        uptime_s=status.uptime_s,
        is_draining=status.is_draining,
        requests_in_flight=status.requests_in_flight,
        ok=status.verdicts.get(Verdict.OK, 0),
        ng=status.verdicts.get(Verdict.NG, 0),
        unknown=status.verdicts.get(Verdict.UNKNOWN, 0),
        boards_open=status.boards_open,
        switches=status.switches,
        loads=status.loads,
        evictions=status.evictions,
        bytes_read=status.bytes_read,
        queues=[pb.Queue(**_fields(queue)) for queue in status.queues],
        pools=[pb.Pool(**_fields(pool)) for pool in status.pools],
        sources=[pb.Source(**_fields(source, OF_SOURCE)) for source in status.sources],
        standing={text(expert): text(why) for expert, why in status.standing.items()},
        alarms=[text(alarm) for alarm in status.alarms],
        texts=pb.TextCounts(**{name: getattr(status.texts, name) for name in TextsView.__slots__}),
        shadows=pb.ShadowCounts(**{name: getattr(status.shadows, name) for name in ShadowsView.__slots__}),
    )


def status_of(message: pb.StatusReply) -> StatusView:
    return StatusView(
        line=message.line,
        version=message.version,
        uptime_s=message.uptime_s,
        is_draining=message.is_draining,
        requests_in_flight=message.requests_in_flight,
        verdicts={Verdict.OK: message.ok, Verdict.NG: message.ng, Verdict.UNKNOWN: message.unknown},
        boards_open=message.boards_open,
        switches=message.switches,
        loads=message.loads,
        evictions=message.evictions,
        bytes_read=message.bytes_read,
        queues=tuple(_queue_of(queue) for queue in message.queues),
        pools=tuple(_pool_of(each) for each in message.pools),
        sources=tuple(_source_of(source) for source in message.sources),
        standing=dict(message.standing),
        alarms=tuple(message.alarms),
        texts=TextsView(**{name: getattr(message.texts, name) for name in TextsView.__slots__}),
        shadows=ShadowsView(**{name: getattr(message.shadows, name) for name in ShadowsView.__slots__}),
    )


def _fields(view: QueueView | PoolView | SourceStatus, names: Sequence[str] | None = None) -> dict[str, Any]:
    values = {name: getattr(view, name) for name in names or view.__slots__}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:  # noqa: ANN401  # a field of any of them
    if isinstance(value, tuple):
        return [text(str(each)) for each in value]
    return text(value) if isinstance(value, str) else value


def _queue_of(message: pb.Queue) -> QueueView:
    running = message.running if message.HasField("running") else None
    return QueueView(message.executor, message.processor, message.requests, running, message.busy_s, message.waited_s)


def _pool_of(message: pb.Pool) -> PoolView:
    return PoolView(
        message.name,
        message.used_bytes,
        message.capacity_bytes,
        tuple(message.experts),
        message.lease_bytes,
        message.lease_capacity_bytes,
    )


def _source_of(message: pb.Source) -> SourceStatus:
    return SourceStatus(
        message.name,
        message.kind,
        message.state,
        message.received,
        message.waiting,
        message.dropped,
        message.alarm if message.HasField("alarm") else None,
    )


def reload_message(reload: ReloadView) -> pb.ReloadReply:
    return pb.ReloadReply(
        is_applied=reload.is_applied,
        problems=[text(each) for each in reload.problems],
        added=[text(each) for each in reload.added],
        replaced=[text(each) for each in reload.replaced],
        removed=[text(each) for each in reload.removed],
        needs_restart=[text(each) for each in reload.needs_restart],
    )


def reload_of(message: pb.ReloadReply) -> ReloadView:
    return ReloadView(
        message.is_applied,
        tuple(message.problems),
        tuple(message.added),
        tuple(message.replaced),
        tuple(message.removed),
        tuple(message.needs_restart),
    )


def _set_time(field: Timestamp, time: datetime | None) -> None:
    if time is not None:
        field.FromDatetime(time)


def _time(message: Timestamp) -> datetime:
    return message.ToDatetime(tzinfo=UTC)
