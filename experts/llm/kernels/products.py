"""Products with int8 and int4 matrices, and attention, by this CPU's instructions: ``products.c``, compiled when
CoServe is installed.

Guarantees: without the library, or on another CPU, there is no kernel, and nothing else changes: callers take torch's
way. The interpreter is not held while a product runs, and its threads are those of torch's operators.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = Path(__file__).with_name("libproducts.so")
SIZE_STEP, MOST_SIZE = 16, 512  # a head's size is a multiple of the first
DTYPES = (torch.float32, torch.bfloat16)
OPENMP = "libgomp.so.1"  # of torch's wheels on Linux


class ProductCall(ctypes.Structure):
    """``product`` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "norm", "values", "scale", "bias", "result", "room")),
        *((name, ctypes.c_int64) for name in ("count", "in_size", "out_size", "lanes", "room_bytes")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("is_bf16", "has_bf16_scale", "is_gated", "threads")),
    )


class AttentionCall(ctypes.Structure):
    """``attention`` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "result", "sequences", "lengths")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("count", "heads", "kv_heads", "size", "positions", "offset")),
        *((name, ctypes.c_int) for name in ("is_bf16", "threads")),
    )


class TurningCall(ctypes.Structure):
    """``turning`` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "norm", "other_norm", "cosine", "sine")),
        *((name, ctypes.c_int64) for name in ("stride", "count", "heads", "first_heads", "size")),
        ("epsilon", ctypes.c_float),
        ("is_bf16", ctypes.c_int),
    )


@lru_cache
def library() -> ctypes.CDLL | None:
    """The library, where this CPU has a kernel in it."""
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    found.coserve_kernel.argtypes, found.coserve_kernel.restype = [ctypes.c_void_p], ctypes.c_char_p
    for call in (found.coserve_product, found.coserve_attend, found.coserve_turn, found.coserve_pass):
        call.argtypes, call.restype = [ctypes.c_void_p], None
    return found if found.coserve_kernel(_team()) else None


def kernel() -> str | None:
    """Instruction set of this CPU's kernel; None: there is none."""
    found = library()
    name: bytes | None = None if found is None else found.coserve_kernel(_team())
    return None if name is None else name.decode()


def _team() -> ctypes.c_void_p | None:
    """Function that runs another one on each thread of torch's team; None: products have one thread."""
    try:
        return ctypes.cast(ctypes.CDLL(OPENMP, os.RTLD_NOLOAD).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


class StoredMatrix(Protocol):
    """A matrix of ``quant``. ``lanes``: 1 for int8, rows in a block for int4."""

    @property
    def values(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def lanes(self) -> int: ...
    @property
    def in_size(self) -> int: ...
    @property
    def out_size(self) -> int: ...


def product(
    rows: Tensor,
    matrix: StoredMatrix,
    room: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    is_gated: bool = False,
) -> Tensor:
    """(rows, in), or twice as wide before a gate, times one matrix: (rows, out).

    ``norm``: weight and epsilon. ``room``: bytes for one rounded row at least, 12 + 2 for each of its numbers.
    """
    found = library()
    assert found is not None, "callers ask for the kernel first"
    result = rows.new_empty((len(rows), matrix.out_size))
    asked = product_call(matrix, bias, norm, rows.dtype, is_gated=is_gated)
    asked.rows, asked.result, asked.count = rows.data_ptr(), result.data_ptr(), len(rows)
    asked.room, asked.room_bytes, asked.threads = room.data_ptr(), room.nbytes, torch.get_num_threads()
    found.coserve_product(ctypes.byref(asked))
    return result


def product_call(
    matrix: StoredMatrix, bias: Tensor | None, norm: tuple[Tensor, float] | None, dtype: torch.dtype, *, is_gated: bool
) -> ProductCall:
    """A product without its rows, which are in ``dtype``."""
    weight, epsilon = norm or (None, 0.0)
    return ProductCall(
        None, address(weight), matrix.values.data_ptr(), matrix.scale.data_ptr(), address(bias), None, None, 0,
        matrix.in_size, matrix.out_size, matrix.lanes if matrix.lanes > 1 else 0, 0, epsilon, dtype is torch.bfloat16,
        matrix.scale.dtype is torch.bfloat16, is_gated,
    )  # fmt: skip


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def takes_attention(heads: Tensor) -> bool:
    """True for heads, (tokens, heads, size), that ``attend`` and the changes in place read."""
    size, is_plain = heads.shape[-1], heads.dtype in DTYPES and heads.device.type == "cpu"
    is_near = is_plain and fits_attention(size) and heads.stride()[1:] == (size, 1)
    return is_near and not torch.is_grad_enabled() and library() is not None


def fits_attention(head_size: int) -> bool:
    return head_size % SIZE_STEP == 0 and head_size <= MOST_SIZE


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of single tokens, each with keys, then values, of ``positions`` for each head, layer by layer."""

    addresses: Tensor  # int64, of each token's sequence
    lengths: Tensor  # int64, with the token
    positions: int
    dtype: torch.dtype


def attend(queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, layer: int) -> Tensor:
    """Store single tokens at the ends of their sequences, and attend to all of these: (tokens, heads, size)."""
    found = library()
    assert found is not None, "callers ask first"
    result = queries.new_empty(queries.shape)
    asked = attention_call(queries, keys, values, result, sequences)
    asked.offset = layer * 2 * keys.shape[1] * sequences.positions * keys.shape[2]
    found.coserve_attend(ctypes.byref(asked))
    return result


def attention_call(
    queries: Tensor, keys: Tensor, values: Tensor, result: Tensor, sequences: Sequences
) -> AttentionCall:
    """Of the first layer."""
    return AttentionCall(
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), result.data_ptr(), sequences.addresses.data_ptr(),
        sequences.lengths.data_ptr(), queries.stride(0), keys.stride(0), values.stride(0), len(queries),
        queries.shape[1], keys.shape[1], queries.shape[2], sequences.positions, 0, queries.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip


def norm_heads(heads: Tensor, first_heads: int, norms: tuple[Tensor, Tensor], epsilon: float) -> None:
    """Normalise each head in place: the first by the first of ``norms``, those behind them by the other."""
    first, other = norms
    _turn(heads, first.data_ptr(), other.data_ptr(), None, None, first_heads=first_heads, epsilon=epsilon)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate each head in place, as ``model.Rotation`` does."""
    _turn(heads, None, None, cosine.data_ptr(), sine.data_ptr())


def _turn(heads: Tensor, *addresses: int | None, first_heads: int = 0, epsilon: float = 0.0) -> None:
    """``addresses``: of both norms, cosine and sine."""
    found = library()
    assert found is not None, "callers ask first"
    found.coserve_turn(ctypes.byref(turning_call(heads, *addresses, first_heads=first_heads, epsilon=epsilon)))


def turning_call(heads: Tensor, *addresses: int | None, first_heads: int, epsilon: float) -> TurningCall:
    count, number, size = heads.shape
    is_bf16 = heads.dtype is torch.bfloat16
    return TurningCall(
        heads.data_ptr(), *addresses, heads.stride(0), count, number, first_heads, size, epsilon, is_bf16
    )
