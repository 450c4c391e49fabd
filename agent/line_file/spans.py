"""Positions of keys and values in a YAML text, to the character, by the parser of line files.

A value ends with its last character, before comments and blank lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass(frozen=True, slots=True)
class YamlSpan:
    """One value: text[start:end]. ``flow``: in brackets or braces, or a scalar; else a block. A mapping has ``pairs``,
    a sequence ``items``, an alias its anchor's name."""

    start: int
    end: int
    flow: bool = True
    text: str | None = None  # of a scalar, as YAML reads it
    alias: str | None = None
    pairs: tuple[tuple[YamlSpan, YamlSpan], ...] | None = None
    items: tuple[YamlSpan, ...] | None = None

    @property
    def is_empty(self) -> bool:
        return self.start == self.end

    def child(self, key: str | int) -> tuple[YamlSpan, YamlSpan] | None:
        """The key and the value of this name, or the item of this number (as its own key); None if missing."""
        if self.pairs is not None:
            return next((pair for pair in self.pairs if pair[0].text == key), None)
        if self.items is not None and isinstance(key, int) and 0 <= key < len(self.items):
            return self.items[key], self.items[key]
        return None


def spans_of(text: str) -> YamlSpan | None:
    """The root of a text without byte order mark; None for an empty text. Raises yaml.YAMLError."""
    events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            return _span(next(events), events, text)
    return None


def _span(event: Any, events: Iterator[Any], text: str) -> YamlSpan:  # noqa: ANN401  # PyYAML's events have no common type
    start, end = event.start_mark.index, _end(event)
    if isinstance(event, yaml.AliasEvent):
        return YamlSpan(start, end, alias=event.anchor)
    if isinstance(event, yaml.ScalarEvent):
        return YamlSpan(
            start, max(start, len(text[:end].rstrip())), flow=event.style not in {"|", ">"}, text=event.value
        )
    flow = bool(event.flow_style)
    inside: list[YamlSpan] = []
    while not isinstance(inner := next(events), yaml.CollectionEndEvent):
        inside.append(_span(inner, events, text))
    if isinstance(event, yaml.SequenceStartEvent):
        return _around(YamlSpan(start, _end(inner), flow, items=tuple(inside)), inside)
    pairs = tuple(zip(inside[::2], inside[1::2], strict=True))
    return _around(YamlSpan(start, _end(inner), flow, pairs=pairs), inside)


def _end(event: Any) -> int:  # noqa: ANN401  # as above
    return int(event.end_mark.index)


def _around(span: YamlSpan, inside: list[YamlSpan]) -> YamlSpan:
    return span if span.flow else replace(span, end=inside[-1].end if inside else span.start)
