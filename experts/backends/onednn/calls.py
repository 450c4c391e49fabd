"""Fused calls bound to their tensors: what a fused graph is run with. Safe for several threads.

Guarantees: a call in eight bits reads every scale and zero from the expert's own tensors whenever it runs, so
overwriting them is a complete switch of expert; oneDNN compiles the same call for every expert of a form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from experts.backends.onednn.layouts import ConvolutionShape, arrangement
from experts.backends.onednn.levels import Levels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experts.backends.onednn.fusion import FusedCall
    from experts.backends.onednn.layouts import AppliedTo, LinearShape, Shape

_convolve = torch.ops.mkldnn._convolution_pointwise.default
_convolve_adding = torch.ops.mkldnn._convolution_pointwise.binary
_convolve_onto = torch.ops.mkldnn._convolution_pointwise_.binary
_multiply = torch.ops.mkldnn._linear_pointwise.default
_convolve_levels = torch.ops.onednn.qconv2d_pointwise.default
_convolve_levels_onto = torch.ops.onednn.qconv2d_pointwise.binary
_multiply_levels = torch.ops.onednn.qlinear_pointwise.default


class Arrangements:
    """Extents that a call is applied to, by batch size and thread count. ``is_blocked``: in the reference's layout."""

    def __init__(self, shape: Shape, *, is_blocked: bool) -> None:
        self._shape = shape
        self._is_blocked = is_blocked
        self._known: dict[tuple[int, int], AppliedTo | None] = {}

    def of(self, images: int) -> AppliedTo | None:
        """None where no extent serves."""
        key = (images, torch.get_num_threads())
        if key not in self._known:
            self._known[key] = arrangement(self._shape, images) if self._is_blocked else self._shape.extent(images)
        return self._known[key]


def bound(call: FusedCall, arrangements: Arrangements, weight: Tensor, tensors: Mapping[str, Tensor]) -> Call:
    """``weight``: in torch's layout or opaque. ``tensors``: the others that the call reads, by name."""
    shape = call.shape
    if call.quantisation is not None:
        quantised = _QuantisedArguments(call, weight, *(tensors[name] for name in call.reads[1:]))
        if isinstance(shape, ConvolutionShape):
            return QuantisedConvolution(call, shape, arrangements, quantised)
        return QuantisedLinear(call, shape, arrangements, quantised)
    bias = None if call.bias is None else tensors[call.bias]
    if isinstance(shape, ConvolutionShape):
        return Convolution(call, shape, arrangements, weight, bias)
    return Linear(call, shape, arrangements, weight, bias)


class Convolution:
    """A convolution with its bias, summand and activation."""

    def __init__(
        self, call: FusedCall, shape: ConvolutionShape, arrangements: Arrangements, weight: Tensor, bias: Tensor | None
    ) -> None:
        name, scalars, algorithm = call.activation.arguments
        self._overwrites = call.overwrites
        self._arrangements = arrangements
        geometry = (weight, bias, list(shape.padding), list(shape.stride), list(shape.dilation), shape.groups)
        self._alone = (*geometry, name, scalars, algorithm)
        self._summing = (*geometry, "add", 1.0, None if name == "none" else name, scalars, algorithm)

    def __call__(self, images: Tensor, other: Tensor | None = None) -> Tensor:
        count, _, height, width = images.shape
        extent = self._arrangements.of(count)
        if extent is None and count > 1:
            return self._in_halves(images, other)
        if extent is None or (extent.images, extent.height, extent.width) == (count, height, width):
            return self._run(images, other)
        seen = _seen_as(images, extent.images, extent.height, extent.width)
        added = None if other is None else _seen_as(other, extent.images, extent.height, extent.width)
        return _seen_as(self._run(seen, added), count, height, width)

    def _run(self, images: Tensor, other: Tensor | None) -> Tensor:
        found: Tensor
        if other is None:
            found = _convolve(images, *self._alone)
        elif self._overwrites:
            found = _convolve_onto(other, images, *self._summing)
        else:
            found = _convolve_adding(images, other, *self._summing)
        return found

    def _in_halves(self, images: Tensor, other: Tensor | None) -> Tensor:
        half = images.shape[0] // 2
        parts = [(images[:half], None if other is None else other[:half])]
        parts.append((images[half:], None if other is None else other[half:]))
        return torch.cat([self(*part) for part in parts]).contiguous(memory_format=torch.channels_last)


class Linear:
    """A linear layer with its activation."""

    def __init__(
        self, call: FusedCall, shape: LinearShape, arrangements: Arrangements, weight: Tensor, bias: Tensor | None
    ) -> None:
        self._rows = shape.rows
        self._arrangements = arrangements
        self._arguments = (weight, bias, *call.activation.arguments)

    def __call__(self, rows: Tensor) -> Tensor:
        count = rows.numel() // rows.shape[-1]
        extent = self._arrangements.of(count // self._rows)
        if extent is None or extent.images == count:
            return self._run(rows)
        twice = self._run(rows.reshape(count, -1).repeat(extent.images, 1))
        return twice[:count].reshape(*rows.shape[:-1], -1)

    def _run(self, rows: Tensor) -> Tensor:
        found: Tensor = _multiply(rows, *self._arguments)
        return found


class _QuantisedArguments:
    """Arguments of a call in eight bits, in units of the summand's scale.

    oneDNN compiles the summand's scale into the call: given as 1, the call stays the same for all experts.
    """

    def __init__(self, call: FusedCall, weight: Tensor, scales: Tensor, offsets: Tensor, table: Tensor) -> None:
        quantisation = call.quantisation
        assert quantisation is not None, "bound as a call of eight bits"
        self.source = Levels(table, quantisation.source)
        self._answer = None if quantisation.answer is None else Levels(table, quantisation.answer)
        self._summand = None if quantisation.summand is None else Levels(table, quantisation.summand)
        self.summand_zero = None if quantisation.summand is None else quantisation.summand.zero
        self.weight, self.offsets = weight, offsets
        self._channels = (weight, scales, torch.zeros(len(scales), dtype=torch.int64))

    @property
    def _unit(self) -> float:
        return 1.0 if self._summand is None else self._summand.scale

    def read(self, levels: Tensor) -> tuple[object, ...]:
        return levels, self.source.scale / self._unit, 0, *self._channels

    def answered(self) -> tuple[float, int, torch.dtype]:
        if self._answer is None:
            return 1.0, 0, torch.float32
        return self._answer.scale / self._unit, self._answer.zero, torch.uint8


class QuantisedConvolution(Convolution):
    """``Convolution`` in eight bits: reads levels; answers levels or float32."""

    def __init__(
        self, call: FusedCall, shape: ConvolutionShape, arrangements: Arrangements, quantised: _QuantisedArguments
    ) -> None:
        super().__init__(call, shape, arrangements, quantised.weight, quantised.offsets)
        self._quantised = quantised
        self._geometry = (list(shape.stride), list(shape.padding), list(shape.dilation), shape.groups)
        self._activation = call.activation.arguments
        self._height, self._width = shape.height, shape.width

    def __call__(self, images: Tensor, other: Tensor | None = None) -> Tensor:
        height, width = (self._height - images.shape[-2]) // 2, (self._width - images.shape[-1]) // 2
        if height or width:
            zero = self._quantised.source.zero
            images = functional.pad(images, (width, width, height, height), value=zero)
        if other is not None:
            lay = Tensor.contiguous if self._overwrites else Tensor.clone  # oneDNN adds onto channels-last memory
            other = lay(other, memory_format=torch.channels_last)
        return super().__call__(images, other)

    def _run(self, images: Tensor, other: Tensor | None) -> Tensor:
        quantised = self._quantised
        read, answered = quantised.read(images), quantised.answered()
        found: Tensor
        if other is None:
            found = _convolve_levels(*read, quantised.offsets, *self._geometry, *answered, *self._activation)
        else:
            found = _convolve_levels_onto(
                *read, other, quantised.offsets, *self._geometry, *answered, 1.0, quantised.summand_zero,
                "sum", 1.0, *self._activation,
            )  # fmt: skip
        return found


class QuantisedLinear(Linear):
    """``Linear`` in eight bits: reads levels; answers levels or float32."""

    def __init__(
        self, call: FusedCall, shape: LinearShape, arrangements: Arrangements, quantised: _QuantisedArguments
    ) -> None:
        super().__init__(call, shape, arrangements, quantised.weight, quantised.offsets)
        self._quantised = quantised
        self._activation = call.activation.arguments

    def _run(self, rows: Tensor) -> Tensor:
        quantised = self._quantised
        found: Tensor = _multiply_levels(
            *quantised.read(rows), quantised.offsets, *quantised.answered(), *self._activation
        )
        return found


Call: TypeAlias = Convolution | Linear


def _seen_as(images: Tensor, count: int, height: int, width: int) -> Tensor:
    channels = images.shape[1]  # channels last: nothing is copied
    return images.permute(0, 2, 3, 1).reshape(count, height, width, channels).permute(0, 3, 1, 2)
