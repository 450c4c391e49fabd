"""Process that reads trainers' files, see ``reading``: arguments are the kind of reading, and its limits.

Each message names a file and a destination. ``weights``: writes the file's weights there, and answers with its facts.
``state``: writes its training state (see ``training_states``), with its arguments in the metadata.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from experts.checkpoints.archive import opened, write_weights
from experts.checkpoints.selection import select
from experts.checkpoints.trainer_facts import collected_facts
from experts.checkpoints.training_states import training_state
from experts.children.child import parent
from experts.children.limits import ResourceLimits, answer
from experts.children.messages import unpacked
from experts.errors import WeightsCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHTS, STATE = "weights", "state"
MEMORY_BYTES = 2_000_000_000  # beyond the size of the mapped file
TOO_LARGE = f"takes over {MEMORY_BYTES / 1e9:.0f} GB of memory to read: no weights do"


def main(kind: str, *limits: str) -> None:
    gc.disable()  # objects live until the next file; collecting takes as long as reading
    agent, work = parent(), {WEIGHTS: convert, STATE: convert_state}[kind]
    assert agent is not None, "a child"
    ResourceLimits(*map(int, limits)).keep()
    while (message := agent.receive()) is not None:
        source, destination = map(Path, unpacked(message)[0])
        answer(agent, partial(_done, work, source, destination), too_large=TOO_LARGE)
        gc.collect()


def _done(work: Callable[[Path, Path], object], source: Path, destination: Path) -> object:
    try:
        return work(source, destination)
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
        found: dict[str, object] = {"where": selection.where, "said": selection.said, "facts": asdict(facts)}
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


if __name__ == "__main__":
    main(*sys.argv[1:])
