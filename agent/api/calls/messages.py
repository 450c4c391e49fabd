"""Conversion between the desk's values and messages of coserve.v1.

Guarantees: conversion to a message and back is the identity; a field has one name in both. Text that is not Unicode,
such as a file's name in another encoding, is sent with these bytes escaped. An invalid value of an order is refused
with its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from agent.api.calls.desk import (
    AnomalyView,
    BoardView,
    ImageOrder,
    PoolView,
    QueueView,
    ReloadView,
    ShadowsView,
    StatusView,
    TextEnd,
    TextOrder,
    TextPiece,
    TextsView,
    TokenView,
    VerdictView,
)  # fmt: skip
from agent.api.calls.orders import invalid
from agent.api.proto import inspection_pb2 as pb
from agent.subject import CALLER_PREFIX, CALLERS, SourceStatus, Subject
from experts.errors import GenerationInvalid, OrderRefused, Refusing
from experts.expert import BoundingBox, LabelScore, Verdict
from experts.llm.serving.generation import Ending, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from google.protobuf.descriptor import Descriptor
    from numpy.typing import NDArray

    from agent.api.calls.desk import TextEvent

VERDICTS = {Verdict.UNKNOWN: pb.VERDICT_UNKNOWN, Verdict.OK: pb.VERDICT_OK, Verdict.NG: pb.VERDICT_NG}
VERDICT_OF: Mapping[Any, Verdict] = {number: verdict for verdict, number in VERDICTS.items()}
ENDINGS = {Ending.STOP: pb.ENDING_STOP, Ending.LENGTH: pb.ENDING_LENGTH, Ending.DEADLINE: pb.ENDING_DEADLINE}
ENDING_OF = {number: ending for ending, number in ENDINGS.items()}
OF_SUBJECT = ("key", "expert", "board", "board_type", "ref", "arrived_at")
PROMPTS = ("prompt", "prompt_tokens", "messages")

Kind = TypeVar("Kind", bound=Message)


def text(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode("utf-8")


def order_of(request: pb.InspectRequest) -> ImageOrder:
    """Order of a request. Raises OrderRefused for a contradiction."""
    if request.component and request.expert:
        raise OrderRefused(Refusing.INVALID, "component and expert are both set - name what judges the image once")
    about = {name: getattr(request, name) or None for name in ("component", "expert", "board", "board_type", "ref")}
    subject = Subject(request.key, CALLERS, request.key, datetime.now(UTC).astimezone(), **about)
    return ImageOrder(subject, _image_of(request), is_kept=not request.is_question, wants_maps=request.wants_maps)


def _image_of(request: pb.InspectRequest) -> bytes | NDArray[np.uint8]:
    kind = request.WhichOneof("image")
    if kind == "pixels":
        return pixels(request.pixels.height, request.pixels.width, request.pixels.rgb)
    if kind == "file" and request.file:
        return request.file
    raise OrderRefused(Refusing.INVALID, "no image - set file (an encoded image file) or pixels")


def pixels(height: int, width: int, rgb: bytes) -> NDArray[np.uint8]:
    """Pixels from their bytes. Raises OrderRefused for another number of bytes."""
    if height < 1 or width < 1 or height * width * 3 != len(rgb):
        raise OrderRefused(
            Refusing.INVALID, f"an image of {height} x {width} pixels has 3 bytes each, and here are {len(rgb)}"
        )
    return np.frombuffer(rgb, np.uint8).reshape(height, width, 3)


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


def text_order_of(request: pb.GenerateRequest) -> TextOrder:
    """Order of a request. Raises OrderRefused."""
    prompts = [field.name for field, _ in request.ListFields() if field.name in PROMPTS]
    if len(prompts) > 1:
        raise invalid(prompts[1], f"{' and '.join(prompts)} are given - send one of them")
    values = _values(request)
    tokens = values["prompt_tokens"]
    return TextOrder(
        model=request.model,
        prompt=None if "messages" in prompts else values["prompt"] if tokens is None else tokens,
        messages=values["messages"],
        most_tokens=values["max_tokens"],
        sampling=values["sampling"] or Sampling(),
        stop=values["stop"],
        deadline_s=values["deadline_s"],
        given=frozenset(field.name for field, _ in request.sampling.ListFields()),
    )


def text_request(order: TextOrder) -> pb.GenerateRequest:
    usual, chosen = Sampling(), {name: getattr(order.sampling, name) for name in Sampling.__slots__}
    sampling = {name: value for name, value in chosen.items() if value != getattr(usual, name) or name in order.given}
    prompt: dict[str, Any] = {"prompt": order.prompt}
    if isinstance(order.prompt, tuple):
        prompt = {"prompt_tokens": {"ids": order.prompt}}
    return pb.GenerateRequest(
        model=order.model,
        messages=[pb.ChatMessage(**message) for message in order.messages],
        max_tokens=order.most_tokens,
        sampling=pb.SamplingSettings(**sampling),
        stop=order.stop,
        deadline_s=order.deadline_s,
        **prompt,
    )


def text_reply(event: TextEvent) -> pb.GenerateReply:
    """Message of a piece or of the end."""
    if isinstance(event, TextPiece):
        return pb.GenerateReply(piece=_message(pb.TextPiece, event))
    ending = pb.ENDING_UNKNOWN if event.ending is None else ENDINGS[event.ending]
    return pb.GenerateReply(end=_message(pb.TextEnd, event, ending=ending))


def text_event_of(reply: pb.GenerateReply) -> TextEvent:
    if reply.HasField("piece"):
        return TextPiece(**_values(reply.piece))
    return TextEnd(**_values(reply.end) | {"ending": ENDING_OF.get(reply.end.ending)})


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


def _sampling(**settings: Any) -> Sampling:  # noqa: ANN401  # a message's fields
    try:
        return Sampling(**{name: value for name, value in settings.items() if value is not None})
    except GenerationInvalid as error:
        raise OrderRefused(Refusing.INVALID, str(error), field=error.field) from error


def _chat_message(role: str, content: str, name: str) -> dict[str, str]:
    return {"role": role, "content": content} | ({"name": name} if name else {})


def _counts(counts: Mapping[Verdict, int]) -> dict[str, int]:
    return {verdict.lower(): counts.get(verdict, 0) for verdict in Verdict}


NOUNS: dict[str, Callable[..., object]] = {
    "Anomaly": lambda map, **values: AnomalyView(map_png=map, **values),
    "BoundingBox": BoundingBox,
    "LabelScore": LabelScore,
    "Queue": QueueView,
    "Pool": PoolView,
    "Source": SourceStatus,
    "TextCounts": TextsView,
    "ShadowCounts": ShadowsView,
    "Token": TokenView,
    "Tokens": lambda ids: ids,
    "ChatMessage": _chat_message,
    "SamplingSettings": _sampling,
}
