"""Torchvision classifiers: folded, cast and rebound, they answer as torchvision's own module does."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from experts.backends.vision.classifier import ClassifierBackend, build_trainable
from experts.errors import OutputInvalid, WeightsCorrupt, WeightsMismatch
from experts.expert import Precision
from experts.packed.packing import pack_line
from tests.experts.conftest import answers, packed_in
from tests.forms import needs

BACKEND = ClassifierBackend()
SLOW = ("regnet_x_400mf", "densenet121", "swin_t")
ANSWERS = [  # (architecture, form, tolerance of a score)
    *((name, Precision.FP32, 1e-4) for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5")),
    ("squeezenet1_1", Precision.FP32, 1e-4), ("resnet18", Precision.FP16, 0.1),
    *((name, Precision.BF16, 0.1) for name in ("resnet18", "swin_t")),
    *(pytest.param(name, Precision.FP32, 1e-4, marks=pytest.mark.slow) for name in SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "precision", "tolerance"), ANSWERS)
def test_each_form_answers_as_torchvision_in_fp32(files, image, architecture, precision, tolerance):
    expert = files.classifier("cls/x", architecture)
    images = (image, image[::-1].copy(), 255 - image)
    module = build_trainable(architecture, len(expert.labels)).eval()
    module.load_state_dict(load_file(expert.weights))
    with torch.inference_mode():
        expected = module(torch.stack([BACKEND.prepare(expert, each).tensor for each in images])).softmax(dim=1)
    scores, winners = expected.max(dim=1)
    found = answers(expert, *images, precision=precision)
    assert [each.label for each in found] == [expert.labels[winner] for winner in winners.tolist()]
    assert [each.score for each in found] == pytest.approx(scores.tolist(), abs=tolerance)


@pytest.mark.parametrize(
    ("architecture", "variant", "form"),
    [
        ("resnet18", "no-maxpool", Precision.FP32),
        ("googlenet", "transform-input", Precision.FP32),
        *(
            pytest.param(*variant, form, marks=[needs(form), pytest.mark.slow])
            for variant in (("resnet18", "no-maxpool"), ("googlenet", "transform-input"))
            for form in (Precision.ONNXRUNTIME, Precision.ONEDNN_FP32)
        ),
    ],
)
def test_variant_answers_as_torchvisions_changed_module_and_shares_no_layout(
    files, store, image, architecture, variant, form
):
    plain = files.classifier("cls/x", architecture)
    expert = replace(plain, id="cls/y", variant=variant)
    module = build_trainable(architecture, len(expert.labels)).eval()
    module.load_state_dict(load_file(expert.weights))
    if variant == "no-maxpool":
        module.maxpool = torch.nn.Identity()
    else:
        module.transform_input = True
    with torch.inference_mode():
        expected = module(BACKEND.prepare(expert, image).tensor[None]).softmax(dim=1).max().item()
    found, others = answers(expert, image, precision=form), answers(plain, image, precision=form)
    assert found[0].score == pytest.approx(expected, abs=1e-4)
    assert abs(found[0].score - others[0].score) > 1e-3
    packed = packed_in(store, [plain, expert], form)
    assert packed["cls/x"][form].layout != packed["cls/y"][form].layout


def test_batchnorm_is_folded_into_the_convolution_before_it(files):
    tensors = BACKEND.pack(files.classifier("cls/x", "densenet121"), Precision.FP32).tensors
    assert "features.denseblock1.denselayer1.norm1.running_mean" in tensors  # a ReLU stands before its convolution
    assert "features.denseblock1.denselayer1.norm2.running_mean" not in tensors
    assert tensors["features.denseblock1.denselayer1.conv2.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "resnet50"}, r"not a resnet50: missing: layer1\.0\.conv3\.weight.*of another shape"),
        ({"architecture": "resnet110"}, "resnet101"),
        ({"architecture": "squeezenet1_1", "stem": "3x3"}, "stem"),
        ({"stem": "5x5"}, "stem"),
        ({"variant": "transform-input"}, "resnet18 has no variant transform-input"),
    ],
)
def test_other_architecture_or_stem_is_a_mismatch_that_names_it(files, changes, reason):
    with pytest.raises(WeightsMismatch, match=reason):
        BACKEND.pack(replace(files.classifier("cls/x", "resnet18"), **changes), Precision.FP32)


@pytest.mark.slow
def test_sizes_that_a_skeleton_is_built_for_are_separate_layouts(files, store, make_slot, image):
    """A MaxViT's weights are the same for every size, its windows are not."""
    module = files.build("maxvit_t", 3)
    experts = [files.torch_module(f"cls/{size}", module.eval(), "maxvit_t", size=size) for size in (224, 448)]
    packed = pack_line(experts, lambda _: {Precision.FP32}, store).packed
    forms = [packed[expert.id][Precision.FP32] for expert in experts]
    assert forms[0].layout != forms[1].layout
    for expert, form in zip(experts, forms, strict=True):
        assert make_slot(expert, form, store).infer(expert, image)[0].label in expert.labels


def test_auxiliary_heads_of_a_training_checkpoint_are_left_out(files):
    from torchvision import models

    module = models.googlenet(weights=None, num_classes=3, aux_logits=True, init_weights=False)
    expert = files.torch_module("cls/x", module, "googlenet")
    assert not [name for name in BACKEND.pack(expert, Precision.FP32).tensors if name.startswith("aux")]


def test_nan_weights_are_corrupt_and_those_beyond_the_precision_a_mismatch(files):
    module = build_trainable("squeezenet1_1", 3)
    next(module.parameters()).data[0] = 1e6
    expert = files.torch_module("cls/x", module, "squeezenet1_1")
    with pytest.raises(WeightsMismatch, match="too large for fp16"):
        BACKEND.pack(expert, Precision.FP16)
    BACKEND.pack(expert, Precision.BF16)
    next(module.parameters()).data[0] = float("nan")
    with pytest.raises(WeightsCorrupt, match=r"features\.0\.weight holds NaN or infinity"):
        BACKEND.pack(files.torch_module("cls/x", module, "squeezenet1_1"), Precision.FP32)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.ONNXRUNTIME])
def test_infinite_logit_is_no_prediction(files, image, precision):
    """Minus infinity would become a probability of 0, whatever the label means."""
    module = build_trainable("resnet18", 3, "3x3")
    with torch.no_grad():
        module.fc.weight[2].fill_(-3e38)
        module.fc.bias[2] = -3e38
    expert = files.torch_module("cls/x", module, "resnet18", size=32, stem="3x3")
    with pytest.raises(OutputInvalid):
        answers(expert, image, precision=precision)


def test_estimated_workspace_is_near_the_need_of_the_largest_layers(files):
    expert = files.classifier("cls/x", "resnet18", size=64)
    need_bytes = BACKEND.workspace_bytes(expert, Precision.FP32, 9) - BACKEND.workspace_bytes(expert, Precision.FP32, 8)
    first_layer_bytes = 64 * 32 * 32 * 4
    assert 2 * first_layer_bytes <= need_bytes <= 4 * first_layer_bytes
