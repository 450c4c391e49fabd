"""What a batch would take if it were its arithmetic and nothing else: operations over what a multiplication reaches.

The operations are those of convolutions, linear layers and attention, two for each multiply-accumulate, as torch counts
them (torch.utils.flop_counter) while the plain module runs on tensors without memory; for torchvision's classifiers
they are the numbers that it publishes. The rate is that of the fastest of several matrix multiplications in the same
numbers on the same threads: of several shapes, each multiplied as torch does it (``torch.mm``, in eight bits
``torch._int_mm``) and, in fp32, bf16 and int8, as oneDNN does it with a weight packed for it, in eight bits to levels
of eight bits; torch's own library may well be the slower one on a processor that is not its maker's. Where fp32's is
faster, as of fp16 on a processor that has no instructions for it, that one is taken, because such numbers are
converted. An algorithm that needs fewer operations (Winograd's, for convolutions), or one whose operands all lie in
caches, may be faster.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from experts.backends.onednn.operators import why_absent
from proof.compute.alternating import one_run

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
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
}  # of numbers, by dtype
PACKED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.int8})  # that oneDNN's packed weights have here


class Multiplication:
    """The matrix multiplication that reaches most in one kind of numbers, ready to be run."""

    run: Run

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.rate, self.shape = dtype, 0.0, SHAPES[0]
        for shape in SHAPES:
            if self.rate and _operations(shape) / self.rate > LONGEST_S:
                break
            for run in multiplying(*_operands(dtype, shape)):
                reached = _operations(shape) / min(one_run(run) for _ in range(TRIES))
                if reached > self.rate:
                    self.rate, self.shape, self.run = reached, shape, run

    @property
    def operations(self) -> int:
        return _operations(self.shape)


class Multiplications:
    """The fastest multiplication of each kind of numbers, looked for when it is first asked for."""

    def __init__(self) -> None:
        self._found: dict[torch.dtype, Multiplication] = {}

    def of(self, dtype: torch.dtype) -> Multiplication:
        """The one that these numbers are held against: their own, or fp32's where that is faster."""
        for each in (torch.float32, dtype):
            if each not in self._found:
                self._found[each] = Multiplication(each)
        return max((self._found[dtype], self._found[torch.float32]), key=lambda each: each.rate)


def multiplying(one: Tensor, other: Tensor) -> Iterator[Run]:
    """Every way to multiply two matrices of one dtype that is here; in eight bits none of the first is below zero."""
    multiply = torch._int_mm if one.dtype is torch.int8 else torch.mm
    yield lambda: multiply(one, other)
    if one.dtype in PACKED_DTYPES and why_absent(one.dtype) is None:
        yield _packed_levels(one, other) if one.dtype is torch.int8 else _packed(one, other)


def operations_per_image(module: Module, size: tuple[int, int]) -> int:
    """For one image of that height and width through a module in inference mode."""
    weightless = deepcopy(module).to("meta")
    image = torch.empty((1, 3, *size), device="meta")
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole attention: nobody counts in it
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            weightless(image)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops())


def _operations(shape: tuple[int, int, int]) -> int:
    rows, inner, columns = shape
    return 2 * rows * inner * columns


def _operands(dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    rows, inner, columns = shape
    if dtype is torch.int8:
        return torch.randint(0, 128, (rows, inner), dtype=dtype), torch.randint(
            -127, 128, (inner, columns), dtype=dtype
        )
    return torch.randn((rows, inner)).to(dtype), torch.randn((inner, columns)).to(dtype)


def _packed(one: Tensor, other: Tensor) -> Run:
    weight = torch.ops.mkldnn._reorder_linear_weight(other.t().contiguous(), len(one))
    return lambda: torch.ops.mkldnn._linear_pointwise(one, weight, None, "none", [], None)


def _packed_levels(one: Tensor, other: Tensor) -> Run:
    """In eight bits: the answer is uint8 as the next layer reads it, clamped."""
    rows, weight = one.to(torch.uint8), torch.ops.onednn.qlinear_prepack(other.t().contiguous(), list(one.shape))
    scales, zeros = torch.ones(other.shape[1]), torch.zeros(other.shape[1], dtype=torch.int64)
    read = (rows, 1.0, 0, weight, scales, zeros, None)
    return lambda: torch.ops.onednn.qlinear_pointwise(*read, 1.0, 0, torch.uint8, "none", [], "none")
