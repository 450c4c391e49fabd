"""What a batch would take if it were its arithmetic and nothing else: operations over what a multiplication reaches.

The operations are those of convolutions, linear layers and attention, two for each multiply-accumulate, as torch counts
them (torch.utils.flop_counter) while the plain module runs on tensors without memory; for torchvision's classifiers
they are the numbers that it publishes. The rate is that of the fastest of several matrix multiplications in the same
numbers on the same threads; where fp32's is faster, as of fp16 on a processor that has no instructions for it, that
one, because such numbers are converted. An algorithm that needs fewer operations (Winograd's, for convolutions), or
one whose operands all lie in caches, may be faster.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from profiler.bench.compute.alternating import one_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

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


class Multiplication:
    """The matrix multiplication that reaches most in one kind of numbers, ready to be run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.rate, self.shape = dtype, 0.0, SHAPES[0]
        for shape in SHAPES:
            if self.rate and _operations(shape) / self.rate > LONGEST_S:
                break
            run = _multiplication(dtype, shape)
            reached = _operations(shape) / min(one_run(run) for _ in range(TRIES))
            if reached > self.rate:
                self.rate, self.shape = reached, shape
        self.run: Callable[[], Tensor] = _multiplication(dtype, self.shape)

    @property
    def operations(self) -> int:
        """Of one run."""
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


def operations_per_image(module: Module, size: tuple[int, int]) -> int:
    """Of one image of that height and width through a module in inference mode."""
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


def _multiplication(dtype: torch.dtype, shape: tuple[int, int, int]) -> Callable[[], Tensor]:
    rows, inner, columns = shape
    multiply = torch._int_mm if dtype is torch.int8 else torch.mm
    one, other = (torch.randn(sides).to(dtype) for sides in ((rows, inner), (inner, columns)))
    return lambda: multiply(one, other)
