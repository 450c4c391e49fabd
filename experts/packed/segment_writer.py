"""Writes one segment file: tensors one behind the other, aligned, padded, hashed on the way, synced at the end."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Self

from experts.packed.weights import ALIGNMENT_BYTES, Segment, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from experts.packed.sharing import TensorKey

TENSOR_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load


class SegmentWriter:
    """A context: ``append`` tensors, then ``finish``. The file at ``path`` is no segment before ``finish`` returned."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._tensors: list[TensorSpec] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(
        self, name: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], parts: Iterable[memoryview]
    ) -> str:
        """Write one tensor's bytes; returns their sha256."""
        self._pad_to(TENSOR_ALIGNMENT_BYTES)
        spec = TensorSpec(name, dtype, shape, stride, self._size_bytes)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
            self._write(part)
        self._tensors.append(spec)
        return digest.hexdigest()

    def append_key(self, key: TensorKey, parts: Iterable[memoryview]) -> str:
        """The same for a tensor that was packed before."""
        return self.append(key.name, key.dtype, key.shape, key.stride, parts)

    def finish(self) -> Segment:
        """Pad, sync, and say what was written. A segment has at least one block, so that every slot has an address."""
        if self._size_bytes == 0:
            self._write(memoryview(bytes(ALIGNMENT_BYTES)))
        self._pad_to(ALIGNMENT_BYTES)
        self._file.flush()
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):  # packing must not push the line's images out of the page cache
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return Segment(self._digest.hexdigest(), self._size_bytes, tuple(self._tensors))

    def _pad_to(self, alignment_bytes: int) -> None:
        missing = -self._size_bytes % alignment_bytes
        self._write(memoryview(bytes(missing)))

    def _write(self, part: memoryview) -> None:
        self._file.write(part)
        self._digest.update(part)
        self._size_bytes += len(part)
