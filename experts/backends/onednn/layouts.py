"""Layouts of weights in oneDNN, and the batches and threads that one layout serves.

oneDNN chooses a weight's layout by the shape that the weight is applied to, the number of images and of threads. A
weight in another blocked layout is reordered at every call by slow code: thirty times the convolution's own time.
Measured (torch 2.15 on a Zen 4): the layout for many images per thread is wanted for nearly all of them. With fewer
images than threads another one is wanted; a convolution of 1x1 can then see its pixels as other images: an image of
14x14 as two of 7x14. So:

- a weight is packed in the layout of REFERENCE_IMAGES on one thread;
- at run time a call that wants another layout is applied to other heights and widths, or to fewer images at a time; a
  single row of a linear layer gets a second one (``arrangement``);
- a weight that cannot be served so for each thread count of an executor here and all PROVEN_IMAGES keeps torch's
  layout, and is reordered by fast code: a third of one convolution's time at most.

Guarantees: layouts affect times, not answers. Decisions need no measurement and are equal on equal boxes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from experts.backends.control_groups import cores
from experts.backends.onednn.operators import BlockedLayout, layout_of, on_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

REFERENCE_IMAGES = 16
PROVEN_IMAGES = (1, 2, 4, 8, 16)
ROWS_MINIMUM = 2
PARTS_MAXIMUM = 64  # that an image is divided into; more are slower again


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
        """The weight, opaque, in the layout that oneDNN wants on this number of threads."""
        source = [extent.images, self.weight[1] * self.groups, extent.height, extent.width]
        stride, padding, after = list(self.stride), list(self.padding), (list(self.dilation), self.groups, source)
        made: Tensor
        if self.dtype == torch.int8:
            scales = torch.ones(self.weight[0])  # required; no scale has a part in a layout
            made = torch.ops.onednn.qconv_prepack(weight, scales, 1.0, 0, stride, padding, *after)
        else:
            made = torch.ops.mkldnn._reorder_convolution_weight(weight, padding, stride, *after)
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
        """Rule that ``serves`` proves. Querying oneDNN for each batch would hold the weight twice, 800 MB for a VGG."""
        return AppliedTo(max(images * self.rows, ROWS_MINIMUM), 1, 1)

    def reordered(self, weight: Tensor, extent: AppliedTo) -> Tensor:
        """The weight, opaque, in the layout that oneDNN wants on this number of threads."""
        made: Tensor
        if self.dtype == torch.int8:
            made = torch.ops.onednn.qlinear_prepack(weight, [extent.images, self.weight[1]])
        else:
            made = torch.ops.mkldnn._reorder_linear_weight(weight, extent.images)
        return made


Shape = ConvolutionShape | LinearShape


@cache  # as many as the line's architectures have
def reference(shape: Shape) -> BlockedLayout:
    return on_threads(1, lambda: layout_of(in_reference_layout(shape, _any_weight(shape))))


def in_reference_layout(shape: Shape, weight: Tensor) -> Tensor:
    """The weight in that layout. Call it ``on_threads(1)``."""
    return shape.reordered(weight, shape.extent(REFERENCE_IMAGES))


def serves(shape: Shape) -> bool:
    """True where every call has an extent for which oneDNN wants the reference's layout."""
    return all(on_threads(threads, lambda: _serves_here(shape)) for threads in thread_counts())


def thread_counts() -> tuple[int, ...]:
    """Thread counts of an executor here: an equal share of the cores, for any number of executors."""
    return tuple(sorted({cores() // executors for executors in range(1, cores() + 1)}))


def arrangement(shape: Shape, images: int) -> AppliedTo | None:
    """Extent for which oneDNN wants the reference's layout on this thread's number of threads, if any."""
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
    """``threads``: torch's count for the calling thread."""
    return layout_of(shape.reordered(_any_weight(shape), extent))


def _nearly_square(images: int, pixels: int) -> AppliedTo:
    height = max(side for side in range(1, math.isqrt(pixels) + 1) if pixels % side == 0)
    return AppliedTo(images, height, pixels // height)


def _any_weight(shape: Shape) -> Tensor:
    weight = torch.empty(shape.weight, dtype=shape.dtype)
    return weight.contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else weight
