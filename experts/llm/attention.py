"""Attention over rows, with several queries to a key (grouped-query attention, arXiv 2305.13245).

``KeyValues`` is the seam to scheduling: a model reserves room once an iteration, then appends and reads layer by layer
(arenas: ``experts.llm.arenas.key_values``). A decode batch is one scaled_dot_product_attention. Queries that share a
key's head are moved into the query length: on a CPU ``enable_gqa`` costs 1.45 times that in fp32 and 8.7 times in bf16
(16 rows, 512 positions, 16 heads on 4).

On a CPU a chunk of a prompt attends to the positions before it and to itself apart. Both parts are joined by the
logarithms of their sums, as FlashAttention joins blocks (arXiv 2205.14135, section 3.1). So no mask of chunk times
context is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from experts.llm.kernels.products import Sequences
    from experts.llm.token_batch import TokenBatch

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # returns the sums' logarithms as well


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys and values of one layer, each (sequences, kv heads, positions, head size); for one row without the first."""

    keys: Tensor
    values: Tensor


Attend: TypeAlias = "Callable[[Tensor, Stored, Tensor | None], Tensor]"  # of queries, and with a mask


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """Places of some decode rows in the tensors of ``decode``, equal for every layer."""

    mask: Tensor | None  # (sequences, 1, 1, positions), added: 0 where a sequence has a token; None: everywhere
    places: Tensor | None  # sequence of each row; None: row i is sequence i, and there are no others
    rows: slice | Tensor = field(default_factory=lambda: slice(None))  # of the decode rows, counted from the first


class BatchKeyValues(Protocol):
    """The keys and values that one batch writes and reads."""

    @property
    def decode_layouts(self) -> Sequence[DecodeLayout]:
        """Division of the decode rows: each row is in one layout, and each layout is one call of attention."""

    @property
    def sequences(self) -> Sequences | None:
        """Where the decode rows' sequences are; None: not for reading them by address."""

    def attended(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        """Store the decode rows and attend in one call, if the processor can; else None."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the batch's tokens, (tokens, kv heads, head size), in its order."""

    def prefill(self, layer: int, row: int) -> Stored:
        """A prefill row's sequence up to the row's end: (kv heads, positions, head size)."""

    def decode(self, layer: int, number: int) -> Stored:
        """The sequences of the decode rows of one of the ``decode_layouts``."""


class KeyValues(Protocol):
    """Keys and values of all sequences of one model."""

    def holds(self, sequence: int) -> bool:
        """True from a sequence's beginning to its release."""

    def reserve(self, batch: TokenBatch) -> BatchKeyValues:
        """Reserve room for a batch. A row before its sequence's end cuts the sequence; beyond its end: ValueError."""


class Attention:
    """Attention of one batch: its layouts are equal in all layers, and made once."""

    is_plain = True  # of all positions, with usual scores

    def __init__(self, batch: TokenBatch, key_values: BatchKeyValues) -> None:
        self._batch = batch
        self._key_values = key_values

    @cached_property
    def _decode_layouts(self) -> Sequence[DecodeLayout]:
        return self._key_values.decode_layouts if self._batch.decode_rows else ()

    @property
    def _is_one_call(self) -> bool:
        """True if the layouts are one, of all decode rows in their order."""
        return len(self._decode_layouts) == 1 and isinstance(self._decode_layouts[0].rows, slice)

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values, then attend causally; all (tokens, heads or kv heads, head size)."""
        batch = self._batch
        if not batch.prefill_count and (at_once := self._at_once(layer, queries, keys, values)) is not None:
            return at_once
        self._key_values.append(layer, keys, values)
        if not batch.prefill_count and self._is_one_call:
            return self._decoded(layer, 0, queries)
        attended = torch.empty_like(queries)
        for number, (row, start) in enumerate(zip(batch.prefill_rows, batch.starts, strict=False)):
            tokens = slice(start, start + row.count)
            attended[tokens] = self._read(layer, number, queries[tokens])
        own = slice(batch.decode_start, None)
        if batch.decode_rows and (at_once := self._at_once(layer, queries[own], keys[own], values[own])) is not None:
            attended[own] = at_once
            return attended
        queries, decoded = queries[own], attended[own]
        for number, layout in enumerate(self._decode_layouts):
            decoded[layout.rows] = self._decoded(layer, number, queries[layout.rows])
        return attended

    def _at_once(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        return self._key_values.attended(layer, queries, keys, values) if self.is_plain else None

    def _read(self, layer: int, row: int, queries: Tensor) -> Tensor:
        return prefill_attention(queries, self._key_values.prefill(layer, row))

    def _decoded(self, layer: int, number: int, queries: Tensor) -> Tensor:
        return decode_attention(queries, self._key_values.decode(layer, number), self._decode_layouts[number])


def decode_attention(queries: Tensor, stored: Stored, layout: DecodeLayout, attend: Attend | None = None) -> Tensor:
    """Attention of one query token for each sequence: (rows, heads, head size), in and out.

    ``attend``: instead of scaled_dot_product_attention.
    """
    rows, heads, head_size = queries.shape
    sequences, kv_heads, _, _ = stored.keys.shape
    grouped = queries.view(rows, kv_heads, heads // kv_heads, head_size)
    if layout.places is not None:
        placed = grouped.new_zeros((sequences, *grouped.shape[1:]))
        placed[layout.places] = grouped
        grouped = placed
    if attend is None:
        attended = scaled_dot_product_attention(grouped, stored.keys, stored.values, attn_mask=layout.mask)
    else:
        attended = attend(grouped, stored, layout.mask)
    if layout.places is not None:
        attended = attended[layout.places]
    return attended.reshape(rows, heads, head_size)


def prefill_attention(queries: Tensor, stored: Stored, scale: float | None = None) -> Tensor:
    """A chunk of one sequence, at its end: (tokens, heads, head size). ``scale``: of scores, if another than usual."""
    tokens, heads, head_size = queries.shape
    kv_heads, positions, _ = stored.keys.shape
    group, first = heads // kv_heads, positions - tokens
    queries = queries.contiguous()  # the kernel reads rows of numbers that lie together
    grouped = queries.view(tokens, kv_heads, group, head_size).permute(1, 2, 0, 3)
    if queries.device.type != "cpu":
        attended = _read_on_device(grouped, stored, scale)
        return attended.permute(2, 0, 1, 3).reshape(tokens, heads, head_size)
    keys, values = (
        whole[:, first:].unsqueeze(1).expand(kv_heads, group, tokens, head_size)
        for whole in (stored.keys, stored.values)
    )
    attended, sums = flash_attention(grouped, keys, values, is_causal=True, scale=scale)
    if first:
        folded = grouped.reshape(1, kv_heads, group * tokens, head_size)
        before = flash_attention(folded, stored.keys[None, :, :first], stored.values[None, :, :first], scale=scale)
        share = (before[1].view_as(sums) - sums).sigmoid().unsqueeze(-1)  # of the positions before, in fp32
        attended = torch.lerp(attended.float(), before[0].view_as(attended).float(), share).to(queries.dtype)
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, head_size)


def _read_on_device(queries: Tensor, stored: Stored, scale: float | None) -> Tensor:
    """Attention of a chunk at its sequence's end; queries and result (kv heads, group, tokens, head size).

    A device's kernels take a mask of chunk times context at the rate of their products.
    """
    tokens, (kv_heads, positions, head_size) = queries.shape[2], stored.keys.shape
    shape = (kv_heads, queries.shape[1], positions, head_size)
    keys, values = (whole.unsqueeze(1).expand(shape) for whole in (stored.keys, stored.values))
    if positions == tokens:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    places = torch.arange(positions, device=queries.device)
    is_seen = places <= places[positions - tokens :, None]
    return scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen, scale=scale)


def mask_of(lengths: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Mask of the positions that sequences of these lengths lack, for DecodeLayout."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    lacks = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    return torch.zeros(lacks.shape, dtype=dtype).masked_fill_(lacks, -torch.inf)[:, None, None, :]
