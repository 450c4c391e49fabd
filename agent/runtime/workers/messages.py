"""Messages between the agent and a worker, as bytes: a name with arguments, and the channel that carries them.

A message is one of ``experts.children``. A JSON list is a tuple; an object, {name: arguments}, is what
the constructor of that name makes of them. Only the types named here are made: no message can name code to run.

Guarantees: ``decode(encode(name, *arguments)) == (name, arguments)``, lists as tuples. ValueError for bytes that are no
message of this version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agent.core import effects, events, performance, request
from agent.runtime.executor import ExecutorStatistics
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.images.sources import EncodedImage
from agent.runtime.machine.box import Box, MemorySize
from agent.runtime.measuring.probe import Probed
from agent.runtime.weights.slots import SlotStatistics
from agent.runtime.weights.transfer import TransferStatistics
from agent.runtime.worker import WorkerStatistics
from agent.runtime.workers.files import PackedFile
from experts import expert as nouns
from experts.children.messages import packed, unpacked
from experts.llm.tiers.moe_experts import MoeStatistics
from experts.packed.weights import Blocks, PackedExpert, Segment, TensorSpec

BYTES, ARRAY = "bytes", "array"


def _array(dtype: str, shape: tuple[int, ...], content: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(content), dtype).reshape(shape)  # writable


TYPES: dict[str, Any] = {ARRAY: _array, "Path": Path, "dict": dict, "frozenset": frozenset} | {
    each.__name__: each
    for each in (
        effects.Prepare, effects.StartLoad, events.BatchFailed, events.Finished, events.Loaded, events.LoadFailed,
        request.Batch, request.Portion, nouns.Rejected, performance.ExecutorSpec, performance.PoolSpec,
        performance.Limits, performance.ExpertProfile, performance.Footprint, performance.SharedTensors,
        performance.Performance, performance.PreparedForm, performance.PerformanceMatrix, EncodedImage, ExpertCopy,
        PackedExpert, Segment, TensorSpec, Blocks, Box, MemorySize, Probed, WorkerStatistics, TransferStatistics,
        SlotStatistics, ExecutorStatistics, MoeStatistics, PackedFile, nouns.Expert, nouns.InputSpec,
        nouns.Normalization, nouns.Prediction, nouns.BoundingBox, nouns.LabelScore, nouns.Anomaly, nouns.AnomalyMap,
        nouns.Precision, nouns.Task, nouns.Fit, nouns.Orientation, nouns.Padding,
    )
}  # fmt: skip
FIELDS = {each: tuple(field.name for field in fields(each)) for each in TYPES.values() if is_dataclass(each)}


class WorkerChannel(Protocol):
    """Bytes to and from one worker, in order. ``receive`` waits; None once the other end is gone."""

    def send(self, *messages: bytes) -> None:
        """Send messages, from any thread. Raises OSError once the other end is gone."""

    def receive(self) -> bytes | None: ...

    def kill(self) -> None:
        """End the worker at once, whatever it does."""

    def close(self) -> None:
        """Release this end, after the other is gone."""


def encode(name: str, *arguments: object) -> bytes:
    """Raises TypeError for a record that is not named here."""
    contents: list[bytes] = []
    plain = [name, *(_plain(each, contents) for each in arguments)]
    return packed(plain, *contents)


def decode(content: bytes) -> tuple[str, tuple[Any, ...]]:
    """Name and arguments. Raises ValueError for bytes of another version, or that are no message."""
    (name, *plain), contents = unpacked(content)
    try:
        return name, _made(plain, contents)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no message of a worker: {error!r}") from error


def _plain(value: Any, contents: list[bytes]) -> Any:  # noqa: ANN401 - a JSON value
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, tuple | list) and TYPES.get(type(value).__name__) is not type(value):
        return [_plain(each, contents) for each in value]
    if isinstance(value, bytes):
        contents.append(value)
        return {BYTES: len(contents) - 1}
    name, arguments = _taken_apart(value)
    return {name: [_plain(each, contents) for each in arguments]}


def _taken_apart(value: Any) -> tuple[str, Iterable[object]]:  # noqa: ANN401 - any type that crosses
    """Name of a type, and the arguments that make an equal value."""
    if isinstance(value, np.ndarray):
        return ARRAY, (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, Mapping):
        return "dict", (tuple(value.items()),)
    if isinstance(value, frozenset | set):
        return "frozenset", (sorted(value),)
    if isinstance(value, Path):
        return "Path", (str(value),)
    name = type(value).__name__
    if TYPES.get(name) is not type(value):
        raise TypeError(f"{name} crosses to no worker")
    if isinstance(value, Enum):
        return name, (value.value,)
    return name, value if isinstance(value, tuple) else [getattr(value, each) for each in FIELDS[type(value)]]


def _made(plain: Any, contents: list[bytes]) -> Any:  # noqa: ANN401 - what was encoded
    if isinstance(plain, list):
        return tuple(_made(each, contents) for each in plain)
    if not isinstance(plain, dict):
        return plain
    ((name, arguments),) = plain.items()
    return contents[arguments] if name == BYTES else TYPES[name](*_made(arguments, contents))
