"""Packed weights: files on disk, direct reads from SSD into a buffer, tensors as views of it.

On disk, under a line's ``state/packed``:
    segments/<sha256>.bin            bytes only, 4 KiB-aligned and padded; content-addressed
    programs/<sha256>.bin            input of a skeleton beside its tensors (ONNX: the graph without its weights)
    manifests/<kind>/<name>.<precision>.json   a PackedExpert and its source
    packing.lock                     locked during a packing
A segment is an expert's own tensors, or tensors that several experts share (stored, read and held once), or the
moe_experts of one layer of a language model: blocks of equal size, one for each, of which any can be read alone.

Guarantees: bytes read by ``SegmentStore.read`` had the recorded sha256 when this process first read that file, and the
file has not been replaced or written since (inode, size and time of change). Hashing each time would cost more than
reading: 0.1 s for 178 MB against 0.055 s. ``discard_corrupt`` removes a corrupt file, for all experts that share it,
and the next packing writes it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.errors import WeightsCorrupt, WeightsMissing
from experts.packed.direct_reads import DirectReader, FileStamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from experts.packed.direct_reads import FilePart

ALIGNMENT_BYTES = 4096  # of offset, length and address, for direct I/O on every known filesystem
LOCK_NAME = "packing.lock"
SLOT_QUANTUM_BYTES = 256 * 1024  # buffers come in multiples of this, so that heads of 3 and 4 labels share slots
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip


def slot_bytes(size_bytes: int) -> int:
    """Bytes, rounded up to the sizes that buffers come in."""
    return -(-size_bytes // SLOT_QUANTUM_BYTES) * SLOT_QUANTUM_BYTES


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's place in its segment. ``stride`` in elements; it shows the memory format.

    A tensor in blocks has the block as first dimension; ``offset_bytes`` is its place in the first block.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Parts of a segment that can be read alone: ``size_bytes`` each, a multiple of ALIGNMENT_BYTES.

    ``sha256``: digest of each, in order.
    """

    size_bytes: int
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of packed bytes. ``size_bytes`` is the file's size, a multiple of ALIGNMENT_BYTES."""

    sha256: str
    size_bytes: int
    tensors: tuple[TensorSpec, ...]
    blocks: Blocks | None = None

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.size_bytes)


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """One expert in one precision on disk.

    ``layout`` digests architecture, precision, program and the tensor tables of all segments (not their bytes): two
    experts of one layout run from the same skeleton, and switching between them overwrites bytes only.
    """

    expert: str
    architecture: str
    precision: str
    layout: str
    source_sha256: str
    own: Segment
    shared: tuple[Segment, ...]
    program_sha256: str | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (self.own, *self.shared)

    @property
    def moe_layers(self) -> tuple[Segment, ...]:
        """Shared segments of a layer's moe_experts each; without room for all, single blocks are loaded."""
        return tuple(segment for segment in self.shared if segment.blocks is not None)


class AlignedBuffer:
    """Page-aligned memory, in huge pages where the system has them."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a buffer of {size_bytes} bytes")
        self.size_bytes = size_bytes
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view: memoryview | None = memoryview(self._map)
        self._tensor: Tensor | None = None

    @property
    def view(self) -> memoryview:
        """The bytes, writable. ValueError once closed."""
        if self._view is None:
            raise ValueError("the buffer is closed")
        return self._view

    @property
    def tensor(self) -> Tensor:
        """Bytes as a one-dimensional uint8 tensor on the CPU. ValueError once closed."""
        if self._tensor is None:
            import torch  # lazily: this module's records are read where torch is not loaded

            self._tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        return self._tensor

    def close(self) -> None:
        """Free the memory at once; tensors over it must not be used any more. Idempotent."""
        if self._view is None:
            return
        view, self._view, self._tensor = self._view, None, None
        try:
            view.release()
            self._map.close()
        except BufferError:  # a view lives on: its addresses stay valid, the memory behind them is freed
            self._map.madvise(mmap.MADV_DONTNEED)


class SegmentStore:
    """The packed files of one line. Thread-safe; several reads may run at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = DirectReader()
        self._verified: dict[str, FileStamp] = {}
        self._verified_blocks: dict[str, tuple[FileStamp, set[int]]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        self._reader.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for a packing under way, in any process, and keep others out. The kernel unlocks with the process.

        One thread must not enter it twice.
        """
        with self._lock_file() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    @property
    def is_there(self) -> bool:
        """False before the first packing, and after the drive was removed."""
        return (self.directory / LOCK_NAME).exists()

    def segment_path(self, sha256: str) -> Path:
        return self.directory / "segments" / f"{sha256}.bin"

    def program_path(self, sha256: str) -> Path:
        return self.directory / "programs" / f"{sha256}.bin"

    def read(self, segment: Segment, buffer: AlignedBuffer | memoryview, expert: str) -> None:
        """Fill the head of ``buffer`` with the segment: one direct read, straight into it.

        The sha256 is checked when this process reads this file for the first time, and again whenever the file changed.
        Raises WeightsMissing, WeightsCorrupt, LoadError; the buffer's content is then undefined.
        """
        target = _head_of(buffer, segment.size_bytes)
        path = self.segment_path(segment.sha256)
        verified = self._verified_now(segment, expert)
        if verified is not None and self._reader.read(path, target, expert) == verified:
            return
        digest = _Digest()
        stamp = self._reader.read(path, target, expert, digest.take)
        self._settle(segment, stamp, digest.hexdigest(), expert)

    def stream(
        self, segment: Segment, staging: AlignedBuffer, expert: str, on_part: Callable[[FilePart], None]
    ) -> None:
        """Pass the segment through a small buffer, part by part, to memory that no file can be read into.

        ``on_part`` gets each part, in order; its bytes stay in ``staging`` until it returns. Checked as in ``read``,
        with the same errors; parts passed on before an error are undefined.
        """
        place = (self.segment_path(segment.sha256), segment.size_bytes, staging.view, expert)
        verified = self._verified_now(segment, expert)
        if verified is not None and self._reader.stream(*place, on_part) == verified:
            return
        digest = _Digest()

        def hashed(part: FilePart) -> None:
            digest.take(part)
            on_part(part)

        stamp = self._reader.stream(*place, hashed)
        self._settle(segment, stamp, digest.hexdigest(), expert)

    def read_block(self, segment: Segment, number: int, buffer: memoryview, expert: str) -> None:
        """Fill the head of ``buffer`` with one block of a segment: a direct read of the block alone.

        The block's sha256 is checked when this process reads it for the first time since the file changed, unless the
        whole file was checked. Raises as ``read`` does.
        """
        blocks = segment.blocks
        assert blocks is not None, "the segment can only be read as a whole"
        path = self.segment_path(segment.sha256)
        target = _head_of(buffer, blocks.size_bytes)
        stamp = self._reader.read_part(path, number * blocks.size_bytes, target, segment.size_bytes, expert)
        if self._is_block_verified(segment, number, stamp):
            return
        if hashlib.sha256(target).hexdigest() != blocks.sha256[number]:
            with self._lock:
                self._verified_blocks.pop(segment.sha256, None)
            raise _corrupt(expert, f"block {number} of {path}")
        with self._lock:
            known = self._verified_blocks.get(segment.sha256)
            numbers = known[1] if known is not None and known[0] == stamp else set()
            self._verified_blocks[segment.sha256] = (stamp, numbers | {number})

    def verify(self, segment: Segment, expert: str) -> None:
        """Hash the file, verified or not. Raises WeightsMissing, WeightsCorrupt, LoadError."""
        path = self.segment_path(segment.sha256)
        found = self._reader.digest(path, segment.size_bytes, expert)
        self._settle(segment, found.stamp, found.sha256, expert)

    def discard_corrupt(self, packed: PackedExpert) -> tuple[Path, ...] | None:
        """Remove an expert's corrupt files, and return those that are absent, now or before.

        Each file is read again from the disk: empty where only an earlier read went wrong. None, with nothing done,
        during a packing, which may read or replace the files. Raises LoadError for an unreadable file, OSError for one
        that cannot be removed, and where nothing is packed any more.
        """
        with self._lock_file(creates=False) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            unsound = tuple(self._unsound(packed))
            for path in unsound:
                path.unlink(missing_ok=True)
            return unsound

    def _unsound(self, packed: PackedExpert) -> Iterator[Path]:
        for segment in packed.segments:
            try:
                self.verify(segment, packed.expert)
            except (WeightsCorrupt, WeightsMissing):
                yield self.segment_path(segment.sha256)
        try:
            self.program(packed)
        except (WeightsCorrupt, WeightsMissing):
            assert packed.program_sha256 is not None, "it has no program that could be wrong"
            yield self.program_path(packed.program_sha256)

    @contextmanager
    def _lock_file(self, *, creates: bool = True) -> Iterator[int]:
        """``creates``: False where the drive may be unmounted; nothing is created in its bare mount point."""
        if creates:
            self.directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if creates else 0)
        descriptor = os.open(self.directory / LOCK_NAME, flags, 0o640)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def program(self, packed: PackedExpert) -> bytes:
        """Input of its skeleton beside the tensors; empty for most. Raises WeightsMissing, WeightsCorrupt."""
        if packed.program_sha256 is None:
            return b""
        path = self.program_path(packed.program_sha256)
        try:
            program = path.read_bytes()
        except FileNotFoundError as error:
            raise WeightsMissing(packed.expert, f"{path} is not there: pack the line again") from error
        if hashlib.sha256(program).hexdigest() != packed.program_sha256:
            raise _corrupt(packed.expert, str(path))
        return program

    def _settle(self, segment: Segment, stamp: FileStamp, sha256: str, expert: str) -> None:
        """Remember the file as verified, or forget it and raise WeightsCorrupt."""
        is_sound = sha256 == segment.sha256
        with self._lock:
            if is_sound:
                self._verified[segment.sha256] = stamp
            else:
                self._verified.pop(segment.sha256, None)
        if not is_sound:
            raise _corrupt(expert, str(self.segment_path(segment.sha256)))

    def _is_block_verified(self, segment: Segment, number: int, stamp: FileStamp) -> bool:
        with self._lock:
            if self._verified.get(segment.sha256) == stamp:
                return True
            known = self._verified_blocks.get(segment.sha256)
            return known is not None and known[0] == stamp and number in known[1]

    def _verified_now(self, segment: Segment, expert: str) -> FileStamp | None:
        """Stamp of the verified file; None where the file has changed since."""
        with self._lock:
            verified = self._verified.get(segment.sha256)
        path = self.segment_path(segment.sha256)
        try:
            return verified if verified is not None and verified == FileStamp.of(path.stat()) else None
        except FileNotFoundError as error:
            raise WeightsMissing(expert, f"{path} is not there: put it back, or pack the line again") from error


class _Digest:
    """sha256 of a file's parts, which may start over from the first one."""

    def __init__(self) -> None:
        self._found = hashlib.sha256()

    def take(self, part: FilePart) -> None:
        if part.start_bytes == 0:
            self._found = hashlib.sha256()
        self._found.update(part.content)

    def hexdigest(self) -> str:
        return self._found.hexdigest()


def tensor_views(buffer: Tensor, segment: Segment) -> dict[str, Tensor]:
    """The segment's tensors as views of ``buffer``: one-dimensional uint8, on any device, at least the segment long.

    Nothing is copied: the views show bytes that are written to the buffer afterwards.
    """
    import torch  # lazily: this module's records are read where torch is not loaded

    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < segment.size_bytes:
        raise ValueError(f"a flat uint8 buffer of {segment.size_bytes} bytes is needed, not {tuple(buffer.shape)}")
    flat = buffer[: segment.size_bytes]
    typed: dict[str, Tensor] = {}
    views: dict[str, Tensor] = {}
    for spec in segment.tensors:
        base = typed.get(spec.dtype)
        if base is None:
            base = typed[spec.dtype] = flat.view(getattr(torch, spec.dtype))
        start = base.storage_offset() + spec.offset_bytes // base.element_size()
        views[spec.name] = base.as_strided(spec.shape, spec.stride, start)
    return views


def _corrupt(expert: str, what: str) -> WeightsCorrupt:
    return WeightsCorrupt(expert, f"{what} does not have the sha256 it was packed with: delete it and start again")


def _head_of(buffer: AlignedBuffer | memoryview, size_bytes: int) -> memoryview:
    view = buffer.view if isinstance(buffer, AlignedBuffer) else buffer
    if len(view) < size_bytes:
        raise ValueError(f"a buffer of {len(view)} bytes cannot take a segment of {size_bytes}")
    return view[:size_bytes]
