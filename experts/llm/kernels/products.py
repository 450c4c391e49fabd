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
from typing import TYPE_CHECKING, Protocol

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
    weight, epsilon = norm or (None, 0.0)
    asked = _Product(
        rows.data_ptr(), None if weight is None else weight.data_ptr(), matrix.values.data_ptr(),
        matrix.scale.data_ptr(), None if bias is None else bias.data_ptr(), result.data_ptr(), room.data_ptr(),
        len(rows), matrix.in_size, matrix.out_size, matrix.lanes if matrix.lanes > 1 else 0, room.nbytes, epsilon,
        rows.dtype is torch.bfloat16, matrix.scale.dtype is torch.bfloat16, is_gated, torch.get_num_threads(),
    )  # fmt: skip
    found.coserve_product(ctypes.byref(asked))
    return result


def takes_attention(heads: Tensor) -> bool:
    """True for heads, (tokens, heads, size), that ``attend`` and the changes in place read."""
    size, is_plain = heads.shape[-1], heads.dtype is torch.float32 and heads.device.type == "cpu"
    is_near = is_plain and size % SIZE_STEP == 0 and heads.stride()[1:] == (size, 1)
    return is_near and not torch.is_grad_enabled() and library() is not None


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, sequences: tuple[Tensor, Tensor], *, positions: int, offset: int
) -> Tensor:
    """Store single tokens at the ends of their sequences, and attend to all of these: (tokens, heads, size).

    ``sequences``: address of each token's sequence, and its length with the token, int64. A sequence has for each layer
    keys, then values, of ``positions`` for each head. ``offset``: numbers to the layer.
    """
    found = library()
    assert found is not None, "callers ask first"
    result = queries.new_empty(queries.shape)
    asked = _Attention(
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), result.data_ptr(), sequences[0].data_ptr(),
        sequences[1].data_ptr(), queries.stride(0), keys.stride(0), values.stride(0), len(queries), queries.shape[1],
        keys.shape[1], queries.shape[2], positions, offset, torch.get_num_threads(),
    )  # fmt: skip
    found.coserve_attend(ctypes.byref(asked))
    return result


def norm_heads(heads: Tensor, first_heads: int, norms: tuple[Tensor, Tensor], epsilon: float) -> None:
    """Normalise each head in place: the first by the first of ``norms``, those behind them by the other."""
    first, other = norms
    _turn(heads, first.data_ptr(), other.data_ptr(), None, None, first_heads=first_heads, epsilon=epsilon)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate each head in place, as ``model.Rotation`` does."""
    _turn(heads, None, None, cosine.data_ptr(), sine.data_ptr())


def _turn(heads: Tensor, *addresses: int | None, first_heads: int = 0, epsilon: float = 0.0) -> None:
    """``addresses``: of both norms, cosine and sine."""
    found, (count, number, size) = library(), heads.shape
    assert found is not None, "callers ask first"
    asked = _Turning(heads.data_ptr(), *addresses, heads.stride(0), count, number, first_heads, size, epsilon)
    found.coserve_turn(ctypes.byref(asked))
