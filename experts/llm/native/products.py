"""Products with int8 and int4 matrices, and attention, by this CPU's instructions: ``products.c``, compiled when
CoServe is installed.

Guarantees: without the library, or on another CPU, there is no kernel, and nothing else changes: callers take torch's
way. The interpreter is not held while a product runs, and its threads are those of torch's operators.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = Path(__file__).with_name("libproducts.so")
SIZE_STEP = 16  # a head's size is a multiple of it
OPENMP = "libgomp.so.1"  # of torch's wheels on Linux


class _Product(ctypes.Structure):
    """``product`` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "norm", "values", "scale", "bias", "result", "room")),
        *((name, ctypes.c_int64) for name in ("count", "in_size", "out_size", "lanes", "room_bytes")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("is_bf16", "has_bf16_scale", "is_gated", "threads")),
    )


class _Attention(ctypes.Structure):
    """``attention`` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "result", "sequences", "lengths")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("count", "heads", "kv_heads", "size", "positions", "offset")),
        ("threads", ctypes.c_int),
    )


class _Turning(ctypes.Structure):
    """``turning`` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "norm", "other_norm", "cosine", "sine")),
        *((name, ctypes.c_int64) for name in ("stride", "count", "heads", "first_heads", "size")),
        ("epsilon", ctypes.c_float),
    )


@lru_cache
def library() -> ctypes.CDLL | None:
    """The library, where this CPU has a kernel in it."""
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    found.coserve_kernel.argtypes, found.coserve_kernel.restype = [ctypes.c_void_p], ctypes.c_char_p
    for call in (found.coserve_product, found.coserve_attend, found.coserve_turn):
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


def product(
    rows: Tensor,
    values: Tensor,
    scale: Tensor,
    room: Tensor,
    *,
    lanes: int = 0,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    is_gated: bool = False,
) -> Tensor:
    """(rows, in) times one matrix as ``quant`` holds it: (rows, out). ``lanes``: of an int4 matrix.

    ``norm``: weight and epsilon. ``room``: bytes for one rounded row at least, 12 + 2 for each of its numbers.
    """
    found = library()
    assert found is not None, "callers ask for the kernel first"
    count, width = rows.shape
    in_size, out_size = (width // 2 if is_gated else width), scale.shape[-2] if lanes else scale.shape[-1]
    result = rows.new_empty((count, out_size))
    weight, epsilon = norm or (None, 0.0)
    asked = _Product(
        rows.data_ptr(), None if weight is None else weight.data_ptr(), values.data_ptr(), scale.data_ptr(),
        None if bias is None else bias.data_ptr(), result.data_ptr(), room.data_ptr(), count, in_size, out_size, lanes,
        room.nbytes, epsilon, rows.dtype is torch.bfloat16, scale.dtype is torch.bfloat16, is_gated,
        torch.get_num_threads(),
    )  # fmt: skip
    found.coserve_product(ctypes.byref(asked))
    return result


def takes_attention(heads: Tensor) -> bool:
    """True for heads, (tokens, heads, size), that ``attend`` and the changes in place read."""
    size, is_plain = heads.shape[-1], heads.dtype is torch.float32 and heads.device.type == "cpu"
    is_near = is_plain and size % SIZE_STEP == 0 and heads.stride()[1:] == (size, 1)
    return is_near and not torch.is_grad_enabled() and library() is not None


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, sequences: Tensor, lengths: Tensor, *, positions: int, offset: int
) -> Tensor:
    """Store single tokens at the ends of their sequences, and attend to all of these: (tokens, heads, size).

    ``sequences``: address of each token's sequence: by layer its keys, then its values, of ``positions`` for each head.
    ``lengths``: with the token. Both are int64. ``offset``: numbers to the layer.
    """
    found = library()
    assert found is not None, "callers ask first"
    result = queries.new_empty(queries.shape)
    asked = _Attention(
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), result.data_ptr(), sequences.data_ptr(),
        lengths.data_ptr(), queries.stride(0), keys.stride(0), values.stride(0), len(queries), queries.shape[1],
        keys.shape[1], queries.shape[2], positions, offset, torch.get_num_threads(),
    )  # fmt: skip
    found.coserve_attend(ctypes.byref(asked))
    return result


def norm_heads(heads: Tensor, first_heads: int, norm: Tensor, other_norm: Tensor, epsilon: float) -> None:
    """Normalise each head in place, the first by ``norm``, those behind them by ``other_norm``."""
    _turn(heads, norm.data_ptr(), other_norm.data_ptr(), None, None, first_heads, epsilon)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate each head in place, as ``model.Rotation`` does."""
    _turn(heads, None, None, cosine.data_ptr(), sine.data_ptr(), 0, 0.0)


def _turn(
    heads: Tensor, norm: int | None, other_norm: int | None, cosine: int | None, sine: int | None, first_heads: int,
    epsilon: float,
) -> None:  # fmt: skip
    found, (count, number, size) = library(), heads.shape
    assert found is not None, "callers ask first"
    asked = _Turning(
        heads.data_ptr(), norm, other_norm, cosine, sine, heads.stride(0), count, number, first_heads, size, epsilon
    )
    found.coserve_turn(ctypes.byref(asked))
