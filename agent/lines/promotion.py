"""Promotion: an expert and the version in its shadow change places, in the line file or in the state of its line.

Guarantees: the line file is written whole, and only if the line that it describes is valid. A promotion that is in the
line's state moves into the file: the same versions serve.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agent.config import line_of
from agent.faults.errors import OrderRefused, Reason
from agent.line_file.editing import edit_file, remove, set_key
from agent.line_file.promotions import STAYING, keeping_promotions, kept_promotions, promotion_of
from experts.document import parse_document, read_document, suggestion
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from agent.config import LineConfig
    from agent.line_file.promotions import Promotion


def promote(file: Path, expert: str) -> tuple[str, tuple[str, ...]]:
    """Swap the entries of an expert and its shadow in a line file: the next reload serves the other version. Returns
    the shadow and the keys that differed. Raises ConfigError; then the file is unchanged."""
    document = read_document(file.absolute())
    config = line_of(document, promotions=())
    shadow = shadow_of(config, expert)
    entries = document.root.value["experts"]
    if expert not in entries or shadow not in entries:
        raise ConfigError(
            f"{file}: {expert} and {shadow} are not both in this file - promote in the file that has them"
        )
    keys = differing_keys(entries, expert, shadow)

    def swapped(text: str) -> str:
        for key in keys:
            text = _with(text, expert, key, entries[shadow], file)
            text = _with(text, shadow, key, entries[expert], file)
        line_of(parse_document(file.absolute(), text.encode()), promotions=())
        return text

    edit_file(file, swapped)
    _forget(config.state, expert)
    return shadow, keys


def discard(file: Path, expert: str) -> bool:
    """Forget an expert's promotion in the line's state: the line file's entries serve. False if there is none."""
    return _forget(line_of(read_document(file.absolute()), promotions=()).state, expert)


def _forget(state: Path, expert: str) -> bool:
    kept = kept_promotions(state)
    others = [each for each in kept if each.expert != expert]
    if len(others) < len(kept):
        with keeping_promotions(state, others):
            pass
    return len(others) < len(kept)


def promotions_serving(
    config: LineConfig, model_of: Callable[[str], str], expert: str, sha256: str, who: str
) -> tuple[Promotion, ...] | None:
    """Promotions with which a served line has the weights ``sha256`` at an expert's place; None: it has them.

    ``model_of``: sha256 of an expert's weights, by its name in the line. Raises OrderRefused for other weights.
    """
    try:
        shadow = shadow_of(config, expert)
    except ConfigError as error:
        raise OrderRefused(Reason.NOT_FOUND, str(error), field="expert") from error
    if sha256 == model_of(expert):
        return None
    if sha256 != model_of(shadow):
        known = f"{expert} serves {model_of(expert)}, and its shadow {shadow} has {model_of(shadow)}"
        raise OrderRefused(Reason.INVALID, f"no version has the weights {sha256}: {known}", field="sha256")
    others = tuple(each for each in config.promotions if each.expert != expert)
    if len(others) < len(config.promotions):
        return others  # back to the line file's own
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return (*others, promotion_of(config.document, expert, shadow, who, at))


def shadow_of(config: LineConfig, expert: str) -> str:
    if expert not in config.catalog.experts:
        raise ConfigError(f"no expert {expert!r} - {suggestion(expert, config.catalog.experts)}")
    shadow = config.catalog.graph.shadows.get(expert)
    if shadow is None:
        remedy = "name one as `shadow:` of its entry; `experts compare` takes --over and --weights instead"
        raise ConfigError(f"{expert} has no shadow - {remedy}")
    return shadow


def differing_keys(entries: Mapping[str, Any], expert: str, shadow: str) -> tuple[str, ...]:
    one, other = entries[expert], entries[shadow]
    named = [key for key in dict.fromkeys([*one, *other]) if key not in STAYING]
    return tuple(key for key in named if (key in one, one.get(key)) != (key in other, other.get(key)))


def _with(text: str, expert: str, key: str, entry: Mapping[str, Any], file: Path) -> str:
    path = ("experts", expert, key)
    if key in entry:
        return set_key(text, path, entry[key], file=file)
    return remove(text, path, file=file)
