"""Torchvision classifiers: folded, cast and rebound, they answer as torchvision's own module does."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from experts.backends.classifier import ClassifierBackend, build_trainable
from experts.errors import OutputInvalid, WeightsCorrupt, WeightsMismatch
from experts.expert import Precision
from experts.packed.packing import pack_line
from tests.experts.conftest import answers

BACKEND = ClassifierBackend()
FAMILIES = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "regnet_x_400mf"]


def check_against_torchvision(expert, image, precision=Precision.FP32, tolerance=1e-4):
    images = (image, image[::-1].copy(), 255 - image)
    module = build_trainable(expert.architecture, len(expert.labels), expert.stem).eval()
    module.load_state_dict(load_file(expert.weights))
    with torch.inference_mode():
        expected = module(torch.stack([BACKEND.prepare(expert, each).tensor for each in images])).softmax(dim=1)
    scores, winners = expected.max(dim=1)
    found = answers(expert, *images, precision=precision)
    assert [each.label for each in found] == [expert.labels[winner] for winner in winners.tolist()]
    assert [each.score for each in found] == pytest.approx(scores.tolist(), abs=tolerance)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fp32_answers_as_torchvision(files, image, architecture):
    check_against_torchvision(files.classifier("cls/x", architecture), image)


def test_a_transformer_answers_as_torchvision(files, image):
    expert = files.classifier("cls/x", "swin_t")
    check_against_torchvision(expert, image)
    check_against_torchvision(expert, image, Precision.BF16, tolerance=0.1)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_half_precisions_agree_on_the_label(files, image, precision):
    expert = files.classifier("cls/x", "resnet18", size=32)
    packable = BACKEND.pack(expert, precision)
    assert all(tensor.element_size() == 2 for tensor in packable.tensors.values())
    check_against_torchvision(expert, image, precision, tolerance=0.1)


def test_sizes_that_a_skeleton_is_built_for_are_layouts_of_their_own(files, store, make_slot, image):
    """A MaxViT's weights are the same for every size, its windows are not."""
    module = files.build("maxvit_t", 3)
    experts = [files.torch_module(f"cls/{size}", module.eval(), "maxvit_t", size=size) for size in (224, 448)]
    packed = pack_line(experts, lambda _: {Precision.FP32}, store).packed
    forms = [packed[expert.id][Precision.FP32] for expert in experts]
    assert forms[0].layout != forms[1].layout
    for expert, form in zip(experts, forms, strict=True):
        assert make_slot(expert, form, store).infer(expert, image)[0].label in expert.labels


def test_batchnorm_is_gone_where_a_convolution_takes_it(files):
    packable = BACKEND.pack(files.classifier("cls/x", "resnet18"), Precision.FP32)
    assert not [name for name in packable.tensors if "running" in name or "bn" in name]
    assert packable.tensors["layer1.0.conv1.weight"].is_contiguous(memory_format=torch.channels_last)


def test_batchnorm_before_a_convolution_stays(files, image):
    expert = files.classifier("cls/x", "densenet121")
    names = BACKEND.pack(expert, Precision.FP32).tensors.keys()
    assert "features.denseblock1.denselayer1.norm1.running_mean" in names  # a ReLU stands before its convolution
    assert "features.denseblock1.denselayer1.norm2.running_mean" not in names
    check_against_torchvision(expert, image)


def test_auxiliary_heads_of_a_training_checkpoint_are_left_out(files):
    from torchvision import models

    module = models.googlenet(weights=None, num_classes=3, aux_logits=True, init_weights=False)
    expert = files.torch_module("cls/x", module, "googlenet")
    assert not [name for name in BACKEND.pack(expert, Precision.FP32).tensors if name.startswith("aux")]


def test_another_architecture_is_a_mismatch_that_names_tensors(files):
    expert = replace(files.classifier("cls/x", "resnet18"), architecture="resnet50")
    with pytest.raises(WeightsMismatch, match=r"not a resnet50: missing: layer1\.0\.conv3\.weight.*of another shape"):
        BACKEND.pack(expert, Precision.FP32)


def test_an_unknown_architecture_names_its_neighbours(files):
    expert = replace(files.classifier("cls/x", "squeezenet1_1"), architecture="resnet110")
    with pytest.raises(WeightsMismatch, match="resnet101"):
        BACKEND.pack(expert, Precision.FP32)


@pytest.mark.parametrize(("architecture", "stem"), [("squeezenet1_1", "3x3"), ("resnet18", "5x5")])
def test_a_stem_that_does_not_exist_is_refused(files, architecture, stem):
    expert = replace(files.classifier("cls/x", "squeezenet1_1"), architecture=architecture, stem=stem)
    with pytest.raises(WeightsMismatch, match="stem"):
        BACKEND.pack(expert, Precision.FP32)


def test_values_that_are_not_numbers_are_corrupt(files):
    module = build_trainable("squeezenet1_1", 3)
    next(module.parameters()).data[0] = float("nan")
    with pytest.raises(WeightsCorrupt, match=r"features\.0\.weight holds values that are not numbers"):
        BACKEND.pack(files.torch_module("cls/x", module, "squeezenet1_1"), Precision.FP32)


def test_values_beyond_the_precision_are_a_mismatch(files):
    module = build_trainable("squeezenet1_1", 3)
    next(module.parameters()).data[0] = 1e6
    expert = files.torch_module("cls/x", module, "squeezenet1_1")
    with pytest.raises(WeightsMismatch, match="too large for fp16"):
        BACKEND.pack(expert, Precision.FP16)
    BACKEND.pack(expert, Precision.BF16)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.ONNXRUNTIME])
def test_an_infinite_logit_is_no_prediction(files, image, precision):
    """Minus infinity would become a probability of 0, whatever the label means."""
    module = build_trainable("resnet18", 3, "3x3")
    with torch.no_grad():
        module.fc.weight[2].fill_(-3e38)
        module.fc.bias[2] = -3e38
    expert = files.torch_module("cls/x", module, "resnet18", size=32, stem="3x3")
    with pytest.raises(OutputInvalid):
        answers(expert, image, precision=precision)


def test_the_estimated_workspace_is_near_what_the_largest_layers_need(files):
    expert = files.classifier("cls/x", "resnet18", size=64)
    need_bytes = BACKEND.workspace_bytes(expert, Precision.FP32, 9) - BACKEND.workspace_bytes(expert, Precision.FP32, 8)
    first_layer_bytes = 64 * 32 * 32 * 4
    assert 2 * first_layer_bytes <= need_bytes <= 4 * first_layer_bytes
