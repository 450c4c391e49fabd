"""Attention of decode rows over keys and values in blocks that a table names (PagedAttention, arXiv 2309.06180).

Guarantees: no synchronisation after the first call. Numbers behind a sequence's end are not read as numbers: a block
may hold bytes of another model there, which can be NaN. A table's entries behind the last block may be any block's
number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from experts.llm.kernels.trial import takes_kernel

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
    if takes_kernel(queries, trial):
        from experts.llm.kernels.triton_kernels import attend  # needs Triton

        usual = queries.shape[-1] ** -0.5
        return attend(queries, keys, values, tables, lengths, longest, usual if scale is None else scale)
    rows, heads, size = queries.shape
    _, kv_heads, block_positions, _ = keys.shape
    used = -(-longest // block_positions)
    places = tables[:, None, :used], torch.arange(kv_heads, device=queries.device)[:, None]
    is_held = torch.arange(used * block_positions, device=queries.device) < lengths[:, None]
    lacks = ~is_held[:, None, :, None]
    keys, values = (whole[places].flatten(2, 3).masked_fill_(lacks, 0) for whole in (keys, values))
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=is_held[:, None, None], scale=scale)
    return attended.reshape(rows, heads, size)


def trial(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Results of two rows on this device, and exact ones: of one part, and of several that are joined."""
    from experts.llm.kernels.triton_kernels import attend

    generator = torch.Generator().manual_seed(0)
    longest, size = 600, 64
    blocks = -(-longest // 16)
    arena = torch.randn((blocks, 2, 2, 16, size), generator=generator).to(dtype)
    queries = torch.randn((2, 4, size), generator=generator).to(dtype)
    tables = torch.stack((torch.randperm(blocks, generator=generator), torch.ones(blocks))).to(torch.int32)
    lengths = torch.tensor([longest, 1], dtype=torch.int32)
    exact = attend_blocks(queries, arena[:, 0], arena[:, 1], tables, lengths, longest)
    queries, arena, tables, lengths = (one.to(device) for one in (queries, arena, tables, lengths))
    return attend(queries, arena[:, 0], arena[:, 1], tables, lengths, longest, size**-0.5), exact
