"""Weight-only int4: groups of 32 numbers of a row, with a step and a middle each; activations keep their dtype.

Guarantees: a number's error is at most half a step, a 30th of its group's range, beside the rounding of step and middle
to bf16. The bytes are as torch's kernel of this CPU reads them: blocks of 64 rows with AVX-512, of 32 with AVX2. A
tensor's shape states its blocks, so bytes that another CPU packed are dequantised, never misread. A kernel runs once a
trial has shown that it multiplies by what the bytes are read as here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32  # the smallest that torch's kernel takes
LEVELS = 16
MIDDLE = 8  # level of a group's middle, in torch's kernel
TRIED_GROUPS = 64  # of a matrix, to see whether its numbers had four bits before
LEAST_GAP = 1e-3  # of a group's range, between two different numbers
LANES = (64, 32)  # rows in a block of torch's kernels, the widest first
_TRIAL_ROWS = 3
_TRIAL_TOLERANCE = 0.01  # relative: the kernel answers in bf16


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """Matrix, or several stacked: ``values`` (..., out / lanes, in, lanes / 2) uint8, and a ``scale`` for each group.

    A byte has a row's number in its low half, that of the row half a block further on in its high one. ``scale``: steps
    and middles, (..., in / GROUP, out, 2) bf16.
    """

    values: Tensor
    scale: Tensor

    def __getitem__(self, number: int | Tensor) -> Int4Matrix:
        return Int4Matrix(self.values[number], self.scale[number])

    @property
    def shape(self) -> torch.Size:
        """Of its numbers: (..., out, in)."""
        return torch.Size((*self.scale.shape[:-3], self.out_size, self.in_size))

    @property
    def in_size(self) -> int:
        size: int = self.values.shape[-2]
        return size

    @property
    def out_size(self) -> int:
        size: int = self.scale.shape[-2]
        return size

    @property
    def lanes(self) -> int:
        half: int = self.values.shape[-1]
        return 2 * half

    def block(self, start: int, stop: int, into: Tensor) -> Tensor:
        """Rows of a single matrix as numbers, (stop - start, in), in the memory of ``into``; whole blocks of rows."""
        lanes, half, rows = self.lanes, self.lanes // 2, stop - start
        levels = self.values[start // lanes : stop // lanes].transpose(0, 1)
        laid = into[: rows * self.in_size].view(self.in_size, rows // lanes, lanes)
        laid[..., :half].copy_(levels & (LEVELS - 1))
        laid[..., half:].copy_(levels >> 4)
        step, middle = self.scale[:, start:stop].float().unbind(dim=-1)
        lowest = (middle - MIDDLE * step).to(into.dtype).unsqueeze(1)
        grouped = laid.view(-1, GROUP, rows)
        torch.addcmul(lowest, grouped, step.to(into.dtype).unsqueeze(1), out=grouped)
        return laid.view(self.in_size, rows).t()

    def stacked_product(self, rows: Tensor) -> Tensor:
        """(n, rows, in) times n stacked matrices: (n, rows, out)."""
        levels = self.values.transpose(1, 2)
        laid = torch.cat((levels & (LEVELS - 1), levels >> 4), dim=-1).to(rows.dtype)
        step, middle = self.scale.float().unbind(dim=-1)
        lowest = (middle - MIDDLE * step).to(rows.dtype).unsqueeze(2)
        grouped = laid.view(len(laid), -1, GROUP, self.out_size)
        torch.addcmul(lowest, grouped, step.to(rows.dtype).unsqueeze(2), out=grouped)
        return torch.bmm(rows, laid.view(-1, self.in_size, self.out_size))

    def few_rows_product(self, rows: Tensor) -> Tensor:
        """(rows, in) times a single matrix by torch's kernel, in bf16."""
        values = self.values.view(self.out_size, self.in_size // 2)
        few = rows.to(torch.bfloat16).contiguous()
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(few, values, GROUP, self.scale)
        return found


def fits_four_bits(shape: torch.Size) -> bool:
    """True for whole groups in blocks of any kernel."""
    return len(shape) >= 2 and shape[-1] % GROUP == 0 and shape[-2] % max(LANES) == 0


def quantise_to_four_bits(matrix: Tensor, lanes: int | None = None) -> Int4Matrix:
    """An int4 matrix, for this CPU's kernel unless ``lanes`` says another. Its shape must fit.

    A group's steps divide its range; or they are eighths of its largest, or its numbers' least distance, if these are
    twice as near, as for numbers that were Q4_0, or by AWQ or GPTQ in larger groups, before.
    """
    lanes = lanes or lanes_here()
    if matrix.dim() > 2:  # one after the other: all in fp32 are many times the result
        found = [quantise_to_four_bits(one, lanes) for one in matrix]
        return Int4Matrix(torch.stack([one.values for one in found]), torch.stack([one.scale for one in found]))
    out_size, in_size = matrix.shape
    groups = matrix.float().view(out_size, in_size // GROUP, GROUP)
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    step = ((highest - lowest) / (LEVELS - 1)).to(torch.bfloat16)
    middle = ((lowest + highest + step.float()) / 2).to(torch.bfloat16)  # the lowest is 8 below, the highest 7 above
    eighth = (torch.where(highest > -lowest, highest, lowest) / -MIDDLE).to(torch.bfloat16)
    scale = torch.stack((step, middle), dim=-1)
    others = [torch.stack((eighth, torch.zeros_like(eighth)), dim=-1)]
    if all(len(group.unique()) <= LEVELS for group in groups.view(-1, GROUP)[:TRIED_GROUPS]):
        others.append(_grid_of(groups))
    for other in others:
        is_nearer = 2 * _largest_error(groups, other) < _largest_error(groups, scale)
        scale = torch.where(is_nearer.unsqueeze(-1), other, scale)
    levels = _levels(groups, scale).to(torch.uint8)
    low, high = levels.view(out_size // lanes, lanes, in_size).chunk(2, dim=1)
    return Int4Matrix((low | high << 4).transpose(1, 2).contiguous(), scale.transpose(0, 1).contiguous())


def _grid_of(groups: Tensor) -> Tensor:
    """Steps and middles of groups whose numbers were multiples of a step: the least distance between two of them."""
    ordered = groups.sort(dim=-1).values
    gaps, lowest = ordered.diff(dim=-1), ordered[..., 0]
    rounding = LEAST_GAP * (ordered[..., -1] - lowest).unsqueeze(-1)
    step = gaps.masked_fill(gaps <= rounding, torch.inf).amin(dim=-1)
    step = step.masked_fill(step.isinf(), 0.0).to(torch.bfloat16)
    return torch.stack((step, (lowest + MIDDLE * step.float()).to(torch.bfloat16)), dim=-1)


def _levels(groups: Tensor, scale: Tensor) -> Tensor:
    step, middle = scale.float().unsqueeze(-2).unbind(dim=-1)
    return ((groups - middle) / step.masked_fill(step == 0, 1.0)).round_().add_(MIDDLE).clamp_(0, LEVELS - 1)


def _largest_error(groups: Tensor, scale: Tensor) -> Tensor:
    step, middle = scale.float().unsqueeze(-2).unbind(dim=-1)
    return ((_levels(groups, scale) - MIDDLE) * step + middle - groups).abs_().amax(dim=-1)


@lru_cache
def lanes_here() -> int:
    """Rows in a block of this CPU's kernel; the most where none runs."""
    return next((lanes for lanes in LANES if has_int4_kernel("cpu", lanes, GROUP)), max(LANES))


@lru_cache
def has_int4_kernel(device_type: str, lanes: int, width: int) -> bool:
    """True if this torch multiplies such blocks of rows of this width as they are read here. Tried once."""
    if device_type != "cpu" or not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return False
    generator = torch.Generator().manual_seed(0)
    matrix = quantise_to_four_bits(torch.randn((2 * max(LANES), width), generator=generator), lanes)
    rows = torch.randn((_TRIAL_ROWS, width), generator=generator).to(torch.bfloat16)
    exact = linear(rows.float(), matrix.block(0, matrix.out_size, torch.empty(matrix.out_size * width)))
    try:
        found = matrix.few_rows_product(rows).float()
    except (RuntimeError, NotImplementedError):  # no kernel for this CPU, or other arguments
        return False
    return bool((found - exact).norm() <= _TRIAL_TOLERANCE * exact.norm())
