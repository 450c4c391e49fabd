"""Eight-bit numbers: the range of 256 levels, and conversion of values and weights to levels and back.

A value v is the level round(v / scale) + zero of 0..255. A weight is round(w / scale), from minus the greatest weight
that the CPU sums exactly to plus it, with a scale for each output channel. Zero is a level in each scheme, so padding
is exact. Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", section 2.1.

Guarantees: a value outside its range becomes the range's end and never wraps; NaN and infinity are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from experts.backends.outputs import is_finite

if TYPE_CHECKING:
    from torch import Tensor

    from experts.calibrations import Range

HIGHEST = 255
MIDDLE = 128
SCALE_LEAST = 2.0**-64  # a number divided by it, or by a product of two such scales, stays finite in float32


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a graph that share one scale, as joined values must."""

    row: int  # in the table of scales and zeros
    zero: int | None  # level of zero, if equal for all experts


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Values that a call reads and answers in eight bits. ``answer`` None: it answers in float32."""

    source: Values
    answer: Values | None
    summand: Values | None = None


class Levels:
    """Converts values to levels and back, by a row of an expert's table that is read at every use."""

    def __init__(self, table: Tensor, values: Values) -> None:
        self._row = table[values.row].numpy()

    @property
    def scale(self) -> float:
        return float(self._row[0])

    @property
    def zero(self) -> int:
        return int(self._row[1])

    def of(self, values: Tensor) -> Tensor:
        """uint8, in the same memory format. Raises FloatingPointError for NaN and infinity."""
        if not is_finite(values):
            raise FloatingPointError("the input of a layer has NaN or infinity")
        rounding = torch.tensor(self.zero + 0.5)  # the conversion cuts fractions off
        return torch.add(rounding, values, alpha=1.0 / self.scale).clamp_(0.0, 255.0).to(torch.uint8)

    def back(self, levels: Tensor) -> Tensor:
        """float32, in the same memory format."""
        return torch.add(torch.tensor(-self.zero * self.scale), levels, alpha=self.scale)


def to_levels(levels: Levels, found: Tensor) -> Tensor:
    return levels.of(found)


def to_values(levels: Levels, found: Tensor) -> Tensor:
    return levels.back(found)


def pooled_levels(levels: Tensor, *arguments: Any, **named: Any) -> Tensor:  # noqa: ANN401  torch's own
    found: Tensor = functional.max_pool2d(levels.to(torch.bfloat16), *arguments, **named)  # torch pools no eight bits
    return found.to(torch.uint8)


def levels(values: Range, zero: int | None) -> tuple[float, int]:
    """Scale and zero for values of a range. ``zero`` None: chosen so that the levels cover the range and no more."""
    low, high = min(values.low, 0.0), max(values.high, 0.0)
    if zero is None:
        scale = _scale((high - low) / HIGHEST)
        return scale, round(-low / scale)
    return _scale(max(high / (HIGHEST - zero), -low / zero if zero else 0.0)), zero


def quantised_weight(name: str, weight: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Levels, int8, and scales, float32, one for each first index. Raises ValueError, with the name, for NaN."""
    weight = weight.detach().float()
    largest = weight.abs().flatten(1).amax(dim=1)
    if not largest.isfinite().all():
        raise ValueError(f"{name}: weights have NaN or infinity")
    scales = torch.where(largest > 0, largest / highest, torch.ones_like(largest)).clamp_(min=SCALE_LEAST)
    return (weight / by_channel(scales, weight)).round_().clamp_(-highest, highest).to(torch.int8), scales


def by_channel(scales: Tensor, weight: Tensor) -> Tensor:
    """The scales in a shape in which each is applied to its output channel of a weight."""
    return scales.reshape(-1, *[1] * (weight.dim() - 1))


def _scale(wanted: float) -> float:
    return max(wanted, SCALE_LEAST) if wanted else 1.0  # never a divisor of 0; any scale suits zeros
