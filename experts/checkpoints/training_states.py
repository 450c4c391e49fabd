"""Training state of one rank, as DeepSpeed writes it: tensors in dictionaries below `module`, and arguments.

Guarantees: each tensor is named by its keys, joined with dots, and names are unique. Of other entries only plain values
are kept, within limits of count and size. Optimizers and other objects of the trainer are ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from experts.checkpoints.tensors import CheckpointTensor
from experts.checkpoints.unpickler import PickledObject
from experts.errors import WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FURTHER_VALUES = ("checkpoint_version", "num_experts")  # beside the arguments
DEPTH_MAXIMUM = 16  # of dictionaries; Megatron's have four
ENTRIES_MAXIMUM = 200_000  # of one file
VALUES_MAXIMUM, TEXT_MAXIMUM = 10_000, 10_000  # in a list, and characters of a text
LARGEST_NUMBER = 1 << 63

_Found: TypeAlias = "tuple[tuple[str, ...], object]"  # path of keys, value
Plain: TypeAlias = "str | int | float | bool | list[Plain]"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors of a state. ``arguments``: arguments of the training that are plain values, by name."""

    weights: Mapping[str, CheckpointTensor]
    arguments: Mapping[str, Plain]


def training_state(source: str, document: object) -> TrainingState:
    """Tensors and arguments of a saved state. Raises WeightsRefused for another type, and for too many entries."""
    if not isinstance(document, dict):
        what = document.kind if isinstance(document, PickledObject) else type(document).__name__
        raise WeightsRefused(source, f"it is a {what} instead of a dictionary")
    weights: dict[str, CheckpointTensor] = {}
    for name, tensor in _tensors(source, document.get("module", document)):
        if name in weights:
            raise WeightsRefused(source, f"has two tensors named {name:.80}")
        weights[name] = tensor
    return TrainingState(weights, _arguments(document))


def _tensors(source: str, module: object) -> Iterator[tuple[str, CheckpointTensor]]:
    """Tensors in the order of the dictionaries, within limits of depth and count."""
    waiting: list[_Found] = [((), module)]
    looked_at = 0
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, CheckpointTensor):
            yield ".".join(path), value
            continue
        below: list[_Found] = [((*path, _shown(key)), each) for key, each in _items(value)]
        looked_at += len(below)
        if looked_at > ENTRIES_MAXIMUM or (below and len(path) == DEPTH_MAXIMUM):
            raise WeightsRefused(source, f"has over {ENTRIES_MAXIMUM} entries, or over {DEPTH_MAXIMUM} levels of them")
        waiting += reversed(below)


def _items(value: object) -> Iterator[tuple[object, object]]:
    """Entries of a dictionary, or of an inert dictionary; none of other values."""
    entries = value.entries if isinstance(value, PickledObject) else value
    return iter(entries.items() if isinstance(entries, dict) else ())


def _shown(key: object) -> str:
    return str(key) if isinstance(key, str | int) else type(key).__name__


def _arguments(document: Mapping[object, object]) -> dict[str, Plain]:
    known = [(name, document.get(name)) for name in FURTHER_VALUES]
    args = document.get("args")
    state = args.state if isinstance(args, PickledObject) else args
    plain = ((name, _plain(value)) for name, value in (*known, *_items(state)))
    return {name: value for name, value in plain if value is not None and isinstance(name, str)}


def _plain(value: object, depth: int = 0) -> Plain | None:
    """The value if JSON can represent it and it is small enough for an argument; else None."""
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < LARGEST_NUMBER):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= TEXT_MAXIMUM else None
    if not isinstance(value, list | tuple) or len(value) > VALUES_MAXIMUM or depth:
        return None
    found = [_plain(one, depth + 1) for one in value]
    return None if any(one is None for one in found) else [one for one in found if one is not None]
