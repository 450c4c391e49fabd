"""The desk's nouns as messages of coserve.v1, and back.

Guarantees: a noun comes out of its message as it went in. Text that is not Unicode, such as a file's name in another
encoding, is sent with these bytes escaped.
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
# fields that a view and its message have in common
OF_SOURCE = ("name", "kind", "state", "received", "waiting", "dropped", "alarm")
OF_PART = ("seconds", "queue_s", "compute_s", "is_repeat")
OF_STATUS = (
    "line", "version", "uptime_s", "is_draining", "requests_in_flight", "boards_open", "switches", "loads", "evictions",
    "bytes_read",
)  # fmt: skip
OF_RELOAD = ("problems", "added", "replaced", "removed", "needs_restart")
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
        **{name: getattr(part, name) for name in OF_PART},
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
            **given(message, "expert", "board", "board_type", "ref"),
        ),
        verdict=VERDICT_OF.get(message.verdict, Verdict.UNKNOWN),
        **given(message, "seq", "label", "score", "reason"),
        experts=tuple(message.experts),
        boxes=tuple(_box_of(box) for box in message.boxes),
        finished_at=_time(message.finished_at) if message.HasField("finished_at") else None,
        anomalies=tuple(_anomaly_of(each) for each in message.anomalies),
        **{name: getattr(message, name) for name in OF_PART},
        outputs=tuple(LabelScore(each.label, each.score, each.threshold) for each in message.outputs),
    )


def _anomaly_message(anomaly: AnomalyView) -> pb.Anomaly:
    return pb.Anomaly(
        expert=text(anomaly.expert), score=anomaly.score, threshold=anomaly.threshold, map=anomaly.map_png
    )


def _anomaly_of(message: pb.Anomaly) -> AnomalyView:
    return AnomalyView(message.expert, message.score, message.threshold, given(message, "map")["map"])


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
        ok=status.verdicts.get(Verdict.OK, 0),
        ng=status.verdicts.get(Verdict.NG, 0),
        unknown=status.verdicts.get(Verdict.UNKNOWN, 0),
        **{name: getattr(status, name) for name in OF_STATUS},
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
        **{name: getattr(message, name) for name in OF_STATUS},
        verdicts={Verdict.OK: message.ok, Verdict.NG: message.ng, Verdict.UNKNOWN: message.unknown},
        queues=tuple(QueueView(**_values(queue, "running")) for queue in message.queues),
        pools=tuple(PoolView(**_values(pool) | {"experts": tuple(pool.experts)}) for pool in message.pools),
        sources=tuple(SourceStatus(**_values(source, "alarm")) for source in message.sources),
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


def _values(message: Any, *optional: str) -> dict[str, Any]:  # noqa: ANN401  # protobuf's messages have no common type
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields} | given(message, *optional)


def given(message: Any, *names: str) -> dict[str, Any]:  # noqa: ANN401  # protobuf's messages have no common type
    """Values of optional fields; None where a field is not set."""
    return {name: getattr(message, name) if message.HasField(name) else None for name in names}


def reload_message(reload: ReloadView) -> pb.ReloadReply:
    lists = {name: [text(each) for each in getattr(reload, name)] for name in OF_RELOAD}
    return pb.ReloadReply(is_applied=reload.is_applied, **lists)


def reload_of(message: pb.ReloadReply) -> ReloadView:
    return ReloadView(message.is_applied, **{name: tuple(getattr(message, name)) for name in OF_RELOAD})


def _set_time(field: Timestamp, time: datetime | None) -> None:
    if time is not None:
        field.FromDatetime(time)


def _time(message: Timestamp) -> datetime:
    return message.ToDatetime(tzinfo=UTC)
