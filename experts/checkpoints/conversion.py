"""Functions that a process with limits runs on trainers' files (``reading``): each reads one, and writes another."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from experts.checkpoints.archive import opened, write_weights
from experts.checkpoints.selection import select
from experts.checkpoints.trainer_facts import collected_facts
from experts.checkpoints.training_states import training_state
from experts.errors import WeightsCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def read_apart(convert: Callable[[Path, Path], object], source: Path, destination: Path) -> object:
    gc.disable()  # objects live until the process ends; collecting takes as long as reading
    try:
        return convert(source, destination)
    except UnicodeEncodeError as error:  # a lone surrogate, which a pickle may contain
        raise WeightsCorrupt(str(source), "has a name or a label that is no Unicode text") from error


def _text(value: object) -> str:
    """JSON. Raises UnicodeEncodeError for what no file can hold."""
    text = json.dumps(value, ensure_ascii=False)
    text.encode()
    return text


def convert(source: Path, destination: Path) -> dict[str, object]:
    """Write the weights, and return their facts. Raises WeightsRefused, WeightsCorrupt, OSError."""
    with opened(source) as checkpoint:
        selection = select(checkpoint.source, checkpoint.document)
        facts = collected_facts(checkpoint.document, selection)
        labels = {} if facts.labels is None else {"labels": json.dumps(facts.labels)}
        found: dict[str, object] = {"where": selection.where, "remarks": selection.remarks, "facts": asdict(facts)}
        _text(found)
        with destination.open("wb") as file:
            write_weights(file, selection.weights, checkpoint, labels)
        return found


def convert_state(source: Path, destination: Path) -> None:
    """Write one file's training state. Raises WeightsRefused, WeightsCorrupt, OSError."""
    with opened(source) as checkpoint:
        state = training_state(checkpoint.source, checkpoint.document)
        with destination.open("wb") as file:
            write_weights(file, state.weights, checkpoint, {"args": _text(state.arguments)})
