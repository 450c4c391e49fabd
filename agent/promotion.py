"""Promotion: an expert and the version in its shadow change places in the line file.

Guarantees: the file is written whole, and only if the line that it describes is valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.config import line_of
from agent.line_file.editing import edit_file, remove, set_key
from experts.document import parse_document, read_document, suggestion
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agent.config import LineConfig

STAYING = frozenset({"shadow", "pin"})  # keys of the place on the line, not of the version


def promote(file: Path, expert: str) -> tuple[str, tuple[str, ...]]:
    """Swap the entries of an expert and its shadow in a line file: the next reload serves the other version. Returns
    the shadow and the keys that differed. Raises ConfigError; then the file is unchanged."""
    document = read_document(file.absolute())
    shadow = shadow_of(line_of(document), expert)
    entries = document.root.value["experts"]
    if expert not in entries or shadow not in entries:
        raise ConfigError(
            f"{file}: {expert} and {shadow} are not both in this file - promote in the file that has them"
        )
    keys = _differing_keys(entries[expert], entries[shadow])

    def swapped(text: str) -> str:
        for key in keys:
            text = _with(text, expert, key, entries[shadow], file)
            text = _with(text, shadow, key, entries[expert], file)
        line_of(parse_document(file.absolute(), text.encode()))
        return text

    edit_file(file, swapped)
    return shadow, keys


def shadow_of(config: LineConfig, expert: str) -> str:
    if expert not in config.catalog.experts:
        raise ConfigError(f"no expert {expert!r} - {suggestion(expert, config.catalog.experts)}")
    shadow = config.catalog.graph.shadows.get(expert)
    if shadow is None:
        remedy = "name one as `shadow:` of its entry; `experts compare` takes --over and --weights instead"
        raise ConfigError(f"{expert} has no shadow - {remedy}")
    return shadow


def _differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    named = [key for key in dict.fromkeys([*one, *other]) if key not in STAYING]
    return tuple(key for key in named if (key in one, one.get(key)) != (key in other, other.get(key)))


def _with(text: str, expert: str, key: str, entry: Mapping[str, Any], file: Path) -> str:
    path = ("experts", expert, key)
    if key in entry:
        return set_key(text, path, entry[key], file=file)
    return remove(text, path, file=file)
