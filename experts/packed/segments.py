"""Segments of packed experts: which tensors share one, and how one is written.

Tensors that several experts share bit for bit are stored, read and held once. They are grouped by the set of experts
that hold them with the same name, form and bytes. A group that is large enough for a file becomes a shared segment;
other tensors stay in their expert's own segment. This plan is pure: digests in, a plan out.

A segment file has tensors in a row, or in blocks; it is aligned, padded, hashed on the way, and synced.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from experts.packed.weights import ALIGNMENT_BYTES, DTYPE_BYTES, Blocks, Segment, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

SHARED_MINIMUM_BYTES = 1024 * 1024  # below this a second file costs more to open than it saves to store
TENSOR_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Key of a tensor: two experts with equal keys share it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, spec: TensorSpec, sha256: str) -> TensorKey:
        return cls(spec.name, spec.dtype, spec.shape, spec.stride, sha256)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Partition:
    """Division of one expert's tensors over segments; within each, in the expert's own order."""

    own: tuple[TensorKey, ...]
    shared: tuple[tuple[TensorKey, ...], ...]


def plan_sharing(tensors: Mapping[str, Sequence[TensorKey]]) -> dict[str, Partition]:
    """Partition of every expert, from the tensors of each. Independent of the experts' order."""
    holders: defaultdict[TensorKey, set[str]] = defaultdict(set)
    for expert, keys in tensors.items():
        for key in keys:
            holders[key].add(expert)
    groups = _groups(tensors, {key: frozenset(experts) for key, experts in holders.items()})
    partitions: dict[str, Partition] = {}
    for expert, keys in tensors.items():
        shared = dict.fromkeys(groups[key] for key in keys if key in groups)  # a set that keeps its order
        partitions[expert] = Partition(tuple(key for key in keys if key not in groups), tuple(shared))
    return partitions


def _groups(
    tensors: Mapping[str, Sequence[TensorKey]], holders: Mapping[TensorKey, frozenset[str]]
) -> dict[TensorKey, tuple[TensorKey, ...]]:
    """Group of each shared tensor, in the order of the alphabetically first expert that has it."""
    members: defaultdict[frozenset[str], list[TensorKey]] = defaultdict(list)
    for expert in sorted(tensors):
        for key in tensors[expert]:
            if len(holders[key]) > 1 and min(holders[key]) == expert:
                members[holders[key]].append(key)
    worthy = [tuple(keys) for keys in members.values() if sum(key.size_bytes for key in keys) >= SHARED_MINIMUM_BYTES]
    return {key: group for group in worthy for key in group}


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor whose first dimension counts the blocks; each block holds its part without gaps."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def part_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    def spec(self, offset_bytes: int, block_bytes: int) -> TensorSpec:
        inner = [math.prod(self.shape[place + 1 :]) for place in range(1, len(self.shape))]
        stride = (block_bytes // DTYPE_BYTES[self.dtype], *inner)
        return TensorSpec(self.name, self.dtype, self.shape, stride, offset_bytes)


class SegmentWriter:
    """A context: ``append`` tensors, then ``finish``. The file is no segment before ``finish`` returned."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._tensors: list[TensorSpec] = []
        self._blocks: Blocks | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(
        self, name: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], parts: Iterable[memoryview]
    ) -> str:
        """Write one tensor's bytes and return their sha256."""
        self._pad_to(TENSOR_ALIGNMENT_BYTES)
        spec = TensorSpec(name, dtype, shape, stride, self._size_bytes)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
            self._write(part)
        self._tensors.append(spec)
        return digest.hexdigest()

    def append_blocks(self, tensors: Sequence[Stacked], part: Callable[[str, int], memoryview]) -> None:
        """Write a whole segment of blocks: the first part of each tensor, then the second of each, and so on.

        ``part``: bytes of a tensor, by its name, at one index of its first dimension.
        """
        assert self._size_bytes == 0, "blocks are a segment of their own"
        offsets_bytes, end = [], 0
        for one in tensors:
            offsets_bytes.append(-(-end // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES)
            end = offsets_bytes[-1] + one.part_bytes
        block_bytes = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._tensors = [one.spec(offset, block_bytes) for one, offset in zip(tensors, offsets_bytes, strict=True)]
        digests = []
        for number in range(tensors[0].shape[0]):
            block = bytearray(block_bytes)
            for one, offset in zip(tensors, offsets_bytes, strict=True):
                block[offset : offset + one.part_bytes] = part(one.name, number)
            digests.append(hashlib.sha256(block).hexdigest())
            self._write(memoryview(block))
        self._blocks = Blocks(block_bytes, tuple(digests))

    def finish(self) -> Segment:
        """Pad and sync. A segment has at least one block, so that every slot has an address."""
        if self._size_bytes == 0:
            self._write(memoryview(bytes(ALIGNMENT_BYTES)))
        self._pad_to(ALIGNMENT_BYTES)
        self._file.flush()
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):  # else packing pushes the line's images out of the page cache
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return Segment(self._digest.hexdigest(), self._size_bytes, tuple(self._tensors), self._blocks)

    def _pad_to(self, alignment_bytes: int) -> None:
        self._write(memoryview(bytes(-self._size_bytes % alignment_bytes)))

    def _write(self, part: memoryview) -> None:
        self._file.write(part)
        self._digest.update(part)
        self._size_bytes += len(part)
