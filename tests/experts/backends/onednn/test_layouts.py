"""Layouts that serve all batches, and opaque tensors as views of bytes that others own."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from experts.backends.onednn import layouts
from experts.backends.onednn.calls import Arrangements, bound
from experts.backends.onednn.fusion import Activation, FusedCall
from experts.backends.onednn.layouts import (
    AppliedTo,
    ConvolutionShape,
    LinearShape,
    arrangement,
    in_reference_layout,
    reference,
    serves,
)
from experts.backends.onednn.operators import blocked_bytes, blocked_view, layout_of, on_threads
from experts.expert import Precision
from experts.packed.weights import AlignedBuffer
from tests.forms import needs

POINTWISE = ConvolutionShape((64, 32, 1, 1), (1, 1), (0, 0), (1, 1), 1, 6, 4, torch.float32)
CONVOLUTIONS = [
    POINTWISE,
    ConvolutionShape((48, 24, 3, 3), (2, 2), (1, 1), (1, 1), 1, 9, 9, torch.float32),
    ConvolutionShape((32, 1, 3, 3), (1, 1), (1, 1), (1, 1), 32, 8, 8, torch.float32),
    ConvolutionShape((16, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1, 32, 32, torch.float32),
]
ROWS = [LinearShape((40, 64), 1, torch.float32), LinearShape((40, 64), 3, torch.float32)]


def in_both(shapes):
    return [*shapes, pytest.param(replace(shapes[-1], dtype=torch.bfloat16), marks=needs(Precision.ONEDNN_BF16))]


class Fixed(Arrangements):
    """What a call is told, whatever oneDNN wants."""

    def __init__(self, extents):
        self._extents = extents

    def of(self, images):
        return self._extents.get(images)


def weight_of(shape):
    weight = torch.randn(shape.weight).to(shape.dtype)
    return weight.contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else weight


def input_of(shape, images):
    if isinstance(shape, LinearShape):
        return torch.randn(images * shape.rows, shape.weight[1]).to(shape.dtype)
    made = torch.randn(images, shape.weight[1] * shape.groups, shape.height, shape.width).to(shape.dtype)
    return made.contiguous(memory_format=torch.channels_last)


def by_torch(shape, weight, given):
    if isinstance(shape, LinearShape):
        return functional.linear(given, weight)
    return functional.conv2d(given, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups)


def buffered(shape, weight):
    """The packed bytes of a weight in a buffer, and a flat view of it."""
    packed = on_threads(1, lambda: blocked_bytes(in_reference_layout(shape, weight)))
    buffer = AlignedBuffer(packed.nbytes)
    flat = buffer.tensor.view(shape.dtype)
    flat.copy_(packed)
    return buffer, flat


@pytest.mark.parametrize("shape", in_both(CONVOLUTIONS) + in_both(ROWS))
@pytest.mark.parametrize("images", [1, 2, 3, 8])
def test_packed_weight_answers_as_torch(shape, images):
    weight, given = weight_of(shape), input_of(shape, images)
    _, flat = buffered(shape, weight)
    call = FusedCall(shape, "weight", None, Activation())
    with torch.inference_mode():
        made = bound(call, Arrangements(shape, is_blocked=True), blocked_view(flat, reference(shape)), {})
        found, expected = made(given), by_torch(shape, weight, given)
    tolerance = 1e-5 if shape.dtype == torch.float32 else 0.05
    assert torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("images", [1, 3])
def test_packed_weight_adds_to_a_tensor_of_any_layout(images, memory_format, overwrites):
    weight, given = weight_of(POINTWISE), input_of(POINTWISE, images)
    other = torch.randn(images, 64, 6, 4).contiguous(memory_format=memory_format)
    expected = by_torch(POINTWISE, weight, given) + other
    _, flat = buffered(POINTWISE, weight)
    call = FusedCall(POINTWISE, "weight", None, Activation(), adds=True, overwrites=overwrites)
    with torch.inference_mode():
        weight = blocked_view(flat, reference(POINTWISE))
        found = bound(call, Arrangements(POINTWISE, is_blocked=True), weight, {})(given, other)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda flat: flat[:-16], lambda flat: torch.cat([flat, flat]), lambda flat: flat.view(torch.int32),
        lambda flat: torch.cat([flat[:1], flat])[1:], lambda flat: torch.zeros(1).expand(flat.numel()),
        lambda flat: flat.view(-1, 2),
    ],
    ids=["cut", "longer", "of another dtype", "not aligned", "with gaps", "not flat"],
)  # fmt: skip
def test_bytes_of_another_layout_reach_no_kernel(spoiled):
    _, flat = buffered(POINTWISE, weight_of(POINTWISE))
    with pytest.raises(ValueError, match=r"are needed, not|aligned to 64"):
        blocked_view(spoiled(flat), reference(POINTWISE))


@pytest.mark.parametrize("shape", in_both(CONVOLUTIONS))
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_arrangement_needs_the_layout_packed_for_its_pixels(shape, threads):
    weight = weight_of(shape)

    def check():
        for images in (1, 2, 3, 5):
            extent = arrangement(shape, images)
            if extent is None:
                continue
            assert extent.images * extent.height * extent.width == images * shape.height * shape.width
            assert layout_of(shape.reordered(weight, extent)) == reference(shape)

    on_threads(threads, check)
    rows = LinearShape((40, 64), 1, torch.float32)
    assert serves(rows)
    assert [arrangement(rows, images).images for images in (1, 3)] == [2, 3]  # a single row gets a second one


@pytest.mark.parametrize("shape", in_both(CONVOLUTIONS))
def test_single_thread_needs_no_arrangement(shape):
    """For images that no other test has: oneDNN keeps its choice for a shape, also for other numbers of threads."""
    own = replace(shape, height=shape.height + 5, width=shape.width + 5)
    assert on_threads(1, lambda: arrangement(own, 8)) == own.extent(8)


@pytest.mark.parametrize("extent", [AppliedTo(2, 3, 4), AppliedTo(1, 1, 24), AppliedTo(24, 1, 1), None])
def test_convolution_answers_equally_in_every_arrangement(extent):
    weight, other = weight_of(POINTWISE), torch.randn(1, 64, 6, 4).contiguous(memory_format=torch.channels_last)
    call = FusedCall(POINTWISE, "weight", None, Activation("relu"), adds=True, overwrites=True)
    given = input_of(POINTWISE, 1)
    made = bound(call, Fixed({1: extent}), weight, {})
    with torch.inference_mode():
        expected = (by_torch(POINTWISE, weight, given) + other).relu()
        found = made(given, other.clone(memory_format=torch.channels_last))
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("images", [2, 5])
def test_batch_too_large_for_one_arrangement_is_run_in_parts(images):
    weight, given = weight_of(POINTWISE), input_of(POINTWISE, images)
    one = Fixed({1: POINTWISE.extent(1)})
    with torch.inference_mode():
        found = bound(FusedCall(POINTWISE, "", None, Activation()), one, weight, {})(given)
        assert torch.allclose(found, by_torch(POINTWISE, weight, given), atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_weight_stays_plain_if_one_number_of_threads_cannot_be_served(monkeypatch):
    monkeypatch.setattr(layouts, "thread_counts", lambda: (1, 2))
    monkeypatch.setattr(layouts, "arrangement", lambda shape, images: None if torch.get_num_threads() == 2 else 1)
    assert not serves(POINTWISE)
    monkeypatch.setattr(layouts, "thread_counts", lambda: (1,))
    assert serves(POINTWISE)
