"""How a model's directory says that a text becomes one vector: sentence-transformers' files, else the usual way.

Guarantees: a recipe that is not served is refused by its file, never replaced by another one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experts.errors import TokenizerUnusable
from experts.llm.files.config import MODULES, POOLING

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = ("Transformer", "Pooling", "Normalize")  # the last one may be missing
MODE = "pooling_mode_"
SERVED = {"mean_tokens": True, "mean": True, "lasttoken": False}  # the second is an older spelling


@dataclass(frozen=True, slots=True)
class Pooling:
    """``is_mean``: of all tokens' states, else the last token's. ``is_normalised``: to length 1."""

    is_mean: bool
    is_normalised: bool

    def __str__(self) -> str:
        return ("mean of all tokens" if self.is_mean else "last token") + ", normalised" * self.is_normalised


def pooling_of(files: Mapping[str, bytes], expert: str) -> Pooling:
    """Pooling by a directory's files; without modules.json the last token's state, normalised.

    Raises TokenizerUnusable for a recipe that is not served.
    """
    if MODULES not in files:
        return Pooling(is_mean=False, is_normalised=True)
    modules = _read(files, MODULES, expert)
    kinds = tuple(str(module["type"]).rpartition(".")[2] for module in modules)
    if kinds not in (KINDS, KINDS[:2]) or f"{modules[1]['path']}/config.json" != POOLING:
        raise TokenizerUnusable(expert, MODULES, f"has {', '.join(kinds)}: served is {', '.join(KINDS)}, of {POOLING}")
    settings = _read(files, POOLING, expert)
    modes = [name.removeprefix(MODE) for name, value in settings.items() if name.startswith(MODE) and value is True]
    modes = modes or [str(settings.get("pooling_mode"))]
    if len(modes) != 1 or modes[0] not in SERVED:
        raise TokenizerUnusable(expert, POOLING, f"pools by {', '.join(modes)}: served is {' or '.join(SERVED)}")
    return Pooling(SERVED[modes[0]], kinds == KINDS)


def _read(files: Mapping[str, bytes], name: str, expert: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(files[name])
    except (KeyError, ValueError) as error:
        raise TokenizerUnusable(expert, name, f"cannot be read: {error}") from error
