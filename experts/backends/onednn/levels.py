"""Eight-bit numbers for values and weights: which range 256 levels stand for, and how they are had from it.

A value v is the level round(v / scale) + zero of 0..255; a weight is round(w / scale) of -127..127, with a scale for
each output channel (the affine and the symmetric scheme of Jacob et al., "Quantization and Training of Neural Networks
for Efficient Integer-Arithmetic-Only Inference", section 2.1). Zero is a level of its own in every one, so that padding
is exact.

Guarantees: pure functions of ranges; what lies outside of a range becomes its end, never wraps. What is no number has
no range and no levels, so that it can never pass for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from experts.calibrations import Range

HIGHEST = 255
MIDDLE = 128
WEIGHT_HIGHEST = 127
SCALE_LEAST = 2.0**-64  # so that what is divided by it, or by a product of two, stays a number of float32


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a graph that share one scale, as what is joined and what it is joined from must."""

    row: int  # in a table
    zero: int | None  # level of zero where it is the same for every expert


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Values that a call reads and answers in eight bits. ``answer`` None: it answers in float32."""

    source: Values
    answer: Values | None
    summand: Values | None = None


def levels(values: Range, zero: int | None) -> tuple[float, int]:
    """The scale for values of a range, and their zero: the given one, or what spends no level on what never comes."""
    low, high = min(values.low, 0.0), max(values.high, 0.0)
    if zero is None:
        scale = _scale((high - low) / HIGHEST)
        return scale, round(-low / scale)
    return _scale(max(high / (HIGHEST - zero), -low / zero if zero else 0.0)), zero


def quantised_weight(weight: Tensor, highest: int = WEIGHT_HIGHEST) -> tuple[Tensor, Tensor]:
    """Levels, int8, and scales, float32, one for each first index. Raises ValueError for NaN or infinity."""
    largest = weight.abs().flatten(1).amax(dim=1)
    if not largest.isfinite().all():
        raise ValueError("weights that are no numbers have no levels")
    scales = torch.where(largest > 0, largest / highest, torch.ones_like(largest)).clamp_(min=SCALE_LEAST)
    by_channel = scales.reshape(-1, *[1] * (weight.dim() - 1))
    return (weight / by_channel).round_().clamp_(-highest, highest).to(torch.int8), scales


def _scale(wanted: float) -> float:
    return max(wanted, SCALE_LEAST) if wanted else 1.0  # never a divisor of 0; any scale suits zeros
