"""The floor of a batch: its operations at the rate of the fastest matrix multiplication in the same numbers.

Operations are those of convolutions, linear layers and attention, two for each multiply-accumulate, as torch's
flop_counter has them. The rate is the best of several shapes, each multiplied by torch (``torch.mm``, in eight bits
``torch._int_mm``) and, in fp32, bf16 and int8, by oneDNN with a packed weight: torch's own library may be the slower
one on another maker's processor. Where fp32's rate is higher, as of fp16 without instructions for it, fp32's is taken.
An algorithm with fewer operations (Winograd's), or operands that all fit in caches, may beat the floor.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from experts.backends.onednn.operators import why_absent
from profiler.bench.measured import one_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module

    Run = Callable[[], Tensor]

SHAPES = (  # rows, inner, columns; the smallest first
    (256, 256, 256),
    (512, 512, 512),
    (3136, 256, 256),
    (1024, 1024, 1024),
    (4096, 512, 512),
    (2048, 1024, 1024),
)
TRIES = 3  # of each shape
LONGEST_S = 0.25  # a shape that would take longer is not tried
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}
PACKED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.int8})  # of oneDNN's packed weights here


@dataclass(frozen=True, slots=True)
class Multiplication:
    """One matrix multiplication, ready to be run. ``rate``: operations a second."""

    dtype: torch.dtype
    operations: int
    rate: float
    run: Run


@cache
def fastest_of(dtype: torch.dtype) -> Multiplication:
    """The fastest multiplication in these numbers, searched for once."""
    best: Multiplication | None = None
    for shape in SHAPES:
        operations = 2 * math.prod(shape)
        if best is not None and operations / best.rate > LONGEST_S:
            break
        for run in multiplying(*_operands(dtype, shape)):
            rate = operations / min(one_turn(run)[0] for _ in range(TRIES))
            if best is None or rate > best.rate:
                best = Multiplication(dtype, operations, rate, run)
    assert best is not None, "SHAPES are none"
    return best


def reference_of(dtype: torch.dtype) -> Multiplication:
    """The multiplication that these numbers are compared with: their own, or fp32's where that is faster."""
    return max((fastest_of(dtype), fastest_of(torch.float32)), key=lambda each: each.rate)


def multiplying(one: Tensor, other: Tensor) -> Iterator[Run]:
    """Every available way to multiply two matrices of one dtype; in int8 none of the first matrix is below zero."""
    multiply = torch._int_mm if one.dtype is torch.int8 else torch.mm
    yield lambda: multiply(one, other)
    if one.dtype in PACKED_DTYPES and why_absent(one.dtype) is None:
        yield _packed_levels(one, other) if one.dtype is torch.int8 else _packed(one, other)


def operations_per_image(module: Module, size: tuple[int, int]) -> int:
    """Count one image of that height and width through a module in inference mode."""
    weightless = deepcopy(module).to("meta")
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know a whole attention as one operator
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            weightless(torch.empty((1, 3, *size), device="meta"))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops())


def _operands(dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    rows, inner, columns = shape
    if dtype is torch.int8:
        levels = torch.randint(-127, 128, (inner, columns), dtype=dtype)
        return torch.randint(0, 128, (rows, inner), dtype=dtype), levels
    return torch.randn((rows, inner)).to(dtype), torch.randn((inner, columns)).to(dtype)


def _packed(one: Tensor, other: Tensor) -> Run:
    weight = torch.ops.mkldnn._reorder_linear_weight(other.t().contiguous(), len(one))
    return lambda: torch.ops.mkldnn._linear_pointwise(one, weight, None, "none", [], None)


def _packed_levels(one: Tensor, other: Tensor) -> Run:
    """The answer is uint8 as the next layer reads it, clamped."""
    rows, weight = one.to(torch.uint8), torch.ops.onednn.qlinear_prepack(other.t().contiguous(), list(one.shape))
    scales, zeros = torch.ones(other.shape[1]), torch.zeros(other.shape[1], dtype=torch.int64)
    read = (rows, 1.0, 0, weight, scales, zeros, None)
    return lambda: torch.ops.onednn.qlinear_pointwise(*read, 1.0, 0, torch.uint8, "none", [], "none")
