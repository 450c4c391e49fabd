"""Calls with weights of eight bits, and what brings values to levels and back: what a quantised graph is run with.

Guarantees: every scale and zero is read from the expert's own tensors at the call, so that overwriting these is a whole
switch of expert; what oneDNN compiles into a call is the same for every expert of a form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from experts.backends.onednn.calls import Arrangements, Call, Convolution, Linear
from experts.backends.onednn.layouts import ConvolutionShape
from experts.backends.weight_files import is_finite

if TYPE_CHECKING:
    from experts.backends.onednn.fusion import FusedCall
    from experts.backends.onednn.layouts import LinearShape
    from experts.backends.onednn.levels import Values

_convolve = torch.ops.onednn.qconv2d_pointwise.default
_convolve_onto = torch.ops.onednn.qconv2d_pointwise.binary
_multiply = torch.ops.onednn.qlinear_pointwise.default


class Levels:
    """The levels of some values, from a row of an expert's table."""

    def __init__(self, table: Tensor, values: Values) -> None:
        self._row = table[values.row].numpy()

    @property
    def scale(self) -> float:
        return float(self._row[0])

    @property
    def zero(self) -> int:
        return int(self._row[1])

    def of(self, values: Tensor) -> Tensor:
        """uint8, in the same memory format. Raises FloatingPointError for what is no number: no level tells it."""
        if not is_finite(values):
            raise FloatingPointError("a layer was given what is no number, or infinite")
        cut_off = torch.tensor(self.zero + 0.5)  # behind the point, that is: rounded
        return torch.add(cut_off, values, alpha=1.0 / self.scale).clamp_(0.0, 255.0).to(torch.uint8)

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


def quantised_call(
    call: FusedCall, arrangements: Arrangements, weight: Tensor, scales: Tensor, offsets: Tensor, table: Tensor
) -> Call:
    if isinstance(call.shape, ConvolutionShape):
        return QuantisedConvolution(call, call.shape, arrangements, weight, scales, offsets, table)
    return QuantisedLinear(call, call.shape, arrangements, weight, scales, offsets, table)


class _Scales:
    """Scales in units of the summand's: oneDNN compiles that one into the call, so 1 keeps it the same for all."""

    def __init__(self, call: FusedCall, table: Tensor) -> None:
        quantisation = call.quantisation
        assert quantisation is not None, "asked for a call of eight bits"
        self.source = Levels(table, quantisation.source)
        self.answer = None if quantisation.answer is None else Levels(table, quantisation.answer)
        self._summand = None if quantisation.summand is None else Levels(table, quantisation.summand)
        self.summand_zero = None if quantisation.summand is None else quantisation.summand.zero

    @property
    def unit(self) -> float:
        return 1.0 if self._summand is None else self._summand.scale

    def answered(self) -> tuple[float, int, torch.dtype]:
        if self.answer is None:
            return 1.0, 0, torch.float32
        return self.answer.scale / self.unit, self.answer.zero, torch.uint8


class QuantisedConvolution(Convolution):
    """See ``Convolution``. Levels in; levels out, or float32. Safe for several threads."""

    def __init__(
        self, call: FusedCall, shape: ConvolutionShape, arrangements: Arrangements, weight: Tensor, scales: Tensor,
        offsets: Tensor, table: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(call, shape, arrangements, weight, offsets)
        self._scales = _Scales(call, table)
        self._weight = (weight, scales, torch.zeros(len(scales), dtype=torch.int64))
        self._offsets = offsets
        self._geometry = (list(shape.stride), list(shape.padding), list(shape.dilation), shape.groups)
        self._activation = (call.activation.name, list(call.activation.scalars), call.activation.algorithm)
        self._height, self._width = shape.height, shape.width

    def __call__(self, images: Tensor, other: Tensor | None = None) -> Tensor:
        height, width = ((wanted - had) // 2 for wanted, had in zip(
            (self._height, self._width), images.shape[-2:], strict=True))  # fmt: skip
        if height or width:
            images = functional.pad(images, (width, width, height, height), value=self._scales.source.zero)
        if other is not None:
            lay = Tensor.contiguous if self._overwrites else Tensor.clone  # oneDNN adds onto what lies channels last
            other = lay(other, memory_format=torch.channels_last)
        return super().__call__(images, other)

    def _run(self, images: Tensor, other: Tensor | None) -> Tensor:
        scales = self._scales
        read = (images, scales.source.scale / scales.unit, 0, *self._weight)
        found: Tensor
        if other is None:
            found = _convolve(*read, self._offsets, *self._geometry, *scales.answered(), *self._activation)
        else:
            found = _convolve_onto(
                *read, other, self._offsets, *self._geometry, *scales.answered(), 1.0, scales.summand_zero,
                "sum", 1.0, *self._activation,
            )  # fmt: skip
        return found


class QuantisedLinear(Linear):
    """See ``Linear``. Levels in; levels out, or float32. Safe for several threads."""

    def __init__(
        self, call: FusedCall, shape: LinearShape, arrangements: Arrangements, weight: Tensor, scales: Tensor,
        offsets: Tensor, table: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(call, shape, arrangements, weight, offsets)
        self._scales = _Scales(call, table)
        self._weight = (weight, scales, torch.zeros(len(scales), dtype=torch.int64), offsets)
        self._activation = (call.activation.name, list(call.activation.scalars), call.activation.algorithm)

    def _run(self, rows: Tensor) -> Tensor:
        found: Tensor = _multiply(
            rows, self._scales.source.scale, 0, *self._weight, *self._scales.answered(), *self._activation
        )
        return found
