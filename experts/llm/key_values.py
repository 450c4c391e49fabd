"""Keys and values of the tokens so far, kept between iterations.

``KeyValues`` is the seam to scheduling: the model asks once an iteration for room for its tokens, then appends and
reads layer by layer. ``ContiguousKeyValues`` gives each sequence one slot of one buffer per layer: reads are views.

Guarantees: a sequence reads what was appended for it, whatever else was in the batch; a released sequence's room is
used again; memory that was never written is never read, as it may hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.llm.config import ArchSpec
    from experts.llm.token_batch import Row, TokenBatch

FIRST_SLOTS = 4
FIRST_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys and values of one layer, each (sequences, kv heads, positions, head size); for one row without the first."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """How some of the decode rows lie in what ``decode`` gives, the same for every layer."""

    mask: Tensor | None  # (sequences, 1, 1, positions), true where a sequence has a token; None: everywhere
    places: Tensor | None  # at which sequence each row stands; None: row i is sequence i, and there are no others
    rows: slice | Tensor = field(default_factory=lambda: slice(None))  # of the decode rows, counted from the first


class BatchKeyValues(Protocol):
    """The keys and values that one batch writes and reads."""

    @property
    def decode_layouts(self) -> Sequence[DecodeLayout]:
        """How the decode rows are divided: each is in one, and each of these is one call of attention."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep those of the batch's tokens, (tokens, kv heads, head size), in its order."""

    def prefill(self, layer: int, row: int) -> Stored:
        """A prefill row's sequence up to the row's end: (kv heads, positions, head size)."""

    def decode(self, layer: int, number: int) -> Stored:
        """The sequences of some decode rows, as this one of the ``decode_layouts`` describes."""


class KeyValues(Protocol):
    """All sequences' keys and values of one model."""

    def reserve(self, batch: TokenBatch) -> BatchKeyValues:
        """Room for a batch. A row before its sequence's end cuts it there; ValueError for one beyond its end."""

    def release(self, sequence: int) -> None:
        """Forget a sequence. Idempotent."""


class ContiguousKeyValues:
    """Slots grow by doubling. Decode rows are one range with what lies between, cheaper than gathering up to half."""

    def __init__(self, spec: ArchSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        shape = (FIRST_SLOTS, spec.kv_heads, FIRST_POSITIONS, spec.head_size)
        layers = range(len(spec.layers))
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self._lengths: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._free = list(range(FIRST_SLOTS))[::-1]  # the lowest is taken first: ranges stay short

    @property
    def sequences(self) -> dict[int, int]:
        return dict(self._lengths)

    @property
    def size_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def reserve(self, batch: TokenBatch) -> BatchOfSlots:
        for row in batch.rows:
            if row.first > self._lengths.get(row.sequence, 0):
                held = self._lengths.get(row.sequence, 0)
                raise ValueError(f"sequence {row.sequence} holds {held} tokens, a row begins at {row.first}")
        self._grow_to(
            slots=len(self._slots) + sum(row.sequence not in self._slots for row in batch.rows),
            positions=max(row.end for row in batch.rows),
        )
        for row in batch.rows:
            if row.sequence not in self._slots:
                self._slots[row.sequence] = self._free.pop()
            self._lengths[row.sequence] = row.end
        return BatchOfSlots(self._keys, self._values, batch, [self._slots[row.sequence] for row in batch.rows])

    def release(self, sequence: int) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            del self._lengths[sequence]
            self._free.append(slot)
            self._free.sort(reverse=True)

    def _grow_to(self, slots: int, positions: int) -> None:
        had_slots, _, had_positions, _ = self._keys[0].shape
        new_slots, new_positions = _doubled(had_slots, slots), _doubled(had_positions, positions)
        if (new_slots, new_positions) == (had_slots, had_positions):
            return
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):  # one after the other: at most one is there twice
                buffers[layer] = old.new_zeros((new_slots, old.shape[1], new_positions, old.shape[3]))
                buffers[layer][:had_slots, :, :had_positions] = old
        self._free = sorted({*self._free, *range(had_slots, new_slots)}, reverse=True)


class BatchOfSlots:
    """One batch's view of the slots. Valid until the next ``reserve``."""

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], batch: TokenBatch, slots: Sequence[int]
    ) -> None:
        self._keys = keys
        self._values = values
        self._rows = batch.rows
        self._slots = slots
        self._positions = batch.positions
        counts = torch.tensor([row.count for row in batch.rows], device=batch.positions.device)
        self._slot_of_token = torch.tensor(slots, device=batch.positions.device).repeat_interleave(counts)
        self._decode = _DecodeRange.of(batch.decode_rows, slots[batch.prefill_count :], batch.positions.device)

    @property
    def decode_layouts(self) -> Sequence[DecodeLayout]:
        return (self._decode.layout,)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._keys[layer][self._slot_of_token, :, self._positions] = keys
        self._values[layer][self._slot_of_token, :, self._positions] = values

    def prefill(self, layer: int, row: int) -> Stored:
        slot, end = self._slots[row], self._rows[row].end
        return Stored(self._keys[layer][slot, :, :end], self._values[layer][slot, :, :end])

    def decode(self, layer: int, number: int) -> Stored:
        return Stored(self._decode.of_buffer(self._keys[layer]), self._decode.of_buffer(self._values[layer]))


@dataclass(frozen=True, slots=True)
class _DecodeRange:
    """Which part of a layer's buffer the decode rows are read from: a range of slots, or single ones, gathered."""

    slots: slice | Tensor
    longest: int
    layout: DecodeLayout

    @classmethod
    def of(cls, rows: Sequence[Row], slots: Sequence[int], device: torch.device) -> _DecodeRange:
        if not rows:
            return cls(slice(0, 0), 0, DecodeLayout(None, None))
        lengths = [row.end for row in rows]
        first, end = min(slots), max(slots) + 1
        if end - first > 2 * len(slots):
            return cls(torch.tensor(slots, device=device), max(lengths), DecodeLayout(mask_of(lengths, device), None))
        of_slot = dict(zip(slots, lengths, strict=True))
        in_range = [of_slot.get(slot, 1) for slot in range(first, end)]  # 1: a row without any is no number
        is_all = list(slots) == list(range(first, end))
        places = None if is_all else torch.tensor([slot - first for slot in slots], device=device)
        return cls(slice(first, end), max(lengths), DecodeLayout(mask_of(in_range, device), places))

    def of_buffer(self, buffer: Tensor) -> Tensor:
        return buffer[self.slots, :, : self.longest]


def mask_of(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Where sequences of these lengths have tokens, as DecodeLayout has it."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    there = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
    return there[:, None, None, :]


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size
