"""Messages between the agent and a worker: frozen records as bytes, and the channel that carries them.

A message is a JSON text with one list of bytes behind it; records, tuples, sets and arrays are tagged. Only the record
types named here are made, from plain values: no message can name code to run.

Guarantees: ``decode(encode(message)) == message``. ValueError for bytes that are no message of this version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agent.core.effects import Prepare, StartLoad
from agent.core.events import BatchFailed, Finished, Loaded, LoadFailed
from agent.core.performance import (
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
    PreparedForm,
    SharedTensors,
)
from agent.core.request import Batch, Portion, Rejected
from agent.runtime.executor import ExecutorStatistics
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.images.sources import EncodedImage
from agent.runtime.machine.box import Box, MemorySize
from agent.runtime.measuring.probe import Probed
from agent.runtime.weights.slots import SlotStatistics
from agent.runtime.weights.transfer import TransferStatistics
from agent.runtime.worker import WorkerStatistics
from experts import expert as nouns
from experts.llm.tiers.moe_experts import MoeStatistics
from experts.packed.weights import Blocks, PackedExpert, Segment, TensorSpec

VERSION = 1
HEADER = struct.Struct("<HI")  # version, bytes of the JSON text


class Channel(Protocol):
    """Bytes to and from one worker, in order. ``receive`` waits; None once the other end is gone."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes | None: ...

    def kill(self) -> None:
        """End the worker at once, whatever it does."""

    def close(self) -> None:
        """Release this end, after the other is gone."""


# -- before the work: what the worker has, and gets --


@dataclass(frozen=True, slots=True)
class Detect:
    """Report the box, as this device. Answer Detected."""

    device: str


@dataclass(frozen=True, slots=True)
class Detected:
    """``absent``: forms that do not run there, each with its reason."""

    box: Box
    absent: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file. ``kind``: its folder; ``path``: of the agent, to link where both share a filesystem."""

    kind: str
    sha256: str
    size_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Packed files that the worker needs. Answer Lacking, with those that it cannot link."""

    files: tuple[PackedFile, ...]


@dataclass(frozen=True, slots=True)
class Lacking:
    files: tuple[PackedFile, ...]


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Next bytes of a packed file; it is complete once it has all of them. No answer."""

    file: PackedFile
    content: bytes


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure these copies, by processor. ``box``: the worker's part of it. Answer Probed."""

    box: Box
    copies: Mapping[str, tuple[ExpertCopy, ...]]
    usage: Mapping[str, float]
    executors: tuple[ExecutorSpec, ...]


@dataclass(frozen=True, slots=True)
class Assemble:
    """Become ready to work: build memories, executors and templates. ``box``: the worker's part. Answer Ready."""

    box: Box
    executors: tuple[ExecutorSpec, ...]
    limits: Limits
    copies: Mapping[str, ExpertCopy]
    matrix: PerformanceMatrix
    scaled: frozenset[str]
    ssd_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Ready:
    """``failed``: experts that cannot run there, each with its reason."""

    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Broken:
    """A step before the work failed, or the worker ends."""

    reason: str


# -- the work --


@dataclass(frozen=True, slots=True)
class FrameImage:
    """A board's image, of which requests have parts. ``size``: (height, width) that its layout requires."""

    number: int
    content: bytes
    name: str
    max_pixels: int
    size: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class FramePiece:
    """``box``: left, top, right, bottom in the frame of that number."""

    frame: int
    box: tuple[int, int, int, int]
    name: str


@dataclass(frozen=True, slots=True)
class Given:
    """A request's image: encoded, as pixels, part of a frame that was sent before, or a refusal instead of one."""

    request: int
    image: EncodedImage | FramePiece | np.ndarray | Rejected


@dataclass(frozen=True, slots=True)
class RunBatch:
    batch: Batch
    is_next: bool


@dataclass(frozen=True, slots=True)
class Hurry:
    batch: Batch


@dataclass(frozen=True, slots=True)
class EvictCopy:
    copy: str
    pool: str


@dataclass(frozen=True, slots=True)
class Release:
    """Forget what was prepared for a request; ``ended``: its image, too."""

    request: int
    ended: bool


@dataclass(frozen=True, slots=True)
class SetBudget:
    pool: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Know:
    """Serve these copies from now on; packed files for new ones came before."""

    copies: Mapping[str, ExpertCopy]
    matrix: PerformanceMatrix


@dataclass(frozen=True, slots=True)
class Stop:
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    """Sent regularly: the worker lives. ``statistics``: None before it works."""

    statistics: WorkerStatistics | None


OWN = (
    Detect, Detected, PackedFile, Offer, Lacking, FilePiece, Measure, Assemble, Ready, Broken, FrameImage, FramePiece,
    Given, RunBatch, Hurry, EvictCopy, Release, SetBudget, Know, Stop, Beat,
)  # fmt: skip
CARRIED = (
    Prepare, StartLoad, BatchFailed, Finished, Loaded, LoadFailed, Batch, Portion, Rejected, EncodedImage, ExecutorSpec,
    PoolSpec, Limits, ExpertProfile, Footprint, SharedTensors, Performance, PreparedForm, PerformanceMatrix, ExpertCopy,
    PackedExpert, Segment, TensorSpec, Blocks, Box, MemorySize, Probed, WorkerStatistics, TransferStatistics,
    SlotStatistics, ExecutorStatistics, MoeStatistics, nouns.Expert, nouns.InputSpec, nouns.Normalization,
    nouns.Prediction, nouns.BoundingBox, nouns.LabelScore, nouns.Anomaly, nouns.AnomalyMap,
)  # fmt: skip
RECORDS: dict[str, Any] = {each.__name__: each for each in (*OWN, *CARRIED)}
FIELDS = {name: tuple(each.name for each in fields(record)) for name, record in RECORDS.items() if is_dataclass(record)}
ENUMS = {each.__name__: each for each in (nouns.Precision, nouns.Task, nouns.Fit, nouns.Orientation)}


def encode(message: object) -> bytes:
    """Raises TypeError for a record that is not named here."""
    contents: list[bytes] = []
    plain = _plain(message, contents)
    text = json.dumps([plain, [len(content) for content in contents]], separators=(",", ":")).encode()
    return b"".join((HEADER.pack(VERSION, len(text)), text, *contents))


def decode(content: bytes) -> Any:  # noqa: ANN401 - any of the records
    """Raises ValueError for bytes of another version, or that are no message."""
    try:
        version, size = HEADER.unpack_from(content)
        if version != VERSION:
            raise ValueError(f"a message of version {version}, not {VERSION}: install the same version everywhere")
        plain, sizes = json.loads(content[HEADER.size : HEADER.size + size])
        ends = list(accumulate(sizes, initial=HEADER.size + size))
        if ends[-1] != len(content):
            raise ValueError(f"a message of {len(content)} bytes that says {ends[-1]}")
        return _record(plain, [content[start:end] for start, end in pairwise(ends)])
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
