"""Keys and values in blocks with a table for each request, for GPUs: all blocks of a memory are alike.

One buffer is taken once and cut into blocks of equally many bytes. A layout has as many tokens in a block as fit, and
sees all blocks through one strided view of its own, so a block goes from any model to any other and nothing is lost to
fragments (PagedAttention, arXiv 2309.06180, section 4, with bytes instead of tokens as unit). Prefixes share blocks:
full ones are nodes of a tree of their tokens, counted by their readers; the least recently used without one goes first.

Guarantees, beside the arena's: a block is wiped before it is written for another, so numbers of one model are never
read as another's; a shared block is never written. Attention gathers what it reads, which costs a copy of it: a kernel
that reads through the tables would save that. On CUDA this was never run; it was tested on the CPU, where it runs, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import TYPE_CHECKING

import torch

from experts.errors import MemoryExceeded
from experts.llm.key_values import DecodeLayout, Stored, mask_of
from experts.llm.serving.kv import ArenaKeyValues, KvStatistics, Swapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from experts.llm.serving.kv import KvLayout, Prefix
    from experts.llm.token_batch import Row, TokenBatch

BLOCK_BYTES = 2 * 2**20  # 16 tokens of a model with 32 layers of 8 key and value heads of 128 in bf16


@dataclass(eq=False, slots=True)
class PrefixNode:
    """One full block of a text that was read, below those before it. ``readers``: requests that have it now."""

    block: int
    tokens: tuple[int, ...]
    parent: PrefixNode | None
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    readers: int = 0
    used: int = 0


@dataclass(slots=True)
class Table:
    """One request's blocks: those that it shares first, its own after them."""

    layout: KvLayout
    promised: int  # blocks
    shared: list[PrefixNode]
    own: list[int]
    held: int = 0  # tokens

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self.shared] + self.own


class BlockArena:
    """All blocks of one memory. ``keeps_prefixes``: whether what is released is kept while there is room."""

    def __init__(
        self, budget_bytes: int, device: torch.device | str = "cuda", *, block_bytes: int = BLOCK_BYTES,
        keeps_prefixes: bool = True,
    ) -> None:  # fmt: skip
        self._block_bytes = block_bytes
        self._count = budget_bytes // block_bytes
        self._keeps_prefixes = keeps_prefixes
        self._buffer = torch.zeros((self._count, block_bytes), dtype=torch.uint8, device=device)
        self._free = list(range(self._count))[::-1]
        self._lock = Lock()
        self._views: dict[KvLayout, Tensor] = {}
        self._tables: dict[int, Table] = {}
        self._swapped: dict[int, Swapped] = {}
        self._roots: dict[tuple[KvLayout, str], PrefixNode] = {}
        self._promised = self._uses = self._hits = self._hit_tokens = 0

    @property
    def budget_bytes(self) -> int:
        return self._count * self._block_bytes

    def set_budget(self, budget_bytes: int) -> None:
        self._count = min(budget_bytes // self._block_bytes, len(self._buffer))

    def tokens_for(self, layout: KvLayout, tokens: int) -> int:
        taken_bytes = self._blocks_for(layout, tokens) * self._block_bytes
        return -(-taken_bytes // layout.token_bytes)

    def begin(self, request: int, layout: KvLayout, tokens: int, prefix: Prefix | None = None) -> int:
        with self._lock:
            if request in self._tables or request in self._swapped:
                raise ValueError(f"request {request} has begun")
            if tokens > layout.positions:
                raise ValueError(f"request {request} wants {tokens} tokens, its context is {layout.positions}")
            shared = self._common(layout, prefix)
            return self._begin(request, layout, self._blocks_for(layout, tokens), shared)

    def grow(self, request: int, tokens: int) -> None:
        with self._lock:
            table = self._tables[request]
            if tokens > table.layout.positions:
                raise ValueError(f"request {request} wants {tokens} tokens, its context is {table.layout.positions}")
            further = max(self._blocks_for(table.layout, tokens) - table.promised, 0)
            self._check_room(further)
            table.own.extend(self._take(further))
            table.promised += further
            self._promised += further

    def release(self, request: int, prefix: Prefix | None = None, *, is_sound: bool = True) -> None:
        with self._lock:
            self._swapped.pop(request, None)
            table = self._tables.pop(request, None)
            if table is None:
                return
            if is_sound and prefix is not None and self._keeps_prefixes:
                self._keep(table, prefix)
            self._give_back(table)

    def swap_out(self, request: int) -> None:
        with self._lock:
            table = self._tables.pop(request)
            self._swapped[request] = Swapped(table.layout, table.promised, self._tokens(table).cpu())
            self._give_back(table)

    def swap_in(self, request: int) -> int:
        with self._lock:
            swapped = self._swapped[request]
            self._begin(request, swapped.layout, swapped.promised, [])
            table = self._tables[request]
            self._write(table, swapped.tokens)
            del self._swapped[request]
            return table.held

    def place(self, request: int) -> tuple[int, int]:
        return 0, request  # any order is as good as another: what is read is gathered

    def key_values(self, layout: KvLayout) -> ArenaKeyValues:
        return ArenaKeyValues(self, layout)

    def forget_prefixes(self, weights: str | None = None) -> None:
        with self._lock:
            chosen = [root for (_, whose), root in self._roots.items() if weights in (None, whose)]
            for node in reversed([node for root in chosen for node in _below(root)]):
                if _is_droppable(node):
                    self._drop(node)

    def statistics(self) -> KvStatistics:
        with self._lock:
            cached = [node for root in self._roots.values() for node in _below(root)]
            unread = sum(not node.readers for node in cached)
            return KvStatistics(
                self.budget_bytes, self._promised * self._block_bytes, unread * self._block_bytes, 0,
                sum(one.tokens.nbytes for one in self._swapped.values()), len(self._tables) + len(self._swapped),
                len(cached), self._hits, self._hit_tokens,
            )  # fmt: skip

    def reserve(self, layout: KvLayout, batch: TokenBatch) -> BatchOfBlocks:
        with self._lock:
            tables = [self._table_for(layout, row) for row in batch.rows]
            for table, row in zip(tables, batch.rows, strict=True):
                table.held = row.end
            return BatchOfBlocks(self.view(layout), batch, [table.blocks for table in tables])

    def view(self, layout: KvLayout) -> Tensor:
        """All blocks as this layout has them: (blocks, layers, keys and values, kv heads, tokens, size)."""
        if layout not in self._views:
            with torch.inference_mode(False):  # a view that a model's pass asked for is written outside of it, too
                self._views[layout] = self._new_view(layout)
        return self._views[layout]

    def _new_view(self, layout: KvLayout) -> Tensor:
        inner = (layout.layers, 2, layout.kv_heads, self._block_tokens(layout), layout.head_size)
        typed = self._buffer.view(layout.dtype)
        return typed[:, : math.prod(inner)].unflatten(1, inner)

    def _table_for(self, layout: KvLayout, row: Row) -> Table:
        table = self._tables.get(row.sequence)
        if table is None or table.layout != layout:
            raise ValueError(f"request {row.sequence} has not begun with this layout")
        if row.first > table.held:
            raise ValueError(f"request {row.sequence} holds {table.held} tokens, a row begins at {row.first}")
        tokens = self._block_tokens(layout)
        if row.first < len(table.shared) * tokens:
            raise ValueError(f"request {row.sequence} shares {len(table.shared) * tokens} tokens, a row is before them")
        if row.end > table.promised * tokens:
            promised = table.promised * tokens
            raise ValueError(f"request {row.sequence} was promised {promised} tokens, a row ends at {row.end}")
        return table

    def _begin(self, request: int, layout: KvLayout, promised: int, shared: list[PrefixNode]) -> int:
        self._check_room(promised)
        for node in shared:
            self._uses += 1
            node.readers, node.used = node.readers + 1, self._uses
        own = self._take(promised - len(shared))
        held = len(shared) * self._block_tokens(layout)
        self._tables[request] = Table(layout, promised, shared, own, held)
        self._promised += promised
        self._hits += bool(shared)
        self._hit_tokens += held
        return held

    def _check_room(self, blocks: int) -> None:
        free = self._count - self._promised
        if blocks > free:
            raise MemoryExceeded("keys and values", blocks * self._block_bytes, free * self._block_bytes)

    def _take(self, count: int) -> list[int]:
        """Wiped blocks."""
        if len(self._free) < count:
            self._drop_prefixes(count)
        taken = [self._free.pop() for _ in range(count)]
        self._buffer[torch.tensor(taken, dtype=torch.int64, device=self._buffer.device)] = 0
        return taken

    def _give_back(self, table: Table) -> None:
        for node in table.shared:
            node.readers -= 1
        self._free.extend(table.own)
        self._promised -= table.promised

    def _common(self, layout: KvLayout, wanted: Prefix | None) -> list[PrefixNode]:
        """The blocks of a prefix that are there, from its beginning on."""
        shared: list[PrefixNode] = []
        if wanted is None or (layout, wanted.weights) not in self._roots:
            return shared
        node = self._roots[layout, wanted.weights]
        for tokens in _blocks_of(wanted.tokens, self._block_tokens(layout)):
            if tokens not in node.children:
                break
            node = node.children[tokens]
            shared.append(node)
        return shared

    def _keep(self, table: Table, prefix: Prefix) -> None:
        """Its full blocks become nodes, but where there is one of the same tokens already."""
        tokens = self._block_tokens(table.layout)
        node = self._roots.setdefault((table.layout, prefix.weights), PrefixNode(-1, (), None))
        blocks = table.blocks
        for place, each in enumerate(_blocks_of(prefix.tokens[: table.held], tokens)):
            if each not in node.children:
                if blocks[place] not in table.own:
                    return
                table.own.remove(blocks[place])
                node.children[each] = PrefixNode(blocks[place], each, node)
            node = node.children[each]
            self._uses += 1
            node.used = self._uses

    def _drop(self, node: PrefixNode) -> None:
        assert node.parent is not None, "a root has no block"
        del node.parent.children[node.tokens]
        self._free.append(node.block)

    def _drop_prefixes(self, count: int) -> None:
        """Drop unread prefixes until so many blocks are free: least recently used first, ends first."""
        below = (node for root in self._roots.values() for node in _below(root))
        ends = [(node.used, node.block, node) for node in below if _is_droppable(node)]
        heapify(ends)
        while len(self._free) < count:
            _, _, node = heappop(ends)
            self._drop(node)
            if node.parent is not None and _is_droppable(node.parent):
                heappush(ends, (node.parent.used, node.parent.block, node.parent))

    def _tokens(self, table: Table) -> Tensor:
        blocks = self.view(table.layout)[torch.tensor(table.blocks, device=self._buffer.device)]
        return blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : table.held]

    def _write(self, table: Table, tokens: Tensor) -> None:
        view, width = self.view(table.layout), self._block_tokens(table.layout)
        table.held = tokens.shape[3]
        for place, block in enumerate(table.blocks):
            part = tokens[:, :, :, place * width : (place + 1) * width]
            view[block, :, :, :, : part.shape[3]] = part

    def _blocks_for(self, layout: KvLayout, tokens: int) -> int:
        return -(-tokens // self._block_tokens(layout))

    def _block_tokens(self, layout: KvLayout) -> int:
        tokens = self._block_bytes // layout.token_bytes
        if not tokens:
            raise ValueError(
                f"a token takes {layout.token_bytes} bytes, a block has {self._block_bytes}: larger blocks"
            )
        return tokens


class BatchOfBlocks:
    def __init__(self, view: Tensor, batch: TokenBatch, tables: Sequence[Sequence[int]]) -> None:
        device, width = view.device, view.shape[4]
        self._keys = [view[:, layer, 0] for layer in range(view.shape[1])]
        self._values = [view[:, layer, 1] for layer in range(view.shape[1])]
        self._rows = batch.rows
        self._tables = [
            torch.tensor(table[: -(-row.end // width)], device=device)
            for table, row in zip(tables, batch.rows, strict=True)
        ]
        rows = torch.arange(len(batch.rows), device=device)
        row_of_token = rows.repeat_interleave(torch.tensor([row.count for row in batch.rows], device=device))
        self._block = _padded(self._tables)[row_of_token, batch.positions // width]
        self._offset = batch.positions % width
        self._decode_table = _padded(self._tables[batch.prefill_count :]) if batch.decode_rows else None
        lengths = [row.end for row in batch.decode_rows]
        self._longest = max(lengths, default=0)
        self._layouts = (DecodeLayout(mask_of(lengths, device), None),) if lengths else ()

    @property
    def decode_layouts(self) -> Sequence[DecodeLayout]:
        return self._layouts

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._keys[layer][self._block, :, self._offset] = keys
        self._values[layer][self._block, :, self._offset] = values

    def prefill(self, layer: int, row: int) -> Stored:
        table, end = self._tables[row][None], self._rows[row].end
        keys, values = _gathered(self._keys[layer], table, end), _gathered(self._values[layer], table, end)
        return Stored(keys[0], values[0])

    def decode(self, layer: int, number: int) -> Stored:
        assert self._decode_table is not None, "a layout has rows"
        table, longest = self._decode_table, self._longest
        return Stored(_gathered(self._keys[layer], table, longest), _gathered(self._values[layer], table, longest))


def _gathered(blocks: Tensor, table: Tensor, positions: int) -> Tensor:
    """(rows, kv heads, positions, size) of the blocks that a table (rows, blocks) names."""
    return blocks[table].transpose(1, 2).flatten(2, 3)[:, :, :positions]


def _padded(tables: Sequence[Tensor]) -> Tensor:
    """Tables of one length: behind its end a row has its own first block again, whose numbers are its own."""
    longest = max(len(table) for table in tables)
    return torch.stack([torch.cat((table, table[:1].expand(longest - len(table)))) for table in tables])


def _blocks_of(tokens: tuple[int, ...], width: int) -> Iterator[tuple[int, ...]]:
    return (tokens[start : start + width] for start in range(0, len(tokens) - width + 1, width))


def _is_droppable(node: PrefixNode) -> bool:
    return node.parent is not None and not node.readers and not node.children


def _below(node: PrefixNode) -> Iterator[PrefixNode]:
    """Those above before those below."""
    waiting = list(node.children.values())
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(one.children.values())
