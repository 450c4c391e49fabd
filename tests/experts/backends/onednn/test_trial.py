"""What a form has to show before it is packed: where one kind of call is off from what torch computes, it is refused.

Such a box is made here with torch's own registry of operators: oneDNN's is replaced by one that is a little off.
"""

import logging
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

from experts.backends import backend_for
from experts.backends.onednn.execution import CALL_DEVIATION_MAXIMUM, decided_module, tried
from experts.backends.onednn.form import decided_layouts, fused_module
from experts.backends.vision import classifier
from experts.errors import WeightsMismatch
from experts.expert import Precision
from experts.packed.packing import pack_line
from tests.forms import needs

ARCHITECTURE, PX = "resnet18", 32
CLASSIFIER = backend_for(ARCHITECTURE)
OFF = 1.1  # what the wrong calls are multiplied by
NUMBERS = [torch.float32, pytest.param(torch.bfloat16, marks=needs(Precision.ONEDNN_BF16))]
EIGHT_BITS = pytest.param(torch.int8, marks=needs(Precision.ONEDNN_INT8))
KEYS = ("CPU", "MkldnnCPU")  # of weights that lie as torch's do, and of those that do not


def dense(weight):
    return weight.to_dense() if weight.is_mkldnn else weight


def summing(other, images, weight, bias, padding, stride, dilation, groups, *_):
    found = torch.conv2d(images, dense(weight), bias, stride, padding, dilation, groups)
    return other.add_(found).relu_().mul_(OFF)


def multiplying(rows, weight, bias, activation, *_):
    assert activation == "hardswish"
    return functional.hardswish(functional.linear(rows, dense(weight), bias)) * OFF


def no_number(rows, weight, *_):
    return torch.full((*rows.shape[:-1], weight.shape[0]), float("nan"), dtype=rows.dtype)


@pytest.fixture
def computing():
    """Has oneDNN's operator of a name compute something else, until the test ends."""
    libraries = []

    def replaced(name, wrong, namespace="mkldnn"):
        for key in KEYS:
            libraries.append(torch.library.Library(namespace, "IMPL"))
            libraries[-1].impl(name, wrong, key, allow_override=True)

    yield replaced
    libraries.clear()  # which registers oneDNN's again


def made(numbers, architecture=ARCHITECTURE, px=PX):
    """A folded module, weights such as it may have, and what it is fused to."""
    form = classifier._structure_of(architecture, 4, None, (px, px))
    module, sample = CLASSIFIER.module(form), CLASSIFIER.sample(form)
    return module, sample, fused_module(module, (px, px), CLASSIFIER.outputs, numbers)


def trial_of(numbers, *of):
    module, sample, fused = made(numbers, *of)
    return tried(module, decided_layouts(fused), CLASSIFIER.outputs, sample)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_trial_detects_exactly_the_wrong_kind_of_call(numbers, computing):
    computing("_convolution_pointwise_.binary", summing)
    wrong = [call for call, off in trial_of(numbers).calls if off > CALL_DEVIATION_MAXIMUM[numbers]]
    assert len(wrong) == 8
    assert all(call.adds and call.overwrites for call in wrong)


@pytest.mark.parametrize(("wrong", "off"), [(multiplying, "0.1"), (no_number, "nan")])
def test_refusal_names_the_call_its_kind_and_the_deviation(computing, wrong, off):
    computing("_linear_pointwise", wrong)
    module, sample, fused = made(torch.float32, "mobilenet_v3_small")
    reason = decided_module(module, fused, CLASSIFIER.outputs, sample).reason
    assert reason.startswith(
        f"on this box oneDNN is off in classifier.0 (linear + hardswish in float32) by {off} of the"
    )


def test_graph_of_another_module_is_refused_although_its_calls_are_right():
    size = (64, 64)  # what is pooled in the end is 2x2
    module, sample, _ = made(torch.float32, ARCHITECTURE, *size[:1])
    other = deepcopy(module)
    other.avgpool = nn.AdaptiveMaxPool2d(1)
    fused = fused_module(other, size, CLASSIFIER.outputs, torch.float32)
    reason = decided_module(module, fused, CLASSIFIER.outputs, sample).reason
    assert reason.startswith("its graph does not answer as torch does: logits by ")


def test_refused_form_is_logged_and_others_are_packed(files, store, computing, caplog):
    computing("_convolution_pointwise_.binary", summing)
    expert = files.classifier("cls/x", ARCHITECTURE, labels="abcdefgh", size=PX)  # a form that was not tried yet
    with caplog.at_level(logging.WARNING):
        report = pack_line([expert], lambda _: {Precision.FP32, Precision.ONEDNN_FP32}, store)
    assert report.packed[expert.id].keys() == {Precision.FP32}
    reason = r"on this box oneDNN is off in layer1\.0\.conv2 \(.*\) by 0\.1 of the largest value"
    with pytest.raises(WeightsMismatch, match=f"resnet18 does not run in onednn-fp32: {reason}.*; choose fp32"):
        raise report.failed[expert.id]
    (told,) = caplog.messages
    assert told.startswith(
        "form_refused module=ResNet numbers=float32 reason=on this box oneDNN is off in layer1.0.conv2 ("
    )


def unlike(images, scale, zero, weight, scales, zeros, offsets, stride, padding, dilation, groups, *answered):
    """A convolution in eight bits that answers with one level everywhere, some way above the lowest."""
    shape = torch.conv2d(
        torch.empty(images.shape, device="meta"), torch.empty(weight.shape, device="meta"), None,
        stride, padding, dilation, groups,
    ).shape  # fmt: skip
    return torch.full(shape, 99.0).to(memory_format=torch.channels_last).to(answered[2])


@needs(Precision.ONEDNN_INT8)
def test_trial_in_eight_bits_detects_exactly_the_wrong_kind_of_call(computing):
    computing("qconv2d_pointwise", unlike, "onednn")
    limit = CALL_DEVIATION_MAXIMUM[torch.int8]
    calls = trial_of(torch.int8).calls
    assert [call for call, off in calls if off > limit] == [
        call for call, _ in calls if call.quantisation and not call.adds
    ]


@needs(Precision.ONEDNN_INT8)
def test_deviation_of_one_level_refuses_no_form():
    """Joined with what is a hundred times as large, all of its values lie in three levels, one of them in another."""
    architecture, size = "yolo12n", (320, 320)
    backend = backend_for(architecture)
    module, sample = backend.module((architecture, 3)), backend.sample((architecture, 3))
    fused = fused_module(module, size, backend.outputs, torch.int8)
    found = tried(module, decided_layouts(fused), backend.outputs, sample)
    assert max(off for _, off in found.calls) < CALL_DEVIATION_MAXIMUM[torch.int8]


def test_rounding_of_a_gate_by_large_sums_refuses_no_form():
    """Of sums as large as 100,000 one may be 0.5, and is rounded as the others are, not as its sigmoid would be."""
    found = trial_of(torch.float32, "efficientnet_v2_s", 128)
    assert max(off for _, off in found.calls) < CALL_DEVIATION_MAXIMUM[torch.float32]
