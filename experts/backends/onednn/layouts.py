"""In which layout oneDNN wants a weight, and for which batches and threads one layout serves.

oneDNN chooses a weight's layout by the shape of what it is applied to, the number of images and the number of threads;
a weight that lies in another is reordered at every call, by slow code where both are blocked: thirty times the
convolution's own time. Measured (torch 2.15 on a Zen 4): one layout, that of many images for each thread, is wanted
for nearly all of them. Where another is wanted, which is with fewer images than threads, a convolution of 1x1 can be
asked for in another way: its pixels are independent, so an image of 14x14 is as well two of 7x14. So:

- a weight is packed in the layout of REFERENCE_IMAGES on one thread;
- at run time a call that would want another is put so that it wants this one: other heights and widths, or, where
  there are none, fewer images at a time; a single row of a linear layer gets a second one (``arrangement``);
- a weight for which that does not come out for every number of threads that an executor of this box may have and all
  of PROVEN_IMAGES stays as it is today, and is reordered by fast code: a third of one convolution's time at most.

Guarantees: no answer depends on any of it, time alone does. Nothing is measured: the same box decides the same way.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from experts.backends.onednn.operators import BlockedLayout, cores, layout_of, on_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

REFERENCE_IMAGES = 16
PROVEN_IMAGES = (1, 2, 4, 8, 16)
ROWS_MINIMUM = 2
PARTS_MAXIMUM = 64  # that an image is seen as; more of them are slower again


@dataclass(frozen=True, slots=True)
class AppliedTo:
    """Extent that a weight is applied to: images of a height and width; rows of a linear layer have one pixel each."""

    images: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A convolution, and the height and width of its input."""

    weight: tuple[int, int, int, int]  # output channels, input channels of a group, height, width
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    height: int
    width: int
    dtype: torch.dtype

    @property
    def is_pointwise(self) -> bool:
        return (self.weight[2:], self.stride, self.padding, self.groups) == ((1, 1), (1, 1), (0, 0), 1)

    def extent(self, images: int) -> AppliedTo:
        return AppliedTo(images, self.height, self.width)

    def others(self, images: int) -> Iterator[AppliedTo]:
        """Other extents of the same pixels, fewest images first."""
        pixels = images * self.height * self.width
        if not self.is_pointwise:
            return
        for parts in range(1, min(pixels, PARTS_MAXIMUM * images) + 1):
            if pixels % parts == 0:
                yield _nearly_square(parts, pixels // parts)

    def reordered(self, weight: Tensor, extent: AppliedTo) -> Tensor:
        """A weight in the layout that oneDNN wants for it on this number of threads; opaque."""
        source = [extent.images, self.weight[1] * self.groups, extent.height, extent.width]
        if self.dtype == torch.int8:
            return _reordered_levels(self, weight, source)
        made: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
            weight, list(self.padding), list(self.stride), list(self.dilation), self.groups, source
        )
        return made


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer, and how many rows an image gives it."""

    weight: tuple[int, int]  # outputs, inputs
    rows: int
    dtype: torch.dtype

    def extent(self, images: int) -> AppliedTo:
        return AppliedTo(images * self.rows, 1, 1)

    def arranged(self, images: int) -> AppliedTo:
        """Rule that ``serves`` proves: asking oneDNN per batch would hold the weight twice, 800 MB of a VGG."""
        return AppliedTo(max(images * self.rows, ROWS_MINIMUM), 1, 1)

    def reordered(self, weight: Tensor, extent: AppliedTo) -> Tensor:
        """A weight in the layout that oneDNN wants for it on this number of threads; opaque."""
        if self.dtype == torch.int8:
            levels: Tensor = torch.ops.onednn.qlinear_prepack(weight, [extent.images, self.weight[1]])
            return levels
        made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, extent.images)
        return made


Shape = ConvolutionShape | LinearShape


@cache  # as many as the line's architectures have
def reference(shape: Shape) -> BlockedLayout:
    return on_threads(1, lambda: layout_of(in_reference_layout(shape, _any_weight(shape))))


def in_reference_layout(shape: Shape, weight: Tensor) -> Tensor:
    """A weight in that layout; to be called ``on_threads(1)``."""
    return shape.reordered(weight, shape.extent(REFERENCE_IMAGES))


def serves(shape: Shape) -> bool:
    """Can every call be put so that it wants the reference's layout?"""
    return all(on_threads(threads, lambda: _serves_here(shape)) for threads in thread_counts())


def thread_counts() -> tuple[int, ...]:
    """Thread counts of an executor here: an equal share of the cores, for any number of executors."""
    return tuple(sorted({cores() // executors for executors in range(1, cores() + 1)}))


def arrangement(shape: Shape, images: int) -> AppliedTo | None:
    """Extent for which oneDNN wants the reference's layout on this thread's threads; None: there is none."""
    if isinstance(shape, LinearShape):
        return shape.arranged(images)
    wanted, threads = reference(shape), torch.get_num_threads()
    extents = itertools.chain((shape.extent(images),), shape.others(images))
    return next((extent for extent in extents if _wanted(shape, extent, threads) == wanted), None)


def _serves_here(shape: Shape) -> bool:
    if isinstance(shape, LinearShape):
        extents = {shape.arranged(images) for images in PROVEN_IMAGES}
        return all(_wanted(shape, extent, torch.get_num_threads()) == reference(shape) for extent in extents)
    return all(arrangement(shape, images) is not None for images in PROVEN_IMAGES)


@lru_cache(maxsize=16384)
def _wanted(shape: Shape, extent: AppliedTo, threads: int) -> BlockedLayout:
    """``threads`` are those of the calling thread."""
    return layout_of(shape.reordered(_any_weight(shape), extent))


def _nearly_square(images: int, pixels: int) -> AppliedTo:
    height = max(side for side in range(1, math.isqrt(pixels) + 1) if pixels % side == 0)
    return AppliedTo(images, height, pixels // height)


def _reordered_levels(shape: ConvolutionShape, weight: Tensor, source: list[int]) -> Tensor:
    """The scales of channels and images have no part in a layout, but oneDNN wants some."""
    scales = torch.ones(shape.weight[0])
    made: Tensor = torch.ops.onednn.qconv_prepack(
        weight, scales, 1.0, 0, list(shape.stride), list(shape.padding), list(shape.dilation), shape.groups, source
    )
    return made


def _any_weight(shape: Shape) -> Tensor:
    weight = torch.empty(shape.weight, dtype=shape.dtype)
    return weight.contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else weight
