"""Architectures told by the names and shapes of tensors."""

from __future__ import annotations

import pytest
import torch

from experts.architectures import CLASSIFIERS, DETECTORS, YOLO_DETECTORS
from experts.backends.classifier import build_trainable
from experts.backends.classifier import tensor_shapes as classifier_shapes
from experts.backends.detector import block_count
from experts.backends.detector import tensor_shapes as detector_shapes
from experts.checkpoints.recognition import recognise


def weightless(shapes):
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


@pytest.mark.parametrize("architecture", ["resnet18", "wide_resnet50_2", "mobilenet_v3_small", "googlenet", "swin_t"])
def test_a_classifier_is_told_by_its_tensors(architecture):
    found = recognise(weightless(classifier_shapes(architecture, 3)))
    assert (found.architecture, found.labels, found.stem, found.size) == (architecture, 3, None, None)
    assert f"torchvision's {architecture}" in found.evidence


def test_a_small_stem_is_seen():
    found = recognise(build_trainable("resnet18", 2, stem="3x3").state_dict())
    assert (found.architecture, found.labels, found.stem) == ("resnet18", 2, "3x3")


def test_auxiliary_heads_are_looked_past():
    weights = weightless(classifier_shapes("googlenet", 4)) | {"aux1.fc2.weight": torch.empty(4, 1024)}
    assert recognise(weights).labels == 4


def test_a_vision_transformer_knows_its_size():
    shapes = classifier_shapes("vit_b_16", 5) | {"encoder.pos_embedding": (1, 1 + 10 * 10, 768)}
    found = recognise(weightless(shapes))
    assert (found.architecture, found.size) == ("vit_b_16", (160, 160))


def test_as_many_labels_as_imagenet_are_labels():
    assert recognise(weightless(classifier_shapes("resnet34", 1000))).labels == 1000


@pytest.mark.parametrize("architecture", ["yolov5n", "yolov8s", "yolo11n", "yolo26n", "yolov10b"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_detector_is_told_by_its_tensors(architecture, prefix):
    shapes = {prefix + name: shape for name, shape in detector_shapes(architecture, 7).items()}
    found = recognise(weightless(shapes))
    assert (found.architecture, found.labels) == (architecture, 7)


def test_a_tensor_more_or_less_is_another_architecture():
    shapes = classifier_shapes("resnet18", 2)
    assert recognise(weightless(shapes | {"extra.weight": (3,)})) is None
    del shapes["layer4.1.conv2.weight"]
    assert recognise(weightless(shapes)) is None


def test_two_heads_of_other_lengths_are_none():
    shapes = classifier_shapes("resnet18", 2) | {"fc.bias": (3,)}
    assert recognise(weightless(shapes)) is None


def test_rubbish_is_nothing():
    assert recognise({}) is None
    assert recognise({"a": torch.zeros(3)}) is None
    assert recognise({"0.cv3.0.2.bias": torch.zeros(3), "model.0.cv3.0.2.bias": torch.zeros(3)}) is None


def test_every_detector_that_is_tried_can_be_named_in_a_line_file():
    assert all(DETECTORS.fullmatch(name) for name in YOLO_DETECTORS)
    assert len(set(YOLO_DETECTORS)) == len(YOLO_DETECTORS)
    assert all(block_count(name) > 10 for name in YOLO_DETECTORS)


@pytest.mark.slow
def test_no_two_classifiers_are_taken_for_one_another():
    seen = {}
    for name in CLASSIFIERS:
        seen.setdefault(frozenset(classifier_shapes(name, 3).items()), []).append(name)
    assert [names for names in seen.values() if len(names) > 1] == []
