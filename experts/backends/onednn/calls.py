"""Fused calls with their weights: what the graph of a fused module is run with."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from experts.backends.onednn.layouts import ConvolutionShape, arrangement

if TYPE_CHECKING:
    from torch import Tensor

    from experts.backends.onednn.fusion import FusedCall
    from experts.backends.onednn.layouts import AppliedTo, LinearShape, Shape

_convolve = torch.ops.mkldnn._convolution_pointwise.default
_convolve_adding = torch.ops.mkldnn._convolution_pointwise.binary
_convolve_onto = torch.ops.mkldnn._convolution_pointwise_.binary
_multiply = torch.ops.mkldnn._linear_pointwise.default


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


def bound(call: FusedCall, arrangements: Arrangements, weight: Tensor, bias: Tensor | None) -> Call:
    if isinstance(call.shape, ConvolutionShape):
        return Convolution(call, call.shape, arrangements, weight, bias)
    return Linear(call, call.shape, arrangements, weight, bias)


class Convolution:
    """A convolution with its bias, what is added, and its activation. Safe for several threads."""

    def __init__(
        self, call: FusedCall, shape: ConvolutionShape, arrangements: Arrangements, weight: Tensor, bias: Tensor | None
    ) -> None:
        activation = call.activation
        self._adds, self._overwrites = call.adds, call.overwrites
        self._arrangements = arrangements
        geometry = (weight, bias, list(shape.padding), list(shape.stride), list(shape.dilation), shape.groups)
        scalars, algorithm = list(activation.scalars), activation.algorithm
        after_sum = None if activation.name == "none" else activation.name
        self._alone = (*geometry, activation.name, scalars, algorithm)
        self._summing = (*geometry, "add", 1.0, after_sum, scalars, algorithm)

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
    """A linear layer with its activation. Safe for several threads."""

    def __init__(
        self, call: FusedCall, shape: LinearShape, arrangements: Arrangements, weight: Tensor, bias: Tensor | None
    ) -> None:
        self._rows = shape.rows
        self._arrangements = arrangements
        activation = call.activation
        self._arguments = (weight, bias, activation.name, list(activation.scalars), activation.algorithm)

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


Call: TypeAlias = Convolution | Linear


def _seen_as(images: Tensor, count: int, height: int, width: int) -> Tensor:
    channels = images.shape[1]  # channels last: nothing is copied
    return images.permute(0, 2, 3, 1).reshape(count, height, width, channels).permute(0, 3, 1, 2)
