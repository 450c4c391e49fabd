"""Weights are recognised by their names and shapes: as what they are, or as nothing."""

import pytest
import torch

from experts.architectures import CLASSIFIERS
from experts.backends.modules.binding import Weightless
from experts.backends.vision import classifier, detector
from experts.model_files.recognition import FAMILIES, may_be_twin, recognise

QUICK = ("alexnet", "vgg11_bn", "mobilenet_v3_large", "resnet34", "squeezenet1_1", "vit_b_32", "yolov5n", "yolo11n")
ONE_OF_EACH = (  # families, and what differs within one
    "convnext_small", "densenet161", "efficientnet_b1", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5",
    "mobilenet_v2", "regnet_y_800mf", "resnext50_32x4d", "wide_resnet50_2", "shufflenet_v2_x1_5", "swin_t", "swin_v2_s",
    "yolov8m", "yolov9e", "yolov10s", "yolo12n", "yolo26s", "yolov3-tiny",
)  # fmt: skip


def without_memory(shapes):
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def weights_of(architecture, labels=3, stem=None, size=224):
    if architecture in CLASSIFIERS:
        return without_memory(classifier.weight_shapes(architecture, labels, stem, size))
    return without_memory(detector.weight_shapes(architecture, labels))


@pytest.mark.parametrize("architecture", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in ONE_OF_EACH)])
def test_each_family_is_recognised(architecture):
    found = recognise(weights_of(architecture, labels=5))
    assert (found.architecture, found.labels, found.stem, found.unserved) == (architecture, 5, None, None)


def test_every_classifier_has_a_family():
    strays = [name for name in CLASSIFIERS if sum(name.startswith(family.prefixes) for family in FAMILIES) != 1]
    assert strays == []


def test_hint_counts_only_if_it_fits_and_stem_and_size_are_detected():
    assert recognise(weights_of("resnet18", stem="3x3")).stem == "3x3"
    assert recognise(weights_of("vit_b_16", size=96)).size == (96, 96)
    weights = weights_of("yolov8n")
    assert recognise(weights, "yolo11n").architecture == "yolov8n"
    assert recognise(weights, "no such thing").architecture == "yolov8n"
    assert recognise(weights_of("resnet18"), "resnet34").architecture == "resnet18"


@pytest.mark.parametrize(
    "name", ["resnetaa50", "timm/resnetblur50.bt_in1k", "resnet50d", "resnext50_32x4d", "ResNet-101"]
)
def test_relative_of_an_architecture_may_have_equal_weights(name):
    assert may_be_twin("resnet50", name)


@pytest.mark.parametrize(
    "name", ["resnet50", "ResNet-50", "timm/resnet50.a1_in1k", "tv_resnet50", "resnet", "parts-v3", ""]
)
def test_other_spelling_or_an_authors_own_name_is_no_relative(name):
    assert not may_be_twin("resnet50", name)
    assert not may_be_twin("yolo11n", name)


@pytest.mark.parametrize("architecture", ["squeezenet1_1", "yolov8n"])
def test_differing_weight_is_another_model(architecture):
    weights = weights_of(architecture)
    name = next(iter(weights))
    assert recognise({**weights, "model.0.more": torch.empty(1, device="meta")}) is None
    assert recognise({**weights, name: torch.empty(7, 7, device="meta")}) is None
    del weights[name]
    assert recognise(weights) is None


def test_auxiliary_heads_and_counts_of_batches_do_not_matter():
    from torchvision import models

    full = models.googlenet(num_classes=4, aux_logits=True, init_weights=False).state_dict()
    assert recognise(full).architecture == "googlenet"
    without = {name: tensor for name, tensor in full.items() if not name.endswith("num_batches_tracked")}
    assert recognise(without).labels == 4


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("conv1.3.weight", "ResNet of timm with a deep stem"), ("s1.b1.conv1.conv.weight", "RegNet of timm"),
        ("pre_logits.fc1.weight", "VGG of timm"), ("blocks.0.attn.qkv.weight", "vision transformer of timm"),
        ("stages.0.blocks.0.conv_dw.weight", "ConvNeXt of timm"),
        ("roi_heads.box_head.fc6.weight", "detector of torchvision"),
        ("head.classification_head.conv.0.weight", "detector of torchvision"), ("model.memory_bank", "anomaly model"),
    ],
)  # fmt: skip
def test_unsupported_model_is_named_with_what_can_be_done(name, told):
    found = recognise(without_memory({name: (4, 4), "other": (1,)}))
    assert (found.architecture, found.evidence) == (told, f"{name} is in it")
    assert "export it to ONNX" in found.unserved


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("m.0.weight", "yolov5 with anchors"), ("proto.cv1.conv.weight", "yolo segmentation"),
        ("linear.weight", "yolo classifier"),
    ],
)  # fmt: skip
def test_other_models_of_yolo_are_named(head, told):
    found = recognise(without_memory({"model.0.conv.weight": (16, 3, 3, 3), f"model.9.{head}": (4, 4)}))
    assert found.architecture == told
    assert found.unserved


def test_rt_detr_is_named_and_unknown_weights_are_not():
    from ultralytics.nn.tasks import RTDETRDetectionModel

    with Weightless():
        weights = RTDETRDetectionModel("rtdetr-l.yaml", nc=2, verbose=False).state_dict()
    assert recognise(weights).unserved == "RT-DETR is served as a graph: export it to ONNX, and add that"
    unknown = {}, without_memory({"weight": (3, 3)}), without_memory({"model.0.conv.weight": ()})
    assert [recognise(each) for each in unknown] == [None] * 3
