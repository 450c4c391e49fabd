"""Documents of `/api` as its contract allows them: any value, null where it may be, hostile texts."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum

from agent.service.station import served

WORDS = ("", "OK", "x", "<b>&\"'</b>", "\u202eabc", "cls/a b", "ä" * 40, "a" * 300, "%2e%2e/..", "null")
NUMBERS = {int: (0, 1, 2, 7, 59, 10**12), float: (0.004, 0.5, 1.0, 59.9, 1e9)}
KINDS = [(re.compile(re.sub(r"{\w+}", r"[^/]+", each.path)), each.answer) for each in (served.STATE, *served.READS)]


def document_of(path, pick):
    """What the operation of this path may answer; None without one. ``pick``: a random.Random."""
    kind = next((kind for template, kind in KINDS if template.fullmatch(path.partition("?")[0])), None)
    return None if kind is None else made(kind, pick)


def made(kind, pick):
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is typing.Any:
        return pick.choice((None, 1, "text"))
    if origin is typing.Literal:
        return pick.choice(parts)
    if origin in (typing.Union, types.UnionType):
        return made(pick.choice(parts), pick)
    if origin is tuple:
        kinds = parts if parts[-1] is not Ellipsis else parts[:1] * pick.choice((0, 1, 3))
        return [made(each, pick) for each in kinds]
    if origin is list:
        return [made(parts[0], pick) for _ in range(pick.choice((0, 1, 3)))]
    if origin in (dict, Mapping):
        return {made(parts[0], pick): made(parts[1], pick) for _ in range(pick.choice((0, 1, 3)))}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {each.name: made(hints[each.name], pick) for each in dataclasses.fields(kind)}
    return _plain(kind, pick)


def _plain(kind, pick):
    if kind is type(None):
        return None
    if issubclass(kind, Enum):
        return pick.choice(list(kind)).value
    if kind is bool:
        return pick.random() < 0.5
    if kind is datetime:
        return (datetime(2026, 11, 28, tzinfo=UTC) + timedelta(seconds=pick.randrange(-(10**6), 10**6))).isoformat()
    return pick.choice(WORDS if kind is str else NUMBERS[kind])
