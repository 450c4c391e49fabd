"""Attention of decode rows over keys and values in blocks that a table names (PagedAttention, arXiv 2309.06180).

Guarantees: no synchronisation. Numbers behind a sequence's end are not read as numbers: a block may hold bytes of
another model there, which can be NaN. A table's entries behind the last block may be any block's number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor


def attend_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float | None = None,
) -> Tensor:
    """Attention of one query for each row, to the row's first ``lengths`` positions: (rows, heads, size), in and out.

    ``keys``, ``values``: (blocks, kv heads, positions in a block, size), strided in the blocks. ``tables``: numbers of
    a row's blocks, (rows, blocks of the longest at least) int32. ``lengths``: (rows) int32, at least 1, and ``longest``
    is their largest or more. ``scale``: of scores, if another than usual.
    """
    rows, heads, size = queries.shape
    _, kv_heads, block_positions, _ = keys.shape
    used = -(-longest // block_positions)
    places = tables[:, None, :used], torch.arange(kv_heads, device=queries.device)[:, None]
    is_held = torch.arange(used * block_positions, device=queries.device) < lengths[:, None]
    gathered = (whole[places].flatten(2, 3) for whole in (keys, values))
    cleared = [one.masked_fill_(~is_held[:, None, :, None], 0) for one in gathered]
    grouped = queries.view(rows, kv_heads, heads // kv_heads, size)
    attended = scaled_dot_product_attention(grouped, *cleared, attn_mask=is_held[:, None, None], scale=scale)
    return attended.reshape(rows, heads, size)
