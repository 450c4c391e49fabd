"""Triton kernels of a device: attention over blocks, and products with int8 and int4 matrices as a CPU packed them.

Importing needs Triton. Not yet run on hardware: see ``experts.llm.kernels.trial``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 16  # rows of a hardware's smallest product
TILE_BYTES = 16 * 2**10  # of keys: two such tiles, read ahead thrice, fit the 99 KiB of a consumer's card
MOST_PROGRAMS = 1024  # by which long work is divided: several for each of 132 multiprocessors
LEAST_PART = tl.constexpr(512)  # positions, or columns of a matrix, of one program
FUSES = True  # sums of products are rounded once; Triton's own default changes with its versions
COLUMN_BYTES = 256  # of a tile's row
GROUP = tl.constexpr(32)  # of an int4 matrix
MIDDLE = tl.constexpr(8)
LOG2_E, LN_2 = 1.4426950408889634, tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["tables", "lengths", "table_stride", "part"])  # not compiled for each place of these
def attended(
    queries, keys, values, tables, lengths, result, sums, scale, table_stride, block_stride, head_stride, part,
    size: tl.constexpr, group: tl.constexpr, block_positions: tl.constexpr,
    width: tl.constexpr, lanes: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Attention of one row's queries of one key head to one part of its positions (arXiv 2205.14135).

    ``sums``: logarithm of each query's sum, by which parts are joined. ``scale``: of binary exponents.
    """
    row, kv_head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, dims = tl.arange(0, lanes), tl.arange(0, width)
    is_dim = (dims < size)[None, :]
    is_query = heads < group
    first = (row * tl.num_programs(1) + kv_head) * group
    own = tl.load(queries + (first + heads)[:, None] * size + dims[None, :], mask=is_query[:, None] & is_dim, other=0)
    part *= LEAST_PART
    stop = tl.minimum(tl.load(lengths + row), (number + 1) * part)
    largest = tl.full((lanes,), float("-inf"), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    mean = tl.zeros((lanes, width), tl.float32)
    for position in range(number * part, stop, tile):
        positions = position + tl.arange(0, tile)
        is_held = positions < stop
        blocks = tl.load(tables + row * table_stride + positions // block_positions, mask=is_held, other=0)
        places = blocks.to(tl.int64) * block_stride + kv_head * head_stride + positions % block_positions * size
        places = places[:, None] + dims[None, :]
        is_read = is_held[:, None] & is_dim
        key = tl.load(keys + places, mask=is_read, other=0)
        scores = tl.dot(own, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(is_held[None, :], scores, float("-inf"))
        raised = tl.maximum(largest, tl.max(scores, 1))
        shrunk = tl.exp2(largest - raised)
        weights = tl.exp2(scores - raised[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        value = tl.load(values + places, mask=is_read, other=0)
        mean = mean * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = raised
    mean = mean / tl.maximum(total, 1e-30)[:, None]  # a part behind a sequence's end has none
    first += number * tl.num_programs(0) * tl.num_programs(1) * group
    tl.store(sums + first + heads, (largest + tl.log2(total)) * LN_2, mask=is_query)
    places = (first + heads)[:, None] * size + dims[None, :]
    tl.store(result + places, mean.to(result.dtype.element_ty), mask=is_query[:, None] & is_dim)


@triton.jit(do_not_specialize=["ends", "count", "part"])
def multiplied(
    rows, values, scale, ends, result, count, in_size, out_size, part,
    matrices: tl.constexpr, padded: tl.constexpr, lanes: tl.constexpr,
    row_tile: tl.constexpr, out_tile: tl.constexpr, in_tile: tl.constexpr,
):  # fmt: skip
    """Some rows of one matrix, times some of its rows, over a part of its columns.

    ``lanes``: of int4's blocks, which are a tile each; 1: int8. ``ends``: where each matrix's rows end, if not None.
    """
    tile, block, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    matrix, first, stop = 0, tile * row_tile, count
    if ends is not None:
        numbers = tl.arange(0, padded)
        own_ends = tl.load(ends + numbers, mask=numbers < matrices, other=0)
        begins = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < matrices), other=0)
        tiles = tl.cumsum((own_ends - begins + row_tile - 1) // row_tile)
        matrix = tl.sum((tiles <= tile).to(tl.int32))
        if matrix >= matrices:  # fewer tiles have rows than might have
            return
        is_own = numbers == matrix
        tile -= tl.sum(tl.where(numbers == matrix - 1, tiles, 0))
        first = tl.sum(tl.where(is_own, begins, 0)) + tile * row_tile
        stop = tl.sum(tl.where(is_own, own_ends, 0))
    places = first + tl.arange(0, row_tile)
    is_row = (places < stop)[:, None]
    outs = block * out_tile + tl.arange(0, out_tile)
    is_out = (outs < out_size)[None, :]
    own_rows = rows + places.to(tl.int64)[:, None] * in_size
    numbers_before = matrix * in_size.to(tl.int64) * out_size
    found = tl.zeros((row_tile, out_tile), tl.float32)
    part *= LEAST_PART  # known to be aligned, so that loads are wide
    for column in range(number * part, tl.minimum(in_size, (number + 1) * part), in_tile):
        columns = column + tl.arange(0, in_tile)
        is_column = columns < in_size
        own = tl.load(own_rows + columns[None, :], mask=is_row & is_column[None, :], other=0)
        if lanes == 1:
            own_values = values + numbers_before + outs.to(tl.int64)[None, :] * in_size + columns[:, None]
            weights = tl.load(own_values, mask=is_column[:, None] & is_out, other=0)
            weights = weights.to(tl.float32).to(own.dtype)
        else:
            lines = block * in_size + columns.to(tl.int64)
            own_bytes = values + numbers_before // 2 + lines[:, None] * (lanes // 2)
            both = tl.load(own_bytes + tl.arange(0, lanes // 2)[None, :], mask=is_column[:, None], other=0)
            levels = tl.permute(tl.join(both & 15, both >> 4), (0, 2, 1)).to(tl.float32)
            levels = tl.reshape(levels, (in_tile // GROUP, GROUP, lanes))
            groups = column // GROUP + tl.arange(0, in_tile // GROUP)
            is_group = groups < in_size // GROUP
            own_scale = scale + numbers_before // GROUP * 2 + (groups[:, None] * out_size + outs[None, :]) * 2
            step = tl.load(own_scale, mask=is_group[:, None], other=0).to(tl.float32)
            middle = tl.load(own_scale + 1, mask=is_group[:, None], other=0).to(tl.float32)
            weights = (levels - MIDDLE) * step[:, None, :] + middle[:, None, :]
            weights = tl.reshape(weights, (in_tile, lanes)).to(own.dtype)
        found = tl.dot(own, weights, found, input_precision="ieee")
    if lanes == 1:
        found *= tl.load(scale + matrix * out_size + outs, mask=outs < out_size, other=0).to(tl.float32)[None, :]
    own_result = result + (number * count + places).to(tl.int64)[:, None] * out_size + outs[None, :]
    tl.store(own_result, found.to(result.dtype.element_ty), mask=is_row & is_out)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, longest: int, scale: float
) -> Tensor:
    """``block_attention.attend_blocks``, by kernels."""
    rows, heads, size = queries.shape
    _, kv_heads, block_positions, _ = keys.shape
    strides = keys.stride()
    assert strides == values.stride(), "keys and values lie alike"
    assert strides[2:] == (size, 1), "a head's positions lie together"
    width = triton.next_power_of_2(size)
    tile = min(max(TILE_BYTES // (width * keys.itemsize), LEAST), 64)
    part, parts = _parts(longest, rows * kv_heads)
    result = queries.new_empty((parts, rows, heads, size), dtype=torch.float32 if parts > 1 else queries.dtype)
    sums = queries.new_empty((parts, rows, heads), dtype=torch.float32)
    group = heads // kv_heads
    with torch.cuda.device_of(queries):
        attended[rows, kv_heads, parts](
            queries.contiguous(), keys, values, tables, lengths, result, sums, scale * LOG2_E, tables.stride(0),
            *strides[:2], part, size, group, block_positions, width,
            max(triton.next_power_of_2(group), LEAST), tile, enable_fp_fusion=FUSES,
        )  # fmt: skip
    return result[0] if parts == 1 else (result * sums.softmax(dim=0).unsqueeze(-1)).sum(dim=0).to(queries.dtype)


def multiply(rows: Tensor, values: Tensor, scale: Tensor, ends: Tensor | None) -> Tensor:
    """``device_products.grouped_product`` of int8, or int4, whose ``values`` are uint8."""
    is_int4 = values.dtype is torch.uint8
    lanes = 2 * values.shape[-1] if is_int4 else 1
    out_size = scale.shape[-2] if is_int4 else scale.shape[-1]
    count, in_size = rows.shape
    matrices = 1 if ends is None else len(ends)
    is_few = count <= 2 * LEAST * matrices or rows.itemsize > 2  # fp32 has no registers for more
    row_tile = LEAST if is_few else 4 * LEAST
    tiles = triton.cdiv(count, row_tile) if ends is None else count // row_tile + min(matrices, count)
    out_tile = max(lanes, 32)
    blocks = triton.cdiv(out_size, out_tile)
    part, parts = _parts(in_size, tiles * blocks)
    result = rows.new_empty((parts, count, out_size), dtype=torch.float32 if parts > 1 else rows.dtype)
    with torch.cuda.device_of(rows):
        multiplied[tiles, blocks, parts](
            rows.contiguous(), values, scale, ends, result, count, in_size, out_size, part,
            matrices, triton.next_power_of_2(matrices), lanes, row_tile, out_tile,
            COLUMN_BYTES // rows.itemsize, enable_fp_fusion=FUSES,
        )  # fmt: skip
    return result[0] if parts == 1 else result.sum(dim=0).to(rows.dtype)


def _parts(whole: int, programs: int) -> tuple[int, int]:
    """Length, in least parts, and number of the parts, of which each program has one; bounds their workspace, too."""
    least_parts = triton.cdiv(whole, LEAST_PART.value)
    part = triton.cdiv(least_parts, max(MOST_PROGRAMS // programs, 1))
    return part, triton.cdiv(least_parts, part)
