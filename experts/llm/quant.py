"""Weight-only int8: matrices of one byte per number, with one scale per output channel; activations keep their dtype.

Guarantees: all ways of multiplying compute the same, up to rounding of rows and products: compiled products
(``experts.llm.kernels``), torch's kernels of few rows, and blocks. A scale is rounded before its channel's numbers, so
the error of a number is at most half a step, a 254th of the channel's largest. Only matrices are quantised, and a tied
embedding together with its head. No more than ``BLOCK_BYTES`` of a matrix, on a device ``DEVICE_BLOCK_BYTES``, or one
block of a kernel's rows, are numbers of the dtype at once, in each thread. int4 is ``experts.llm.kernels.four_bits``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from experts.llm.files.names import EMBEDDING, HEAD
from experts.llm.kernels.device_products import grouped_product, takes_grouped_product
from experts.llm.kernels.four_bits import GROUP, Int4Matrix, fits_four_bits, has_int4_kernel, quantise_to_four_bits
from experts.llm.kernels.products import library, product

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SCALE = ".scale"  # suffix of a matrix's name: its scales
LARGEST = 127
# Measured with torch 2.15, 2 threads, avx512_bf16, ms for bf16 / int8 in place / int8 copied to bf16, weights cold:
#             1 row                8 rows               16 rows              32 rows
#  1024x512   0.078 0.041 0.082    0.119 0.073 0.125    0.160 0.135 0.178    0.161 0.242 0.175
#  2048x2048  0.43  0.29  0.46     0.53  0.60  0.78     0.65  1.05  1.01     1.19  1.95  1.55
#  4096x1024  0.48  0.32  0.68     0.77  0.78  1.17     0.80  1.22  1.15     1.10  2.26  1.56
#  8192x2048  1.23  1.01  2.94     2.28  2.80  4.70     2.84  4.77  4.85     3.82  8.99  6.03
FEW_ROWS = 16
# Likewise int4 (torch 2.14, 1 thread, 3072x1024), ms in place / in blocks: with AVX-512 in bf16, with AVX2 in fp32
#             1 row        16 rows      64 rows      128 rows
#  AVX-512    0.18  -      1.24 2.9     4.80 4.9     9.6  7.2
#  AVX2       0.41  -      1.91 5.6     7.4  8.8     14.7 13.0
FEW_INT4_ROWS = 64
KERNEL_WIDTH = 16  # torch's kernel reads as many numbers of a row at once, also behind its end
BLOCK_BYTES = 4 * 2**20  # in a core's cache between its making and its multiplication
DEVICE_BLOCK_BYTES = 64 * 2**20  # a product of many rows that fills a device, and a bound of its workspace
# fp32 on a CPU: few rows are multiplied from the other side, (matrix x rows^T)^T, in blocks of the matrix's rows: one
# batched multiplication, whose threads share the blocks, where linear keeps one thread busy. Measured likewise (MKL),
# us as linear does it / in blocks:
#             1 row        2 rows       4 rows       8 rows       16 rows
#   256x256    12  10       15  16       16  17       48  41       22  30
#   512x512   127  66      218  79      160  66      186 135      223 180
#  1024x512   210  81      287  79      256 109      218 167      265 282
# 2048x2048  1037 805     2209 979     2005 1585    2004 2294    2762 1817
FEW_FP32_ROWS = 8
BLOCKS = 8
SCALE_DTYPES = (torch.float32, torch.bfloat16)  # that compiled products read
PRODUCT_TOLERANCE = 0.01  # relative, of rows rounded to eight bits by groups; to sixteen, for int8, it is 1e-4
_TRIAL_ROWS, _TRIAL_WIDTH = 4, 64
_own = threading.local()  # buffer of each thread


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """Matrix, or several stacked: ``values`` (..., out, in) int8, ``scale`` (..., out) in the dtype of computation."""

    values: Tensor
    scale: Tensor

    def __getitem__(self, number: int | Tensor) -> Int8Matrix:
        return Int8Matrix(self.values[number], self.scale[number])

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def in_size(self) -> int:
        size: int = self.values.shape[-1]
        return size

    @property
    def out_size(self) -> int:
        size: int = self.values.shape[-2]
        return size

    @property
    def lanes(self) -> int:
        return 1

    def block(self, start: int, stop: int, into: Tensor) -> Tensor:
        """Rows of a single matrix, (stop - start, in), not yet scaled, in the memory of ``into``."""
        return into[: (stop - start) * self.in_size].view(stop - start, self.in_size).copy_(self.values[start:stop])

    def stacked_product(self, rows: Tensor) -> Tensor:
        """(n, rows, in) times n stacked matrices: (n, rows, out)."""
        return torch.bmm(rows, self.values.to(rows.dtype).transpose(1, 2)).mul_(self.scale.unsqueeze(1))


Quantised: TypeAlias = "Int8Matrix | Int4Matrix"
Matrix: TypeAlias = "Tensor | Quantised"


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """Normalisation of rows by their root mean square (arXiv 1910.07467, section 3)."""

    weight: Tensor
    epsilon: float

    def applied(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.epsilon)


def gated(rows: Tensor) -> Tensor:
    """SwiGLU of rows, (rows, 2 * width), the gate's numbers first: (rows, width)."""
    gate, up = rows.chunk(2, dim=-1)
    return silu(gate) * up


def project(
    rows: Tensor,
    matrix: Matrix,
    bias: Tensor | None = None,
    *,
    norm: RootMeanSquare | None = None,
    is_gated: bool = False,
) -> Tensor:
    """(rows, in) times one matrix: (rows, out), in the rows' dtype.

    ``norm``: of the rows before; ``is_gated``: the rows pass ``gated`` before.
    """
    vectors = [one for one in (bias, norm and norm.weight) if one is not None]
    if not isinstance(matrix, torch.Tensor) and takes_product(rows, matrix, vectors):
        own = None if norm is None else (norm.weight, norm.epsilon)
        return product(rows.contiguous(), matrix, product_room(), bias, own, is_gated)
    if norm is not None:
        rows = norm.applied(rows)
    if is_gated:
        rows = gated(rows)
    if isinstance(matrix, torch.Tensor):
        is_few = len(rows) <= FEW_FP32_ROWS and rows.dtype is torch.float32 and rows.device.type == "cpu"
        if is_few and matrix.shape[0] % BLOCKS == 0 and matrix.is_contiguous():
            return _in_blocks(rows, matrix, bias)
        return linear(rows, matrix, bias)
    if len(rows) <= FEW_ROWS and takes_grouped_product(rows, matrix):
        projected = grouped_product(rows, matrix)
    else:
        projected = _int8_product(rows, matrix) if isinstance(matrix, Int8Matrix) else _int4_product(rows, matrix)
    return projected if bias is None else projected + bias


def takes_product(rows: Tensor, matrix: Quantised, vectors: Sequence[Tensor] = ()) -> bool:
    """True if the compiled products multiply these.

    They read bytes by address: others than they expect would be read as wrong numbers.
    """
    is_fitting = matrix.in_size % KERNEL_WIDTH == 0 and 4 * matrix.in_size <= BLOCK_BYTES  # a rounded row has room
    if not takes_rows(rows) or not is_fitting or matrix.scale.dtype not in SCALE_DTYPES:
        return False
    if not all(one.is_contiguous() for one in (matrix.values, matrix.scale, *vectors)):
        return False
    if any(one.dtype is not rows.dtype for one in vectors):
        return False
    return has_product(is_int4=isinstance(matrix, Int4Matrix))


def takes_rows(rows: Tensor) -> bool:
    """True for rows of compiled products: in fp32 always, in bf16, for which CPUs have more, few."""
    is_few = len(rows) <= FEW_ROWS and rows.dtype is torch.bfloat16
    return rows.device.type == "cpu" and (is_few or rows.dtype is torch.float32)


@lru_cache
def has_product(*, is_int4: bool) -> bool:
    """True if this CPU has compiled products, and they are right. Tried once."""
    if library() is None:
        return False
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn((_TRIAL_WIDTH, _TRIAL_WIDTH), generator=generator)
    rows = torch.randn((_TRIAL_ROWS, _TRIAL_WIDTH), generator=generator)
    matrix = quantise_to_four_bits(exact) if is_int4 else quantise(exact, torch.float32)
    expected = _by_blocks(rows, matrix)
    if not isinstance(matrix, Int4Matrix):
        expected *= matrix.scale
    room = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    found = product(rows, matrix, room)
    return bool((found - expected).norm() <= PRODUCT_TOLERANCE * expected.norm())


def _int8_product(rows: Tensor, matrix: Int8Matrix) -> Tensor:
    is_fitting = (
        matrix.in_size % KERNEL_WIDTH == 0 and type(rows) is torch.Tensor
    )  # a fake tensor's trial has no result
    if len(rows) > FEW_ROWS or not is_fitting or not has_int8_kernel(rows.device.type):
        return _by_blocks(rows, matrix).mul_(matrix.scale)
    few, scale = rows.to(torch.bfloat16).contiguous(), matrix.scale.to(torch.bfloat16)
    return torch._weight_int8pack_mm(few, matrix.values, scale).to(rows.dtype)


def _int4_product(rows: Tensor, matrix: Int4Matrix) -> Tensor:
    if len(rows) > FEW_INT4_ROWS or not has_int4_kernel(rows.device.type, matrix.lanes, matrix.in_size):
        return _by_blocks(rows, matrix)
    return matrix.few_rows_product(rows).to(rows.dtype)


def _by_blocks(rows: Tensor, matrix: Quantised) -> Tensor:
    """(rows, in) times one matrix: (rows, out), by blocks of the matrix in the rows' dtype."""
    is_here = rows.device.type == "cpu"
    row_bytes = matrix.in_size * rows.itemsize
    step = max((BLOCK_BYTES if is_here else DEVICE_BLOCK_BYTES) // (row_bytes * matrix.lanes), 1) * matrix.lanes
    projected = rows.new_empty((len(rows), matrix.out_size))
    numbers = min(step, matrix.out_size) * matrix.in_size
    buffer = _block_buffer(numbers, rows.dtype) if is_here else rows.new_empty(numbers)
    for start in range(0, matrix.out_size, step):
        stop = min(start + step, matrix.out_size)
        projected[:, start:stop] = linear(rows, matrix.block(start, stop, buffer))
    return projected


def _block_buffer(numbers: int, dtype: torch.dtype) -> Tensor:
    """The thread's own, so that a block's pages are taken from the system once."""
    with torch.inference_mode(mode=False):
        held: Tensor | None = getattr(_own, "buffer", None)
        if held is None or len(held) < numbers * dtype.itemsize:
            held = _own.buffer = torch.empty(max(numbers * dtype.itemsize, BLOCK_BYTES), dtype=torch.uint8)
        return held.view(dtype)[:numbers]


def product_room() -> Tensor:
    """The thread's buffer, for rounded rows."""
    held: Tensor | None = getattr(_own, "buffer", None)
    return _block_buffer(BLOCK_BYTES, torch.uint8) if held is None else held


def _in_blocks(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    out_size, in_size = matrix.shape
    columns = rows.t().expand(BLOCKS, in_size, len(rows))
    projected = torch.bmm(matrix.view(BLOCKS, out_size // BLOCKS, in_size), columns).view(out_size, len(rows)).t()
    return projected if bias is None else projected + bias


@lru_cache
def has_int8_kernel(device_type: str) -> bool:
    """True if this torch multiplies int8 in place on this kind of device, with rows in bf16. Tried once."""
    kernel = getattr(torch, "_weight_int8pack_mm", None)
    if kernel is None:
        return False
    values = torch.arange(_TRIAL_WIDTH, device=device_type).remainder(5).to(torch.int8).expand(_TRIAL_WIDTH, -1)
    rows = torch.ones((_TRIAL_ROWS, _TRIAL_WIDTH), dtype=torch.bfloat16, device=device_type)
    scale = torch.ones(_TRIAL_WIDTH, dtype=torch.bfloat16, device=device_type)
    try:
        found = kernel(rows, values.contiguous(), scale)
    except (RuntimeError, NotImplementedError):  # no kernel for this device
        return False
    return bool(torch.equal(found, linear(rows, values.to(rows.dtype))))


def quantise(matrix: Tensor, dtype: torch.dtype) -> Int8Matrix:
    """The nearest int8 matrix, computed with in this dtype. A channel of zeros stays one."""
    exact = matrix.float()
    largest = exact.abs().amax(dim=-1)
    scale = (largest / LARGEST).to(dtype)
    step = scale.float().masked_fill(largest == 0, 1.0).unsqueeze(-1)
    return Int8Matrix((exact / step).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale)


def is_quantised(name: str, *, is_tied: bool = False) -> bool:
    return name == (EMBEDDING if is_tied else HEAD) or name.endswith((".qkv", ".output", ".up", ".down"))


def quantised_bytes(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, *, is_int4: bool, is_tied: bool
) -> dict[str, int]:
    """Bytes of a model's tensors that are not of ``itemsize`` in int8 or int4, with their scales, by name."""
    sizes = {} if is_tied else {EMBEDDING: 2 * math.prod(shapes[EMBEDDING])}
    for name, shape in shapes.items():
        if not is_quantised(name, is_tied=is_tied):
            continue
        numbers = math.prod(shape)
        has_four_bits = is_int4 and name not in {EMBEDDING, HEAD} and fits_four_bits(torch.Size(shape))
        scale_bytes = 4 * numbers // GROUP if has_four_bits else numbers // shape[-1] * itemsize
        sizes[name] = (numbers // 2 if has_four_bits else numbers) + scale_bytes
    return sizes


def looked_up(token_ids: Tensor, table: Matrix) -> Tensor:
    assert not isinstance(table, Int4Matrix), "an embedding has eight bits at least"
    if isinstance(table, torch.Tensor):
        return embedding(token_ids, table)
    return table.values[token_ids].to(table.scale.dtype) * table.scale[token_ids].unsqueeze(-1)


def matrix_of(tensors: Mapping[str, Tensor], name: str) -> Matrix:
    """Matrix of a model, in its stored form. Raises KeyError."""
    values, scale = tensors[name], tensors.get(name + SCALE)
    if scale is None:
        return values
    return Int4Matrix(values, scale) if values.dtype is torch.uint8 else Int8Matrix(values, scale)


class Int8Tensors(Mapping[str, "Tensor"]):
    """Quantises each matrix on access, and keeps its scales for the next one. Raises as ``source`` does.

    ``dtype``: computation's. An embedding that is no head, of which few rows are used at once, stays in bf16.
    """

    def __init__(self, source: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self._source = source
        self._dtype = dtype
        self._is_tied = HEAD not in source
        self._last: tuple[str, Quantised] | None = None

    def __iter__(self) -> Iterator[str]:
        for name in self._source:
            yield name
            if self._is_quantised(name):
                yield name + SCALE

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith(SCALE) and self._is_quantised(name.removesuffix(SCALE)):
            return self._quantised(name.removesuffix(SCALE)).scale
        if self._is_quantised(name):
            return self._quantised(name).values
        return self._source[name].to(torch.bfloat16 if name == EMBEDDING else self._dtype)

    def _is_quantised(self, name: str) -> bool:
        return is_quantised(name, is_tied=self._is_tied)

    def _quantised(self, name: str) -> Quantised:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._form_of(name, self._source[name]))
        return self._last[1]

    def _form_of(self, name: str, matrix: Tensor) -> Quantised:
        found = quantise(matrix, torch.bfloat16)  # as torch's kernel takes scales
        return Int8Matrix(found.values, found.scale.to(self._dtype))


class Int4Tensors(Int8Tensors):
    """Quantises to int4, except heads, and matrices whose rows are no whole groups or blocks: these are in int8."""

    def _form_of(self, name: str, matrix: Tensor) -> Quantised:
        if name in {EMBEDDING, HEAD} or not fits_four_bits(matrix.shape):
            return super()._form_of(name, matrix)
        return quantise_to_four_bits(matrix)
