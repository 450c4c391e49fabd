"""Attention whose layers differ in scope: a window of last positions, scaled scores, or scores capped by tanh.

Keys and values before a window stay stored, and are not read. Guarantees: a query sees itself and the ``window - 1``
positions before it, whether its token was read with a prompt, behind a cached prefix, or alone. Scores that are made in
memory are at most ``SCORES_AT_ONCE``, or one query's: a chunk of a prompt is read in blocks of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from experts.llm.attention import Attention, DecodeLayout, Stored, decode_attention, prefill_attention

if TYPE_CHECKING:
    from torch import Tensor

    from experts.llm.attention import BatchKeyValues
    from experts.llm.files.config import ArchSpec
    from experts.llm.token_batch import TokenBatch

SCORES_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True)
class AttentionScope:
    """``window``: last positions that a query sees; None: all. ``scale``: of scores; ``cap``: above them."""

    window: int | None
    scale: float
    cap: float | None

    def attend(self, queries: Tensor, stored: Stored, mask: Tensor | None) -> Tensor:
        """All (sequences, kv heads, queries or positions, head size); ``mask``: added to scores."""
        if self.cap is None:
            return scaled_dot_product_attention(
                queries, stored.keys, stored.values, attn_mask=None if mask is None else mask.to(queries.dtype),
                scale=self.scale,
            )  # fmt: skip
        scores = (queries @ stored.keys.transpose(-1, -2)).float() * self.scale
        scores = torch.tanh(scores / self.cap) * self.cap
        if mask is not None:
            scores = scores + mask
        return scores.softmax(dim=-1).to(queries.dtype) @ stored.values

    def mask(self, queries: Tensor, positions: Tensor) -> Tensor:
        """0 where a query at its position sees a position, minus infinity elsewhere; in fp32."""
        hidden = positions > queries
        if self.window is not None:
            hidden = hidden | (positions <= queries - self.window)
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


def scopes_of(spec: ArchSpec) -> tuple[AttentionScope, ...]:
    """By layer."""
    scale = spec.head_size**-0.5 if spec.score_scale is None else spec.score_scale
    return tuple(AttentionScope(layer.window, scale, spec.score_cap) for layer in spec.layers)


class ScopedAttention(Attention):
    """Attention of one batch."""

    is_plain = False

    def __init__(self, batch: TokenBatch, key_values: BatchKeyValues, scopes: tuple[AttentionScope, ...]) -> None:
        super().__init__(batch, key_values)
        self._scopes = scopes
        self._masks: dict[tuple[int, int | None], tuple[int, Tensor | None]] = {}  # by layout and window

    def _read(self, layer: int, row: int, queries: Tensor) -> Tensor:
        """A chunk of one sequence, at its end: (tokens, heads, head size)."""
        stored, scope = self._key_values.prefill(layer, row), self._scopes[layer]
        tokens, heads, head_size = queries.shape
        kv_heads, positions, _ = stored.keys.shape
        if scope.cap is None and (scope.window is None or positions <= scope.window):
            return prefill_attention(queries, stored, scope.scale)
        group, first, attended = heads // kv_heads, positions - tokens, torch.empty_like(queries)
        step = max(SCORES_AT_ONCE // (heads * min(positions, (scope.window or positions) + tokens)), 1)
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            begin, end = max(first + start + 1 - (scope.window or positions), 0), first + stop
            own = queries[start:stop].view(stop - start, kv_heads, group, head_size).permute(1, 2, 0, 3)
            folded = own.reshape(1, kv_heads, group * (stop - start), head_size)
            seen = Stored(stored.keys[None, :, begin:end], stored.values[None, :, begin:end])
            places = torch.arange(begin, end, device=queries.device)
            mask = scope.mask(places[first + start - begin :, None], places)
            found = scope.attend(folded, seen, mask.repeat(group, 1))
            attended[start:stop] = (
                found.view(kv_heads, group, stop - start, head_size).permute(2, 0, 1, 3).flatten(1, 2)
            )
        return attended

    def _decoded(self, layer: int, number: int, queries: Tensor) -> Tensor:
        stored, scope, layout = (
            self._key_values.decode(layer, number),
            self._scopes[layer],
            self._decode_layouts[number],
        )
        if (number, scope.window) not in self._masks:
            self._masks[number, scope.window] = self._decode_mask(layout, stored, scope)
        begin, mask = self._masks[number, scope.window]
        seen = Stored(stored.keys[:, :, begin:], stored.values[:, :, begin:])
        return decode_attention(queries, seen, DecodeLayout(mask, layout.places, layout.rows), scope.attend)

    def _decode_mask(self, layout: DecodeLayout, stored: Stored, scope: AttentionScope) -> tuple[int, Tensor | None]:
        """The first position that a row of the layout sees, and the mask from there on."""
        sequences, _, longest, _ = stored.keys.shape
        if scope.window is None or longest <= scope.window:
            return 0, layout.mask
        ends = [row.end for row in self._batch.decode_rows]
        own = ends[layout.rows] if isinstance(layout.rows, slice) else [ends[row] for row in layout.rows.tolist()]
        begin = max(min(own) - scope.window, 0)
        found = self._batch.positions[self._batch.decode_start :][layout.rows]
        last = found.new_full((sequences,), longest - 1)  # of a sequence between those of the rows: any
        last[slice(None) if layout.places is None else layout.places] = found
        return begin, scope.mask(last[:, None, None, None], torch.arange(begin, longest, device=last.device))
