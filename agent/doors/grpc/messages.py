"""Conversion between the desk's values and messages of coserve.v1.

Guarantees: conversion to a message and back is the identity; a field has one name in both. Text that is not Unicode,
such as a file's name in another encoding, is sent with these bytes escaped. An invalid value of an order is refused
with its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.unknown_fields import UnknownFieldSet

from agent.doors.desk import (
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
from agent.doors.orders import pixels
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.refusals import text
from agent.faults.errors import OrderRefused, Reason
from agent.subject import CALLER_PREFIX, CALLERS, SourceStatus, Subject
from experts.expert import BoundingBox, LabelScore, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy as np
    from google.protobuf.descriptor import Descriptor
    from numpy.typing import NDArray

VERDICTS = {Verdict.UNKNOWN: pb.VERDICT_UNKNOWN, Verdict.OK: pb.VERDICT_OK, Verdict.NG: pb.VERDICT_NG}
VERDICT_OF: Mapping[Any, Verdict] = {number: verdict for verdict, number in VERDICTS.items()}
OF_SUBJECT = ("key", "expert", "board", "board_type", "ref", "arrived_at")

Kind = TypeVar("Kind", bound=Message)


def order_of(request: pb.InspectRequest) -> ImageOrder:
    """Order of a request. Raises OrderRefused for a contradiction."""
    if request.component and request.expert:
        raise OrderRefused(Reason.INVALID, "component and expert are both set - name what judges the image once")
    if len(unknown := UnknownFieldSet(request)):
        reason = f"field {unknown[0].field_number} is not known here - the caller's protocol is newer than this agent"
        raise OrderRefused(Reason.INVALID, reason)
    named = [name for name in ("board", "board_type", "ref", "key") if getattr(request, name)]
    if request.is_question and {*named} & {"board", "ref", "key"}:
        raise OrderRefused(Reason.INVALID, f"{', '.join(named)} in a question - only an inspection has them")
    if request.ref and not request.board:
        raise OrderRefused(Reason.INVALID, "ref without a board: it would count on none - send the board's serial")
    about = {name: getattr(request, name) or None for name in ("component", "expert", "board", "board_type", "ref")}
    subject = Subject(request.key, CALLERS, request.key, datetime.now(UTC).astimezone(), **about)
    return ImageOrder(subject, _image_of(request), is_kept=not request.is_question, wants_maps=request.wants_maps)


def _image_of(request: pb.InspectRequest) -> bytes | NDArray[np.uint8]:
    kind = request.WhichOneof("image")
    if kind == "pixels":
        return pixels(request.pixels.height, request.pixels.width, request.pixels.rgb)
    if kind == "file" and request.file:
        return request.file
    raise OrderRefused(Reason.INVALID, "no image - set file (an encoded image file) or pixels")


def part_message(part: VerdictView) -> pb.Part:
    anomalies = [_message(pb.Anomaly, each, map=each.map_png) for each in part.anomalies]
    key = text(part.subject.key.removeprefix(CALLER_PREFIX))
    return _message(pb.Part, part, part.subject, key=key, verdict=VERDICTS[part.verdict], anomalies=anomalies)


def part_of(message: pb.Part) -> VerdictView:
    values = _values(message)
    about = {name: values.pop(name) for name in OF_SUBJECT} | {"component": values.pop("component") or None}
    verdict = VERDICT_OF.get(values.pop("verdict"), Verdict.UNKNOWN)
    return VerdictView(Subject(source="", image=message.key, **about), verdict, **values)


def board_message(board: BoardView) -> pb.Board:
    is_open, verdict = board.verdict is None, VERDICTS[board.verdict or Verdict.UNKNOWN]
    parts = [part_message(part) for part in board.parts]
    return _message(pb.Board, board, is_open=is_open, verdict=verdict, parts=parts, **_counts(board.counts))


def status_message(status: StatusView) -> pb.StatusReply:
    return _message(pb.StatusReply, status, **_counts(status.verdicts))


def status_of(message: pb.StatusReply) -> StatusView:
    values = _values(message)
    counts = {verdict: values.pop(verdict.lower()) for verdict in Verdict}
    return StatusView(verdicts=counts, **values)


def reload_message(reload: ReloadView) -> pb.ReloadReply:
    return _message(pb.ReloadReply, reload)


def _message(kind: type[Kind], *views: object, **ours: object) -> Kind:
    """Message of fields with equal names in the view; ``ours``: further fields."""
    values: dict[str, Any] = {}
    for view in views:
        values |= _fields(view, kind.DESCRIPTOR, ours.keys())  # type: ignore[arg-type]  # upb's has a type of its own
    return kind(**values, **ours)


def _fields(view: object, kind: Descriptor, but: Collection[str] = ()) -> dict[str, Any]:
    return {
        field.name: _field(getattr(view, field.name), field.message_type)
        for field in kind.fields
        if field.name not in but and hasattr(view, field.name)
    }


def _field(value: object, kind: Descriptor | None) -> object:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(key): _field(each, None) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_field(each, kind) for each in value]
    return value if kind is None or value is None or isinstance(value, datetime) else _fields(value, kind)


def _values(message: Message) -> dict[str, Any]:
    """Fields by name; None for an unset optional field."""
    return {
        field.name: _noun(getattr(message, field.name))
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
    }


def _noun(value: Any) -> Any:  # noqa: ANN401  # a field of any message
    if isinstance(value, Timestamp):
        return value.ToDatetime(tzinfo=UTC)
    if isinstance(value, Message):
        return NOUNS[value.DESCRIPTOR.name](**_values(value))
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | bytes | int | float) else tuple(_noun(each) for each in value)


def _counts(counts: Mapping[Verdict, int]) -> dict[str, int]:
    return {verdict.lower(): counts.get(verdict, 0) for verdict in Verdict}


NOUNS: dict[str, Callable[..., object]] = {
    "Anomaly": lambda map, **values: AnomalyView(map_png=map, **values),
    "BoundingBox": BoundingBox,
    "LabelScore": LabelScore.of,
    "Queue": QueueView,
    "Pool": PoolView,
    "Source": SourceStatus,
    "TextCounts": TextsView,
    "ShadowCounts": ShadowsView,
}
