"""Every classifier of torchvision and family of YOLO in oneDNN's form against eager fp32.

One architecture of each kind of blocks runs, on made-up weights and tiny images: all others are larger ones of these.
"""

import functools

import pytest
import torch
from torch import nn
from torchvision import models

from experts.backends import backend_for
from experts.backends.onednn.execution import CALL_DEVIATION_MAXIMUM, tried
from experts.backends.onednn.form import FusedModule, decided_layouts, fused_module
from experts.backends.onednn.fusion import FusedCall
from experts.backends.vision import classifier
from experts.expert import Precision
from tests.forms import needs

NAMES = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 shufflenet_v2_x0_5 squeezenet1_1
    swin_t swin_v2_t vgg11_bn vit_b_32"""
SIDES = {"alexnet": 64, "inception_v3": 80, "maxvit_t": 224}
CLASSIFIERS = {name: SIDES.get(name, 32) for name in NAMES.split()}  # and the side of their images
DETECTORS = ["yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n"]
QUICK = {"resnet18", "mobilenet_v3_small", "yolov8n"}
RUN = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in [*CLASSIFIERS, *DETECTORS]
]


@functools.cache
def folded(architecture):
    """The folded module, the size of its images, its outputs, and weights that a trial makes noisy."""
    backend, side = backend_for(architecture), CLASSIFIERS.get(architecture, 64)
    structure = (architecture, 3)
    if architecture in CLASSIFIERS:
        structure = classifier._structure_of(architecture, 4, None, (side, side))
    module = backend.module(structure)
    sample = {
        name: torch.ones(tensor.shape)
        if name.endswith("running_var")
        else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    return module, (side, side), backend.outputs, sample


def trial_of(architecture, numbers):
    module, size, outputs, sample = folded(architecture)
    fused = fused_module(module, size, outputs, numbers)
    assert isinstance(fused, FusedModule)
    return fused, tried(module, decided_layouts(fused), outputs, sample)


@pytest.mark.parametrize("architecture", RUN)
def test_onednn_answers_as_eager_fp32_and_leaves_no_convolution_to_torch(architecture):
    fused, found = trial_of(architecture, torch.float32)
    assert max(found.outputs.values()) < 1e-4
    assert not any(node.target is torch.conv2d for node in fused.graph.graph.nodes)
    if architecture in CLASSIFIERS:
        convolutions = sum(type(part) is nn.Conv2d for part in folded(architecture)[0].modules())
        calls = [part for part in fused.inputs if isinstance(part, FusedCall)]
        assert sum(len(call.shape.weight) == 4 for call in calls) == convolutions


@needs(Precision.ONEDNN_BF16)
@pytest.mark.parametrize("architecture", ["mobilenet_v3_small", pytest.param("vit_b_32", marks=pytest.mark.slow)])
def test_onednn_in_bf16_answers_as_eager_bf16(architecture):
    assert trial_of(architecture, torch.bfloat16)[1].outputs["logits"] < 0.1


@needs(Precision.ONEDNN_INT8)
@pytest.mark.parametrize("architecture", RUN)
def test_each_eight_bit_call_answers_as_torch_on_the_same_levels(architecture):
    found = trial_of(architecture, torch.int8)[1]
    assert max(off for _, off in found.calls) < CALL_DEVIATION_MAXIMUM[torch.int8]


def test_every_other_architecture_is_a_larger_one_of_the_tested():
    """Of the same file of torchvision; where one has two kinds of blocks, one of each is above."""
    files = {models.get_model_builder(architecture).__module__ for architecture in CLASSIFIERS}
    others = {models.get_model_builder(other).__module__ for other in models.list_models(module=models)}
    assert others == files
