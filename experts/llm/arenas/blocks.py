"""Arena of devices: keys and values of all models in blocks of one buffer, which a table names (arXiv 2309.06180).

A block holds 16 positions in all layers. It may begin at any unit of the buffer, which numbers it: models of different
layouts divide the bytes as they need them. Running texts and cached prefixes share full blocks of a common beginning;
whatever writes into a shared block gets a copy first.

Example: a text of 40 tokens is released, and its three blocks stay as a prefix. A second text begins with 36 of these
tokens. Its table names the first two blocks, and a third one, into which 4 positions are copied.

Guarantees: promises never exceed the budget. They count shared blocks for each text, so there is room for every copy.
A request that fits the budget finds room: prefixes are evicted, and blocks are moved where blocks of another size left
gaps. Only blocks of a batch under way stay where they are: while another thread runs one between the gaps, a request
may have to wait. A taken block is zeroed, so no bytes of a released request are ever read. Only identical weights share
a prefix. A lower budget returns no memory. Nothing waits for the device, and releases do not touch it: it may be lost.
Streams of CUDA have not yet run on hardware.
"""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from experts.devices.graphs import CAPTURING
from experts.errors import MemoryExceeded
from experts.llm.arenas.key_values import ArenaKeyValues, KvLayout, Prefix, PrefixIndex, checked_lease
from experts.llm.attention import DecodeLayout, Stored
from experts.llm.kernels.block_attention import attend_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from torch import Tensor

    from experts.llm.arenas.key_values import CachedPrefix
    from experts.llm.token_batch import TokenBatch

BLOCK_POSITIONS = 16
UNIT_BYTES = 128  # a cache line: every block of usual heads is a whole number of them
UNBOUNDED_BYTES = sys.maxsize  # a budget without a buffer of its size: the buffer grows
FIRST_UNITS = 2**13  # of such a buffer


@dataclass(slots=True, eq=False)
class Block:
    """Block at the unit ``number``. ``texts``, ``prefixes``: how many tables of each name it."""

    number: int
    units: int
    texts: int = 0
    prefixes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.units * UNIT_BYTES


@dataclass(slots=True)
class BlockTable:
    """Lease of a request: its blocks, in the order of its positions."""

    layout: KvLayout
    blocks: list[Block] = field(default_factory=list)
    held: int = 0

    @property
    def promised(self) -> int:
        return len(self.blocks) * BLOCK_POSITIONS


class BufferStreams:
    """CUDA streams whose work uses one buffer. Elsewhere work has one order, and nothing is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[torch.cuda.Stream] = set()

    def join(self) -> torch.cuda.Stream | None:
        """Count the current stream among them."""
        if self._device.type != "cuda" or not torch.cuda.is_available():
            return None
        current = torch.cuda.current_stream(self._device)
        self._streams.add(current)
        return current

    @contextmanager
    def passing_bytes_on(self) -> Iterator[None]:
        """Order work of the current stream behind all work of the others so far, and before all that comes."""
        if (current := self.join()) is None:
            yield
            return
        others = [stream for stream in self._streams if stream != current]
        with CAPTURING:  # a stream that waits for one which captures would be captured
            for stream in others:
                current.wait_stream(stream)
            yield
            for stream in others:
                stream.wait_stream(current)


class BlockBuffer:
    """Bytes on a device, and the blocks that are taken of them. Places and sizes are in units."""

    def __init__(self, device: torch.device, units: int) -> None:
        self.device = device
        self.streams = BufferStreams(device)
        self._bytes = self._allocated(units)
        self._gaps = [(0, units)] if units else []
        self._blocks: set[Block] = set()
        self._views: dict[KvLayout, Tensor] = {}

    def view(self, layout: KvLayout) -> Tensor:
        """All blocks that there may be, by number: (blocks, layers, keys and values, kv heads, positions, size)."""
        if layout not in self._views:
            block = (layout.layers, 2, layout.kv_heads, BLOCK_POSITIONS, layout.head_size)
            shape = (max(self._units - units_of(layout) + 1, 0), *block)
            strides = (UNIT_BYTES // layout.dtype.itemsize, *(math.prod(block[n + 1 :]) for n in range(len(block))))
            with torch.inference_mode(False):  # also written outside a model's pass
                self._views[layout] = self._bytes.view(layout.dtype).as_strided(shape, strides)
        return self._views[layout]

    def take(self, units: int, count: int, *, is_high: bool, kept: Collection[Block]) -> list[Block]:
        """Zeroed blocks, if need be after moving others but ``kept``; fewer than ``count`` only for these.

        ``is_high``: from the end of the buffer. Layouts that come from both ends seldom leave gaps to each other.
        """
        runs, gaps = self._fitting(units, count, is_high)
        if _total(runs) < count:
            self._close_gaps(kept)
            runs, gaps = self._fitting(units, count, is_high)
        self._gaps = gaps
        taken = [Block(number, units) for run in runs for number in run]
        self._blocks.update(taken)
        for run in runs:
            self._of(run.start, len(run) * units).zero_()
        return taken

    def give(self, blocks: Collection[Block]) -> None:
        self._blocks.difference_update(blocks)
        ends = [(block.number, block.number + block.units) for block in blocks]
        self._gaps = _joined(sorted([*self._gaps, *ends]))

    def copy(self, layout: KvLayout, source: Block, target: Block, positions: int) -> None:
        view = self.view(layout)
        view[target.number, ..., :positions, :] = view[source.number, ..., :positions, :]

    def lengthen(self, units: int) -> None:
        """Add at least so many units. Batches made before do not see what is stored behind it."""
        before = self._bytes
        self._gaps = _joined([*self._gaps, (self._units, self._units + max(units, self._units))])
        self._bytes = self._allocated(self._gaps[-1][1])
        self._bytes[: len(before)] = before
        self._views.clear()

    @property
    def _units(self) -> int:
        return len(self._bytes) // UNIT_BYTES

    def _allocated(self, units: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(units * UNIT_BYTES, dtype=torch.uint8, device=self.device)

    def _of(self, number: int, units: int) -> Tensor:
        return self._bytes[number * UNIT_BYTES : (number + units) * UNIT_BYTES]

    def _fitting(self, units: int, count: int, is_high: bool) -> tuple[list[range], list[tuple[int, int]]]:
        """Numbers of up to ``count`` blocks, in runs, and the gaps that they leave."""
        runs: list[range] = []
        gaps = []
        for start, stop in reversed(self._gaps) if is_high else self._gaps:
            fits = min((stop - start) // units, count - _total(runs))
            first = stop - fits * units if is_high else start
            if fits:
                runs.append(range(first, first + fits * units, units))
            gaps.append((start, first) if is_high else (first + fits * units, stop))
        return runs, sorted(gap for gap in gaps if gap[0] < gap[1])

    def _close_gaps(self, kept: Collection[Block]) -> None:
        """Move blocks to the front, except ``kept``: the gaps become one, and those before a kept block."""
        end, gaps = 0, []
        for block in sorted(self._blocks, key=lambda block: block.number):
            if block.number > end and block in kept:
                gaps.append((end, block.number))
            elif block.number > end:
                self._of(end, block.units).copy_(self._of(block.number, block.units).clone())
                block.number = end
            end = block.number + block.units
        self._gaps = [*gaps, (end, self._units)] if end < self._units else gaps


class BlockArena:
    """Arena of any torch device; see there."""

    def __init__(self, budget_bytes: int, device: torch.device | str = "cpu", *, keeps_prefixes: bool = True) -> None:
        """``budget_bytes``: allocated at once; UNBOUNDED_BYTES: allocated as requests begin."""
        self.budget_bytes = self._most_bytes = budget_bytes
        self.promised_bytes = self.cached_bytes = 0
        self.idle_bytes = 0  # there is nothing to give back
        self.keeps_prefixes = keeps_prefixes
        self._lock = Lock()
        units = FIRST_UNITS if budget_bytes == UNBOUNDED_BYTES else budget_bytes // UNIT_BYTES
        self._buffer = BlockBuffer(torch.device(device), units)
        self._tables: dict[int, BlockTable] = {}
        self._prefixes: PrefixIndex[list[Block]] = PrefixIndex()
        self._layouts: dict[KvLayout, bool] = {}  # whether the layout comes from the buffer's end
        self._running: WeakSet[BatchOfBlocks] = WeakSet()  # batches that somebody still reads

    def set_budget(self, budget_bytes: int) -> None:
        with self._lock:
            self.budget_bytes = min(budget_bytes, self._most_bytes)
            self._evict()

    def tokens_for(self, layout: KvLayout, tokens: int) -> int:
        return math.ceil(tokens / BLOCK_POSITIONS) * BLOCK_POSITIONS

    def begin(self, request: int, layout: KvLayout, tokens: int, prefix: Prefix | None = None) -> int:
        with self._lock:
            if request in self._tables:
                raise ValueError(f"request {request} has begun")
            layout.check_length(request, tokens)
            best, common = self._prefixes.best(layout, prefix)
            table, (full, rest) = BlockTable(layout), divmod(common, BLOCK_POSITIONS)
            self._promise(table, tokens, best.held[:full] if best else (), best)
            table.held = common - rest
            if best and best.held and rest:  # it is not evicted
                table.held = common
                with self._buffer.streams.passing_bytes_on():
                    self._buffer.copy(layout, best.held[full], table.blocks[full], rest)
            self._tables[request] = table
            return table.held

    def grow(self, request: int, tokens: int) -> None:
        with self._lock:
            table = self._tables[request]
            table.layout.check_length(request, tokens)
            if tokens > table.promised:
                self._promise(table, tokens)

    def share(self, request: int, source: int, tokens: int) -> None:
        with self._lock, self._buffer.streams.passing_bytes_on():
            own, other = self._tables[request], self._tables[source]
            full, rest = divmod(tokens, BLOCK_POSITIONS)
            self._name(other.blocks[:full])
            replaced, own.blocks[:full] = own.blocks[:full], other.blocks[:full]
            self._unname(replaced)
            if rest:
                self._own(own, full, 0)
                self._buffer.copy(own.layout, other.blocks[full], own.blocks[full], rest)
            own.held = tokens

    def release(self, request: int, prefix: Prefix | None = None, *, is_sound: bool = True) -> None:
        with self._lock:
            table = self._tables.pop(request, None)
            if table is None:
                return
            if is_sound and prefix is not None and self.keeps_prefixes:
                self._keep(table, prefix)
            self.promised_bytes -= _bytes(table.blocks)
            self._unname(table.blocks)
            self._evict()

    def holds(self, request: int) -> bool:
        return request in self._tables

    def place(self, request: int) -> tuple[int, int]:
        return 0, request  # any order is read in one call

    def close(self) -> None:
        with self._lock:
            self._tables.clear()
            self._prefixes = PrefixIndex()
            self._buffer = BlockBuffer(self._buffer.device, 0)
            self.promised_bytes = self.cached_bytes = 0

    def key_values(self, layout: KvLayout) -> ArenaKeyValues:
        return ArenaKeyValues(self, layout)

    def reserve(self, layout: KvLayout, batch: TokenBatch) -> BatchOfBlocks:
        with self._lock:
            tables = [checked_lease(self._tables.get(row.sequence), layout, row) for row in batch.rows]
            for table, row in zip(tables, batch.rows, strict=True):
                for place in range(row.first // BLOCK_POSITIONS, math.ceil(row.end / BLOCK_POSITIONS)):
                    self._own(table, place, max(row.first - place * BLOCK_POSITIONS, 0))
                table.held = row.end
            self._buffer.streams.join()
            reserved = BatchOfBlocks(layout, batch, [table.blocks for table in tables], self._buffer.view(layout))
            self._running.add(reserved)
            return reserved

    def _promise(
        self,
        table: BlockTable,
        tokens: int,
        shared: Sequence[Block] = (),
        spared: CachedPrefix[list[Block]] | None = None,
    ) -> None:
        """Give a table room for ``tokens`` in all, beginning with ``shared``. ``spared``: evicted last."""
        further = self.tokens_for(table.layout, tokens) // BLOCK_POSITIONS - len(table.blocks)
        units, room_bytes = units_of(table.layout), self.budget_bytes - self.promised_bytes
        if room_bytes < (wanted_bytes := further * units * UNIT_BYTES):
            raise MemoryExceeded("keys and values", wanted_bytes, room_bytes)
        self._name(shared)
        self.promised_bytes += wanted_bytes
        self._evict(spared)
        taken = self._take(table.layout, further - len(shared))
        self._name(taken)
        if len(taken) < further - len(shared):
            self.promised_bytes -= wanted_bytes
            self._unname([*shared, *taken])
            raise MemoryExceeded("keys and values", wanted_bytes, _bytes(taken))
        table.blocks += [*shared, *taken]

    def _take(self, layout: KvLayout, count: int) -> list[Block]:
        is_high = self._layouts.setdefault(layout, len(self._layouts) % 2 == 1)
        units = units_of(layout)
        kept = {block for batch in self._running for blocks in batch.blocks for block in blocks}
        with self._buffer.streams.passing_bytes_on():
            taken = self._buffer.take(units, count, is_high=is_high, kept=kept)
            if len(taken) < count and self._most_bytes == UNBOUNDED_BYTES:
                self._buffer.lengthen(units * count)
                taken += self._buffer.take(units, count - len(taken), is_high=is_high, kept=kept)
        return taken

    def _own(self, table: BlockTable, place: int, positions: int) -> None:
        """Give a table a copy of a shared block, with its first positions, before it is written."""
        shared = table.blocks[place]
        if shared.texts == 1 and shared.prefixes:  # then it is the prefixes' alone
            self._evict(further_bytes=shared.size_bytes)
        if shared.texts + shared.prefixes == 1:
            return
        if not (taken := self._take(table.layout, 1)):
            raise MemoryExceeded("keys and values", shared.size_bytes, 0)
        self._name(taken)
        if positions:
            self._buffer.copy(table.layout, shared, taken[0], positions)
        table.blocks[place] = taken[0]
        self._unname([shared])

    def _name(self, blocks: Iterable[Block]) -> None:
        """Count one more text's table that names these."""
        for block in blocks:
            self.cached_bytes -= block.size_bytes if block.prefixes and not block.texts else 0
            block.texts += 1

    def _unname(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.texts -= 1
            self.cached_bytes += block.size_bytes if block.prefixes and not block.texts else 0
        self._buffer.give([block for block in blocks if not block.texts + block.prefixes])

    def _keep(self, table: BlockTable, prefix: Prefix) -> None:
        """Cache a request's blocks as a prefix, replacing prefixes that it contains, unless another contains it."""
        held = min(table.held, len(prefix.tokens))
        kept = Prefix(prefix.weights, prefix.tokens[:held])
        replaced = self._prefixes.replaced_by(table.layout, kept)
        if replaced is None:
            return
        for other in replaced:
            self._drop(other)
        blocks = table.blocks[: math.ceil(held / BLOCK_POSITIONS)]
        for block in blocks:
            block.prefixes += 1
        self._prefixes.add(table.layout, kept, blocks)

    def _evict(self, spared: CachedPrefix[list[Block]] | None = None, further_bytes: int = 0) -> None:
        """Drop prefixes, least recently used first, ``spared`` last, until those kept fit beside the promises."""
        for cached in sorted(self._prefixes.oldest_first, key=lambda one: one is spared):
            if self.promised_bytes + self.cached_bytes + further_bytes <= self.budget_bytes:
                return
            self._drop(cached)

    def _drop(self, cached: CachedPrefix[list[Block]]) -> None:
        self._prefixes.remove(cached)
        for block in cached.held:
            block.prefixes -= 1
        unread = [block for block in cached.held if not block.texts + block.prefixes]
        self.cached_bytes -= _bytes(unread)
        self._buffer.give(unread)
        cached.held = []


class BatchOfBlocks:
    """Numbers that a batch needs of its tables go to the device with the batch's own, in one copy."""

    sequences = None

    def __init__(self, layout: KvLayout, batch: TokenBatch, tables: Sequence[Sequence[Block]], view: Tensor) -> None:
        used = [math.ceil(row.end / BLOCK_POSITIONS) for row in batch.rows]
        self.blocks = [table[:count] for table, count in zip(tables, used, strict=True)]
        self._batch = batch
        self._keys, self._values = ([view[:, layer, which] for layer in range(layout.layers)] for which in (0, 1))
        self._appended = -1  # last layer that all tokens were stored in
        numbers = [[block.number for block in blocks] for blocks in self.blocks]
        positions = [(row, n) for row, one in enumerate(batch.rows) for n in range(one.first, one.end)]
        blocks = [numbers[row][n // BLOCK_POSITIONS] for row, n in positions]
        add = batch.numbers.add
        self._places_part = add(torch.tensor([blocks, [n % BLOCK_POSITIONS for _, n in positions]]))
        first = batch.prefill_count
        self._table_parts = [add(torch.tensor(one, dtype=torch.int32)) for one in numbers[:first]]
        self._lengths = [row.end for row in batch.decode_rows]
        if self._lengths:
            self._longest, most = max(self._lengths), max(used[first:])
            padded = [[*one, *one[:1] * (most - len(one))] for one in numbers[first:]]  # no other text's numbers
            self._decode_parts = [add(torch.tensor(each, dtype=torch.int32)) for each in (padded, self._lengths)]

    @cached_property
    def decode_layouts(self) -> tuple[DecodeLayout, ...]:
        if not self._lengths:
            return ()
        _, lengths = self._decode_numbers
        if min(self._lengths) == self._longest:
            return (DecodeLayout(None, None),)
        lacks = torch.arange(self._longest, device=lengths.device) >= lengths[:, None]
        mask = self._keys[0].new_zeros(lacks.shape).masked_fill_(lacks, -torch.inf)
        return (DecodeLayout(mask[:, None, None, :], None),)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Of each token: its block, and its position in that."""
        blocks, positions = self._batch.numbers[self._places_part]
        return blocks, positions

    @cached_property
    def _decode_numbers(self) -> tuple[Tensor, Tensor]:
        tables, lengths = (self._batch.numbers[part] for part in self._decode_parts)
        return tables, lengths

    @property
    def address(self) -> int:
        return int(self._keys[0].data_ptr())

    @property
    def decode_inputs(self) -> tuple[Tensor, ...]:
        """Numbers of single tokens on the device, rows first: for ``at_inputs``."""
        return *self._places, *self._decode_numbers

    def at_inputs(self, blocks: Tensor, positions: Tensor, tables: Tensor, lengths: Tensor) -> BatchOfBlocks:
        """Keys and values of the single tokens that these name; ``tables`` may be wider than the longest needs."""
        other = copy(self)
        other._places, other._decode_numbers = (blocks, positions), (tables, lengths)
        other._longest = tables.shape[1] * BLOCK_POSITIONS
        return other

    def attended(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        own_keys, own_values = self._keys[layer], self._values[layer]
        if own_keys.dtype is not queries.dtype:
            return None
        if layer != self._appended:
            self._store(layer, keys, values, slice(self._batch.decode_start, None))
        return attend_blocks(queries, own_keys, own_values, *self._decode_numbers, self._longest)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._store(layer, keys, values, slice(None))
        self._appended = layer

    def _store(self, layer: int, keys: Tensor, values: Tensor, tokens: slice) -> None:
        blocks, positions = (place[tokens] for place in self._places)
        self._keys[layer][blocks, :, positions] = keys
        self._values[layer][blocks, :, positions] = values

    def prefill(self, layer: int, row: int) -> Stored:
        table, end = self._batch.numbers[self._table_parts[row]], self._batch.rows[row].end
        keys, values = (_gathered(whole[layer], table)[:, :end] for whole in (self._keys, self._values))
        return Stored(keys, values)

    def decode(self, layer: int, number: int) -> Stored:
        tables, longest = self._decode_numbers[0], self._longest
        keys, values = (
            _gathered(whole[layer], tables.flatten()).unflatten(1, (len(tables), -1)).transpose(0, 1)[:, :, :longest]
            for whole in (self._keys, self._values)
        )
        return Stored(keys, values)


def units_of(layout: KvLayout) -> int:
    """Units of a block."""
    return math.ceil(BLOCK_POSITIONS * layout.token_bytes / UNIT_BYTES)


def _gathered(whole: Tensor, numbers: Tensor) -> Tensor:
    """Blocks one after the other: (kv heads, positions, size)."""
    heads = torch.arange(whole.shape[1], device=numbers.device)
    return whole[numbers, heads[:, None]].flatten(1, 2)  # without a copy of the view, which is larger than the buffer


def _total(runs: Iterable[range]) -> int:
    return sum(len(run) for run in runs)


def _bytes(blocks: Iterable[Block]) -> int:
    return sum(block.size_bytes for block in blocks)


def _joined(gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Gaps in their order, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in gaps:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined
