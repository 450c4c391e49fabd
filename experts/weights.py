"""Packed weights: what lies on disk, direct reads from SSD into a buffer, tensors as views of it.

On disk, under a line's ``state/packed``:
    segments/<sha256>.bin            bytes only, 4 KiB-aligned and padded; content-addressed
    manifests/<kind>/<name>.<precision>.json   a PackedExpert
A segment is an expert's own tensors, or tensors that several experts share (stored, read and held once).
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT_BYTES = 4096  # what direct I/O asks of offset, length and address on every filesystem we know
SLOT_QUANTUM_BYTES = 256 * 1024  # buffers come in multiples of this, so that heads of 3 and 4 labels share slots


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's place in its segment. ``stride`` in elements; the memory format lives in it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of packed bytes. ``size_bytes`` is the file's size, a multiple of ALIGNMENT_BYTES."""

    sha256: str
    size_bytes: int
    tensors: tuple[TensorSpec, ...]

    @property
    def slot_bytes(self) -> int:
        """What holding it costs: the size of the buffer it is read into, and what the ledger counts."""
        return -(-self.size_bytes // SLOT_QUANTUM_BYTES) * SLOT_QUANTUM_BYTES


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """One expert in one precision, as it lies on disk.

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
