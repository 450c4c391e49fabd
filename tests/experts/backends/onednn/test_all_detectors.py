"""The YOLO families in oneDNN's form against eager fp32, on random weights and tiny images."""

import functools

import pytest
import torch

from experts.backends import detector
from experts.backends.onednn.form import BlockedWeight, FusedModule, OnednnModule, fused_module
from experts.backends.onednn.layouts import reference
from experts.backends.onednn.trial import tried
from experts.expert import Precision
from tests.forms import needs

FAMILIES = ["yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n"]
SIZE = (64, 64)


ROUNDED = 0.05  # of a call's answers' deviation: what 255 levels and those of the weights may make of it, in the mean
JOINED = {
    "yolo12n": 0.25
}  # where on made-up weights an answer a tenth as large as what it is joined with shares levels


@functools.cache
def fused_of(architecture):
    """The folded module, and what it was fused to."""
    module = detector._template(architecture, 3).folded
    return module, fused_module(module, SIZE, detector.OUTPUTS, torch.float32)


def sample_of(module):
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in module.state_dict().items()}


@needs(Precision.ONEDNN_INT8)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_in_eight_bits_every_call_answers_as_in_fp32(architecture, eight_bits):
    module, plain = fused_of(architecture)
    errors = eight_bits(module, plain, sample_of(module), detector.OUTPUTS).errors()
    limit = JOINED.get(architecture, ROUNDED)
    assert {name: error for name, error in errors.items() if not error < limit} == {}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_it_answers_as_eager_fp32_does(architecture):
    module, fused = fused_of(architecture)
    sample = sample_of(module)
    assert isinstance(fused, FusedModule)
    assert not any(node.target is torch.conv2d for node in fused.graph.graph.nodes)
    form = OnednnModule(fused, {name: BlockedWeight.of(name, reference(shape)) for name, shape in fused.shapes.items()})
    found = tried(module, form, detector.OUTPUTS, sample)
    assert found.outputs.keys() == {"boxes", "scores"}
    assert max(found.outputs.values()) < 1e-4
