"""Messages between the agent and a worker, as bytes: a name with arguments, and the channel that carries them.

A message is a JSON text with one list of bytes behind it; records, tuples, sets and arrays are tagged. Only the record
types named here are made, from plain values: no message can name code to run.

Guarantees: ``decode(encode(name, *arguments)) == (name, arguments)``, lists as tuples. ValueError for bytes that are no
message of this version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import accumulate, pairwise
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
from experts.llm.tiers.moe_experts import MoeStatistics
from experts.packed.weights import Blocks, PackedExpert, Segment, TensorSpec

VERSION = 1
HEADER = struct.Struct("<HI")  # version, bytes of the JSON text
RECORDS: dict[str, Any] = {
    each.__name__: each
    for each in (
        effects.Prepare, effects.StartLoad, events.BatchFailed, events.Finished, events.Loaded, events.LoadFailed,
        request.Batch, request.Portion, request.Rejected, performance.ExecutorSpec, performance.PoolSpec,
        performance.Limits, performance.ExpertProfile, performance.Footprint, performance.SharedTensors,
        performance.Performance, performance.PreparedForm, performance.PerformanceMatrix, EncodedImage, ExpertCopy,
        PackedExpert, Segment, TensorSpec, Blocks, Box, MemorySize, Probed, WorkerStatistics, TransferStatistics,
        SlotStatistics, ExecutorStatistics, MoeStatistics, PackedFile, nouns.Expert, nouns.InputSpec,
        nouns.Normalization, nouns.Prediction, nouns.BoundingBox, nouns.LabelScore, nouns.Anomaly, nouns.AnomalyMap,
    )
}  # fmt: skip
FIELDS = {name: tuple(each.name for each in fields(record)) for name, record in RECORDS.items() if is_dataclass(record)}
ENUMS = {each.__name__: each for each in (nouns.Precision, nouns.Task, nouns.Fit, nouns.Orientation)}


class Channel(Protocol):
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
    text = json.dumps([plain, [len(content) for content in contents]], separators=(",", ":")).encode()
    return b"".join((HEADER.pack(VERSION, len(text)), text, *contents))


def decode(content: bytes) -> tuple[str, tuple[Any, ...]]:
    """Name and arguments. Raises ValueError for bytes of another version, or that are no message."""
    try:
        version, size = HEADER.unpack_from(content)
        if version != VERSION:
            raise ValueError(f"a message of version {version}, not {VERSION}: install the same version everywhere")
        plain, sizes = json.loads(content[HEADER.size : HEADER.size + size])
        ends = list(accumulate(sizes, initial=HEADER.size + size))
        if ends[-1] != len(content):
            raise ValueError(f"a message of {len(content)} bytes that says {ends[-1]}")
        contents = [content[start:end] for start, end in pairwise(ends)]
        return plain[0], tuple(_record(each, contents) for each in plain[1:])
    except (struct.error, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no message of a worker: {error!r}") from error


def _plain(value: Any, contents: list[bytes]) -> Any:  # noqa: ANN401 - a JSON value
    if isinstance(value, Enum):
        return {"$e": [type(value).__name__, value.value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        contents.append(value)
        return {"$b": len(contents) - 1}
    if isinstance(value, np.ndarray):
        contents.append(np.ascontiguousarray(value).tobytes())
        return {"$a": [value.dtype.str, list(value.shape), len(contents) - 1]}
    name = type(value).__name__
    if RECORDS.get(name) is type(value):
        listed = value if isinstance(value, tuple) else [getattr(value, each) for each in FIELDS[name]]
        return {"$r": [name, *(_plain(each, contents) for each in listed)]}
    if isinstance(value, tuple | list):
        return {"$t": [_plain(each, contents) for each in value]}
    if isinstance(value, frozenset | set):
        return {"$s": [_plain(each, contents) for each in sorted(value)]}
    if isinstance(value, Mapping):
        return {"$d": [[_plain(key, contents), _plain(each, contents)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {"$p": str(value)}
    raise TypeError(f"{name} crosses to no worker")


def _record(plain: Any, contents: list[bytes]) -> Any:  # noqa: ANN401 - what was encoded
    if not isinstance(plain, dict):
        return plain
    ((tag, value),) = plain.items()
    if tag == "$r":
        return RECORDS[value[0]](*(_record(each, contents) for each in value[1:]))
    if tag == "$t":
        return tuple(_record(each, contents) for each in value)
    if tag == "$d":
        return {_record(key, contents): _record(each, contents) for key, each in value}
    if tag == "$b":
        return contents[value]
    if tag == "$e":
        return ENUMS[value[0]](value[1])
    if tag == "$s":
        return frozenset(_record(each, contents) for each in value)
    if tag == "$a":
        return np.frombuffer(bytearray(contents[value[2]]), dtype=value[0]).reshape(value[1])
    if tag == "$p":
        return Path(value)
    raise ValueError(f"no value is tagged {tag}")
