"""Arena of CPUs: keys and values of all models in one memory, in contiguous extents.

A gathered read costs a CPU 1.8 to 2.6 times a contiguous one. So an extent is contiguous in addresses: a slab maps
address space for many sequences of the longest context. A page becomes memory when it is first written, and returns to
the machine when its bytes are needed elsewhere (as vAttention does on GPUs, arXiv 2405.04437). Every extent of a layout
has the same stride: decode attention reads a range of extents in one call.

Guarantees: reservations never exceed the budget. They are counted in pages of each head, so a request never takes more
memory than was counted. A request that fits the budget finds room: there is no fragmentation, and cached prefixes
are evicted first. Only identical weights share a prefix. No other bytes of a released request are ever read, and
extents that may hold NaN or infinity are wiped. Assumes Linux, where MADV_DONTNEED frees at once and leaves zeros.
Elsewhere pages are wiped but stay with the process.
"""

from __future__ import annotations

import math
import mmap
import sys
from bisect import insort
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import torch

from experts.errors import AddressesExceeded, MemoryExceeded
from experts.llm.arenas.blocks import UNBOUNDED_BYTES, BlockArena
from experts.llm.arenas.key_values import ArenaKeyValues, KvLayout, Prefix, PrefixIndex, checked_lease
from experts.llm.attention import DecodeLayout, Stored, mask_of
from experts.llm.kernels.products import Sequences, attend, takes_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.llm.arenas.key_values import CachedPrefix, KvArena
    from experts.llm.attention import BatchKeyValues
    from experts.llm.files.config import ArchSpec
    from experts.llm.token_batch import TokenBatch

EXTENTS_A_SLAB = 128
# Address space reserves no memory: Linux's MAP_NORESERVE, which Python does not name.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
CALL_BYTES = 256 * 1024  # bytes that attention reads in the time of starting another call


class Slab:
    """Address space for some extents of one layout: (extents, layers, keys and values, kv heads, positions, size)."""

    def __init__(self, number: int, layout: KvLayout, positions: int, extents: int) -> None:
        self.number = number
        self._unit = _unit(layout)
        self.extent_bytes = positions * layout.token_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, extents * self.extent_bytes, flags=flags)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page exceeds the promise
            self._map.madvise(mmap.MADV_DONTDUMP)  # keeps the address space out of core dumps
        shape = (extents, layout.layers, 2, layout.kv_heads, positions, layout.head_size)
        with torch.inference_mode(False):  # also written outside a model's pass
            self.buffer = torch.frombuffer(self._map, dtype=layout.dtype).view(shape)
        self.address = self.buffer.data_ptr()
        self.keys = [self.buffer[:, layer, 0] for layer in range(layout.layers)]
        self.values = [self.buffer[:, layer, 1] for layer in range(layout.layers)]
        self.free = list(range(extents))  # the lowest is taken first: ranges stay short
        self.touched = [0] * extents  # positions of each that are memory

    def touch(self, extent: int, positions: int) -> None:
        if positions > self.touched[extent]:
            self.touched[extent] = math.ceil(positions / self._unit) * self._unit

    def give_back(self, extent: int) -> None:
        """Return an extent's memory to the machine; its bytes then read as zeros."""
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, extent * self.extent_bytes, self.extent_bytes)
        else:
            self.buffer[extent].zero_()
        self.touched[extent] = 0


@dataclass(slots=True)
class KvExtent:
    """Extent of a slab that a request holds: tokens reserved for it, and tokens stored."""

    layout: KvLayout
    slab: Slab
    number: int
    promised: int
    held: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.slab.number, self.number

    @property
    def tokens(self) -> Tensor:
        """Stored keys and values: (layers, keys and values, kv heads, tokens, size)."""
        return self.slab.buffer[self.number, :, :, :, : self.held]


class ExtentArena:
    """Arena; see there."""

    def __init__(self, budget_bytes: int, *, keeps_prefixes: bool = True) -> None:
        self.budget_bytes = self._most_bytes = budget_bytes
        self.promised_bytes = self.cached_bytes = self.idle_bytes = 0
        self.keeps_prefixes = keeps_prefixes
        self._lock = Lock()
        self._slabs: dict[KvLayout, list[Slab]] = {}
        self._extents: dict[int, KvExtent] = {}
        self._prefixes: PrefixIndex[KvExtent] = PrefixIndex()
        self._slab_count = 0

    def set_budget(self, budget_bytes: int) -> None:
        with self._lock:
            self.budget_bytes = min(budget_bytes, self._most_bytes)
            if self._free_bytes < 0:
                self._give_idle_back()
            for cached in self._prefixes.oldest_first:
                if self._free_bytes >= 0:
                    return
                self._drop(cached)

    def tokens_for(self, layout: KvLayout, tokens: int) -> int:
        unit = _unit(layout)
        return math.ceil(tokens / unit) * unit

    def begin(self, request: int, layout: KvLayout, tokens: int, prefix: Prefix | None = None) -> int:
        with self._lock:
            if request in self._extents:
                raise ValueError(f"request {request} has begun")
            return self._begin(request, layout, self._promise(request, layout, tokens), prefix)

    def grow(self, request: int, tokens: int) -> None:
        with self._lock:
            extent = self._extents[request]
            promised = max(self._promise(request, extent.layout, tokens), extent.promised)
            further_bytes = (promised - extent.promised) * extent.layout.token_bytes
            self._make_room(further_bytes, spared=None)
            extent.promised = promised
            self.promised_bytes += further_bytes

    def share(self, request: int, source: int, tokens: int) -> None:
        with self._lock:
            own, other = self._extents[request], self._extents[source]
            self._hold(own, tokens)
            own.tokens.copy_(other.slab.buffer[other.number, :, :, :, :tokens])

    def release(self, request: int, prefix: Prefix | None = None, *, is_sound: bool = True) -> None:
        with self._lock:
            extent = self._extents.pop(request, None)
            if extent is None:
                return
            self.promised_bytes -= extent.promised * extent.layout.token_bytes
            if not is_sound:
                extent.slab.give_back(extent.number)
            if is_sound and prefix is not None and self.keeps_prefixes:
                self._keep(extent, prefix)
            else:
                self._make_idle(extent)

    def holds(self, request: int) -> bool:
        return request in self._extents

    def place(self, request: int) -> tuple[int, int]:
        return self._extents[request].place

    def close(self) -> None:
        with self._lock:
            self._extents.clear()
            self._prefixes = PrefixIndex()
            self._slabs.clear()
            self.promised_bytes = self.cached_bytes = self.idle_bytes = 0

    def key_values(self, layout: KvLayout) -> ArenaKeyValues:
        return ArenaKeyValues(self, layout)

    def reserve(self, layout: KvLayout, batch: TokenBatch) -> BatchOfExtents:
        with self._lock:
            extents = [checked_lease(self._extents.get(row.sequence), layout, row) for row in batch.rows]
            for extent, row in zip(extents, batch.rows, strict=True):
                self._hold(extent, row.end)
        return BatchOfExtents(layout, batch, extents)

    def _promise(self, request: int, layout: KvLayout, tokens: int) -> int:
        layout.check_length(request, tokens)
        return self.tokens_for(layout, tokens)

    def _hold(self, extent: KvExtent, tokens: int) -> None:
        extent.held = tokens
        extent.slab.touch(extent.number, tokens)

    def _begin(self, request: int, layout: KvLayout, promised: int, prefix: Prefix | None) -> int:
        best, common = self._prefixes.best(layout, prefix)
        wanted_bytes = promised * layout.token_bytes
        self._make_room(wanted_bytes, spared=best)
        if best is not None and self._free_bytes < wanted_bytes:
            extent = self._take_over(best, promised, common)  # there is room for one of the two
        else:
            extent = self._take(layout, promised)
            if best is not None:
                self._hold(extent, common)
                extent.tokens.copy_(best.held.slab.buffer[best.held.number, :, :, :, :common])
        self._extents[request] = extent
        self.promised_bytes += wanted_bytes
        return common

    @property
    def _free_bytes(self) -> int:
        return self.budget_bytes - self.promised_bytes - self.cached_bytes - self.idle_bytes

    def _make_room(self, wanted_bytes: int, spared: CachedPrefix[KvExtent] | None) -> None:
        """Free idle memory first, then prefixes, least recently used first. Raises MemoryExceeded."""
        kept_bytes = 0 if spared is None else spared.held.promised * spared.layout.token_bytes
        if self.budget_bytes - self.promised_bytes < wanted_bytes:
            raise MemoryExceeded("keys and values", wanted_bytes, self.budget_bytes - self.promised_bytes)
        if self._free_bytes < wanted_bytes:
            self._give_idle_back()
        for cached in self._prefixes.oldest_first:
            if self._free_bytes >= wanted_bytes:
                return
            if cached is not spared:
                self._drop(cached)
        assert self._free_bytes + kept_bytes >= wanted_bytes, "nothing else is counted"

    def _give_idle_back(self) -> None:
        for slab in (slab for slabs in self._slabs.values() for slab in slabs):
            for number in slab.free:
                if slab.touched[number]:
                    slab.give_back(number)
        self.idle_bytes = 0

    def _take(self, layout: KvLayout, promised: int) -> KvExtent:
        slabs = self._slabs.setdefault(layout, [])
        slab = next((slab for slab in slabs if slab.free), None)
        if slab is None:
            slab = self._new_slab(layout)
            slabs.append(slab)
        number = slab.free.pop(0)
        self.idle_bytes -= slab.touched[number] * layout.token_bytes
        if slab.touched[number] > promised:
            slab.give_back(number)
        return KvExtent(layout, slab, number, promised)

    def _take_over(self, cached: CachedPrefix[KvExtent], promised: int, held: int) -> KvExtent:
        self._prefixes.remove(cached)
        extent = cached.held
        self.cached_bytes -= extent.promised * extent.layout.token_bytes
        if extent.slab.touched[extent.number] > promised:
            kept = extent.slab.buffer[extent.number, :, :, :, :held].clone()
            extent.slab.give_back(extent.number)
            extent.slab.buffer[extent.number, :, :, :, :held] = kept
        extent.promised = promised
        self._hold(extent, held)
        return extent

    def _new_slab(self, layout: KvLayout) -> Slab:
        """Map a slab: extents as long as the longest request, fewer of them where address space is short."""
        most = min(layout.positions, self._most_bytes // layout.token_bytes)
        extents = EXTENTS_A_SLAB
        while True:
            try:
                slab = Slab(self._slab_count, layout, max(self.tokens_for(layout, most), _unit(layout)), extents)
            except OSError as error:
                if extents == 1:
                    raise AddressesExceeded(most * layout.token_bytes) from error
                extents //= 2
                continue
            self._slab_count += 1
            return slab

    def _make_idle(self, extent: KvExtent) -> None:
        insort(extent.slab.free, extent.number)
        self.idle_bytes += extent.slab.touched[extent.number] * extent.layout.token_bytes

    def _keep(self, extent: KvExtent, prefix: Prefix) -> None:
        """Cache a released request as a prefix, replacing prefixes that it contains, unless another contains it."""
        held = min(extent.held, len(prefix.tokens))
        kept = Prefix(prefix.weights, prefix.tokens[:held])
        replaced = self._prefixes.replaced_by(extent.layout, kept)
        if replaced is None:
            self._make_idle(extent)
            return
        for other in replaced:
            self._drop(other)
        extent.held, extent.promised = held, extent.slab.touched[extent.number]
        self._prefixes.add(extent.layout, kept, extent)
        self.cached_bytes += extent.promised * extent.layout.token_bytes

    def _drop(self, cached: CachedPrefix[KvExtent]) -> None:
        """Drop a prefix where room is short; its memory returns to the machine at once."""
        self._prefixes.remove(cached)
        extent = cached.held
        self.cached_bytes -= extent.promised * extent.layout.token_bytes
        extent.slab.give_back(extent.number)
        self._make_idle(extent)


class BatchOfExtents:
    def __init__(self, layout: KvLayout, batch: TokenBatch, extents: Sequence[KvExtent]) -> None:
        self._extents = extents
        self._batch, self._rows = batch, batch.rows
        first = batch.prefill_count
        self._copied = len(extents) if len(extents) == first + 1 else first  # rows that a copy each appends
        self._starts = (*batch.starts, batch.count)
        self._layout = layout

    @cached_property
    def sequences(self) -> Sequences:
        decoded = self._extents[self._batch.prefill_count :]
        addresses = [extent.slab.address + extent.number * extent.slab.extent_bytes for extent in decoded]
        lengths = [row.end for row in self._batch.decode_rows]
        positions = self._extents[0].slab.buffer.shape[-2]
        return Sequences(torch.tensor(addresses), torch.tensor(lengths), positions, self._layout.dtype)

    @cached_property
    def decode_layouts(self) -> tuple[DecodeLayout, ...]:
        return tuple(one.layout(self._layout.dtype) for one in self._ranges)

    @cached_property
    def _ranges(self) -> list[_ExtentRange]:
        call_positions = CALL_BYTES // (2 * self._layout.kv_heads * self._layout.head_bytes)
        decoded = self._extents[self._batch.prefill_count :]
        return _ranges(decoded, [row.end for row in self._batch.decode_rows], call_positions)

    @cached_property
    def _written(self) -> list[_Written]:
        """Places of the rows that no copy each appends."""
        return _Written.of(self._extents[self._copied :], self._batch.positions[self._starts[self._copied] :])

    def attended(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        if self._layout.dtype is not queries.dtype or not all(map(takes_attention, (queries, keys, values))):
            return None
        return attend(queries, keys, values, self.sequences, layer)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for number in range(self._copied):
            extent, row = self._extents[number], self._rows[number]
            run = slice(self._starts[number], self._starts[number + 1])
            extent.slab.keys[layer][extent.number, :, row.first : row.end] = keys[run].transpose(0, 1)
            extent.slab.values[layer][extent.number, :, row.first : row.end] = values[run].transpose(0, 1)
        for written in self._written:
            begin = self._starts[self._copied]
            mine = slice(None) if written.tokens is None else written.tokens
            written.slab.keys[layer][written.extent, :, written.position] = keys[begin:][mine]
            written.slab.values[layer][written.extent, :, written.position] = values[begin:][mine]

    def prefill(self, layer: int, row: int) -> Stored:
        slab, number, end = self._extents[row].slab, self._extents[row].number, self._rows[row].end
        return Stored(slab.keys[layer][number, :, :end], slab.values[layer][number, :, :end])

    def decode(self, layer: int, number: int) -> Stored:
        one = self._ranges[number]
        return Stored(one.of(one.slab.keys[layer]), one.of(one.slab.values[layer]))


@dataclass(frozen=True, slots=True)
class _Written:
    """Places of decode rows' tokens in one slab. ``tokens``: their numbers among the rows; None: all."""

    slab: Slab
    tokens: Tensor | None
    extent: Tensor
    position: Tensor

    @classmethod
    def of(cls, extents: Sequence[KvExtent], positions: Tensor) -> list[_Written]:
        numbers = torch.tensor([extent.number for extent in extents], dtype=torch.int64)
        slabs = {extent.slab.number: extent.slab for extent in extents}
        if len(slabs) == 1:
            return [cls(extents[0].slab, None, numbers, positions)]
        slab_of_row = torch.tensor([extent.slab.number for extent in extents])
        chosen = {number: (slab_of_row == number).nonzero().squeeze(1) for number in slabs}
        return [cls(slabs[n], rows, numbers[rows], positions[rows]) for n, rows in chosen.items()]


@dataclass(slots=True)
class _ExtentRange:
    """Neighbouring extents that are read in one call: the decode rows in it, with their extents and lengths."""

    slab: Slab
    rows: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    longest: int = 0

    def added_positions(self, slab: Slab, number: int, length: int) -> float:
        """Positions read in addition once the next extent joins the range, those between included."""
        if slab is not self.slab:
            return math.inf
        first, longest = self.numbers[0], max(self.longest, length)
        return (number - first + 1) * longest - (self.numbers[-1] - first + 1) * self.longest

    def add(self, row: int, number: int, length: int) -> None:
        self.rows.append(row)
        self.numbers.append(number)
        self.lengths.append(length)
        self.longest = max(self.longest, length)

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.numbers[0] : self.numbers[-1] + 1, :, : self.longest]

    def layout(self, dtype: torch.dtype) -> DecodeLayout:
        first = self.numbers[0]
        lengths = [1] * (self.numbers[-1] - first + 1)  # a row without any position is NaN
        for number, length in zip(self.numbers, self.lengths, strict=True):
            lengths[number - first] = length
        is_all = len(lengths) == len(self.numbers)
        places = None if is_all else torch.tensor([number - first for number in self.numbers])
        is_run = self.rows == list(range(self.rows[0], self.rows[0] + len(self.rows)))
        rows = slice(self.rows[0], self.rows[-1] + 1) if is_run else torch.tensor(self.rows)
        return DecodeLayout(mask_of(lengths, dtype), places, rows)


def _ranges(extents: Sequence[KvExtent], lengths: Sequence[int], call_positions: int) -> list[_ExtentRange]:
    """Ranges of extents; neighbours are joined if the extra bytes cost less than another call."""
    ranges: list[_ExtentRange] = []
    for row in sorted(range(len(extents)), key=lambda row: extents[row].place):
        slab, number, length = extents[row].slab, extents[row].number, lengths[row]
        if not ranges or ranges[-1].added_positions(slab, number, length) > length + call_positions:
            ranges.append(_ExtentRange(slab))
        ranges[-1].add(row, number, length)
    return ranges


class ModelKeyValues:
    """Keys and values of one model alone, outside any budget: each sequence may fill the whole context."""

    def __init__(self, spec: ArchSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._layout = KvLayout.of(spec, dtype)
        self._arena = arena_for(device, UNBOUNDED_BYTES, keeps_prefixes=False)
        self._is_mapped = isinstance(self._arena, ExtentArena)  # promises take addresses, and no memory
        self._begun: set[int] = set()

    def holds(self, sequence: int) -> bool:
        return sequence in self._begun

    def release(self, sequence: int) -> None:
        """Idempotent."""
        if sequence in self._begun:
            self._begun.remove(sequence)
            self._arena.release(sequence, is_sound=False)  # nobody says whether it is

    def reserve(self, batch: TokenBatch) -> BatchKeyValues:
        for row in batch.rows:
            tokens = self._layout.positions if self._is_mapped else row.end
            if row.sequence not in self._begun:
                self._arena.begin(row.sequence, self._layout, tokens)
                self._begun.add(row.sequence)
            elif not self._is_mapped:
                self._arena.grow(row.sequence, tokens)
        return self._arena.reserve(self._layout, batch)


def arena_for(device: torch.device | str, budget_bytes: int, *, keeps_prefixes: bool) -> KvArena:
    """Arena for models on this torch device."""
    if torch.device(device).type == "cpu":
        return ExtentArena(budget_bytes, keeps_prefixes=keeps_prefixes)
    return BlockArena(budget_bytes, device, keeps_prefixes=keeps_prefixes)


def _unit(layout: KvLayout) -> int:
    """Least number of tokens for which each head of each layer fills whole pages."""
    return mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, layout.head_bytes)
