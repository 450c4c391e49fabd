"""Every classifier of torchvision in oneDNN's form against eager fp32.

One of each kind of blocks is run, on random weights and tiny images; all others are made of the same, more or wider.
"""

import functools

import pytest
import torch
from torch import nn
from torchvision import models

from experts.backends import classifier
from experts.backends.onednn.form import BlockedWeight, FusedModule, OnednnModule, fused_module
from experts.backends.onednn.fusion import FusedCall
from experts.backends.onednn.layouts import reference
from experts.backends.onednn.trial import tried
from experts.expert import Precision
from tests.forms import needs

RUN = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "googlenet": 32,
    "inception_v3": 80,
    "maxvit_t": 224,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_x_400mf": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "resnet50": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vgg11_bn": 32,
    "vit_b_32": 32,
}


def form_of(architecture):
    return classifier._structure_of(architecture, 4, None, (RUN[architecture], RUN[architecture]))


def sample_of(module):
    """Zeros and unit variances, which the trial makes noisy."""
    return {
        name: torch.ones(tensor.shape)
        if name.endswith("running_var")
        else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


@functools.cache
def fused_of(architecture, dtype):
    """The folded module, and what it was fused to."""
    module, size = classifier._template(form_of(architecture)).folded, RUN[architecture]
    return module, fused_module(module, (size, size), ("logits",), dtype)


def packed_whole(fused):
    """Every weight in oneDNN's layout, as on a box where one serves all."""
    return OnednnModule(fused, {name: BlockedWeight.of(name, reference(shape)) for name, shape in fused.shapes.items()})


@pytest.mark.parametrize("architecture", RUN)
def test_it_answers_as_eager_fp32_does(architecture):
    module, fused = fused_of(architecture, torch.float32)
    assert isinstance(fused, FusedModule)
    found = tried(module, packed_whole(fused), ("logits",), sample_of(module))
    assert found.outputs["logits"] < 1e-4


@needs(Precision.ONEDNN_BF16)
@pytest.mark.parametrize("architecture", ["resnet50", "mobilenet_v3_small", "vit_b_32"])
def test_in_bf16_it_answers_as_eager_bf16_does(architecture):
    module, fused = fused_of(architecture, torch.bfloat16)
    found = tried(module, packed_whole(fused), ("logits",), sample_of(module))
    assert found.outputs["logits"] < 0.1


ROUNDED = 0.05  # of a call's answers' deviation: what 255 levels and those of the weights may make of it, in the mean


@needs(Precision.ONEDNN_INT8)
@pytest.mark.parametrize("architecture", RUN)
def test_in_eight_bits_every_call_answers_as_in_fp32(architecture, eight_bits):
    module, plain = fused_of(architecture, torch.float32)
    errors = eight_bits(module, plain, sample_of(module), ("logits",)).errors()
    assert {name: error for name, error in errors.items() if not error < ROUNDED} == {}


@needs(Precision.ONEDNN_INT8)
@pytest.mark.parametrize("architecture", ["mobilenet_v2", "squeezenet1_1"])
def test_a_call_with_another_scale_would_be_told(architecture, eight_bits):
    module, plain = fused_of(architecture, torch.float32)
    made = eight_bits(module, plain, sample_of(module), ("logits",))
    weight = made.calls[len(made.calls) // 2].weight
    assert made.errors()[weight] < ROUNDED
    made.tensors[f"{weight} scales"].mul_(1.2)
    assert made.errors()[weight] > ROUNDED


@pytest.mark.parametrize("architecture", RUN)
def test_no_convolution_is_left_to_torch(architecture):
    module, fused = fused_of(architecture, torch.float32)
    convolutions = sum(type(part) is nn.Conv2d for part in module.modules())
    calls = [part for part in fused.inputs if isinstance(part, FusedCall)]
    assert sum(len(call.shape.weight) == 4 for call in calls) == convolutions
    assert not any(node.target is torch.conv2d for node in fused.graph.graph.nodes)


def test_every_other_architecture_is_a_larger_one_of_these():
    """Of the same file of torchvision; where one has two kinds of blocks, one of each is above."""
    files = {models.get_model_builder(architecture).__module__ for architecture in RUN}
    others = {models.get_model_builder(other).__module__ for other in models.list_models(module=models)}
    assert others == files
