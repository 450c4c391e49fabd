"""Attention over blocks: as over one row of keys and values, whatever lies in the blocks behind a sequence's end."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from experts.llm.kernels.block_attention import attend_blocks

POSITIONS = 16
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def arena_of(lengths, kv_heads, size, dtype, seed=0):
    """Keys, values and tables of sequences that share one layered arena, NaN where no sequence has a position."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // POSITIONS) for length in lengths]
    numbers = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32)
    arena = torch.full((len(numbers), 2, 2, kv_heads, POSITIONS, size), torch.nan, dtype=dtype)
    tables = numbers[-1].repeat(len(lengths), max(counts) + 1)
    stored = []
    for row, (length, own) in enumerate(zip(lengths, numbers.split([*counts, 2]), strict=False)):
        tables[row, : len(own)] = own
        whole = torch.randn((2, kv_heads, length, size), generator=generator).to(dtype)
        for position in range(length):
            arena[own[position // POSITIONS], 1, :, :, position % POSITIONS] = whole[:, :, position]
        stored.append(whole)
    return arena[:, 1, 0], arena[:, 1, 1], tables, stored


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "size", "scale"),
    [((1,), 2, 2, 16, None), ((33, 1, 16, 250), 12, 4, 96, 0.3), ((17, 40), 5, 1, 80, None), ((100,), 8, 2, 256, 1.0)],
)
def test_blocks_behind_a_table_are_attended_like_one_row(lengths, heads, kv_heads, size, scale, dtype):
    keys, values, tables, stored = arena_of(lengths, kv_heads, size, dtype)
    queries = torch.randn((len(lengths), heads, size), generator=torch.Generator().manual_seed(1)).to(dtype)
    held = torch.tensor(lengths, dtype=torch.int32)
    found = attend_blocks(queries, keys, values, tables, held, max(lengths), scale)
    for row, (own_keys, own_values) in enumerate(stored):
        grouped = queries[row].view(kv_heads, heads // kv_heads, size).float()
        exact = scaled_dot_product_attention(grouped, own_keys.float(), own_values.float(), scale=scale)
        error = (found[row].float() - exact.view(heads, size)).abs().max()
        assert found.dtype is dtype
        assert error <= TOLERANCES[dtype] * exact.abs().max()
