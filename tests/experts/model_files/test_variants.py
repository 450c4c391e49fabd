"""What has no weights decides, too: a module states it, and of a state dict it is asked."""

import argparse
import copy

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.resnet import BasicBlock

from experts.backends import classifier, detector
from experts.checkpoints.modules import built_layers
from experts.errors import WeightsRefused
from experts.model_files.formats import describe_file
from experts.model_files.state_dicts import difference


class OwnBlock(BasicBlock):
    """Its code is not in a file."""


class OwnNet(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, images):
        return self.net(2 * images - 1)


def with_gelu(net):
    net.layer1[0].relu = nn.GELU()


def with_leaky(net):
    net.relu = nn.LeakyReLU(0.2)


def without_maxpool(net):
    net.maxpool = nn.Identity()


def with_epsilon(net):
    net.layer2[1].bn1.eps = 1e-3


def with_stride(net):
    net.layer2[0].conv1.stride, net.layer2[0].conv2.stride = (1, 1), (2, 2)


def with_blur(net):
    net.layer3[0].conv2 = nn.Sequential(net.layer3[0].conv2, nn.AvgPool2d(2, 1))


def with_own_block(net):
    net.layer1[1].__class__ = OwnBlock


def with_dropout(net):
    net.layer4.add_module("drop", nn.Dropout(0.5))


def unchanged(net):
    net.relu = nn.ReLU(inplace=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_gelu, "its layer1.0.relu is GELU, where resnet18 has ReLU"),
        (with_leaky, "its relu is LeakyReLU, where resnet18 has ReLU"),
        (without_maxpool, "its maxpool is Identity, where resnet18 has MaxPool2d"),
        (with_epsilon, "its layer2.1.bn1 is BatchNorm2d(eps=0.001), where resnet18 has BatchNorm2d(eps=1e-05)"),
        (with_stride, "its layer2.0.conv1 is Conv2d(stride=[1, 1]), where resnet18 has Conv2d(stride=[2, 2])"),
        (with_blur, "its layer3.0.conv2 is Sequential, where resnet18 has Conv2d"),
        (with_own_block, "its layer1.1 is OwnBlock, where resnet18 has BasicBlock"),
        (with_dropout, None),
        (unchanged, None),
    ],
)
def test_the_first_layer_that_differs_is_named(change, told):
    built = classifier.weightless("resnet18", 3, None, 64)
    changed = copy.deepcopy(built)
    change(changed)
    assert difference(built_layers(changed), built_layers(built), "resnet18") == told


@pytest.mark.parametrize("architecture", ["yolo11n", "yolov5n"])
@pytest.mark.parametrize(("layer", "told"), [("act", "its model.0.act is ReLU, where"), ("pool", "kernel_size=13")])
def test_a_detector_of_another_activation_or_pooling_is_not_taken_for_its_architecture(architecture, layer, told):
    built = detector.weightless(architecture, 2)
    changed = copy.deepcopy(built)
    if layer == "act":
        changed.model[0].act = nn.ReLU()
    else:
        next(one for one in changed.model if type(one).__name__ == "SPPF").m = nn.MaxPool2d(13, 1, 6)
    assert told in difference(built_layers(changed), built_layers(built), architecture)


def resnet(*, change=None):
    net = classifier.build_trainable("resnet18", 3, stem="3x3")
    if change is not None:
        change(net)
    return net


def described(folder, document):
    torch.save(document, folder / "x.pt")
    return describe_file(folder / "x.pt")


def test_a_whole_module_is_served_as_the_variant_that_its_layers_are(tmp_path):
    assert described(tmp_path, nn.DataParallel(resnet())).variant == "plain"
    found = described(tmp_path, {"model": resnet(change=without_maxpool)})
    assert (found.stem, found.variant) == ("3x3", "no-maxpool")
    assert found.evidence["variant"] == "the 68 layers of the module"
    net = models.googlenet(weights=None, num_classes=3, transform_input=True, init_weights=False)
    assert described(tmp_path, net).variant == "transform-input"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_gelu, "its layer1.0.relu is GELU, where resnet18 has ReLU: export it to ONNX"),
        (with_own_block, "its layer1.1 is tests.experts.model_files.test_variants.OwnBlock, where"),
        (lambda net: net.layer1.register_forward_hook(print), "its layer1 is a Sequential with hooks"),
    ],
)
def test_a_whole_module_that_computes_otherwise_is_refused_by_its_layer(tmp_path, change, told):
    with pytest.raises(WeightsRefused, match="has the weights of resnet18, and computes otherwise: ") as caught:
        described(tmp_path, resnet(change=change))
    assert told in str(caught.value)


def test_code_around_a_module_that_the_file_does_not_have_is_asked_for(tmp_path):
    found = described(tmp_path, OwnNet(resnet()))
    assert (
        "inside a tests.experts.model_files.test_variants.OwnNet, whose code the file does not have"
        in (found.missing["variant"])
    )


@pytest.mark.parametrize(
    ("architecture", "beside", "is_asked"),
    [
        ("resnet18", {}, True),
        ("resnet18", {"arch": "resnet18"}, True),
        ("resnet18", {"arch": "resnet18", "version": 2, "args": argparse.Namespace(model="resnet18")}, False),
        ("resnet18", {"args": argparse.Namespace(model="resnet18", val_resize_size=256, val_crop_size=224)}, False),
        ("googlenet", {"args": argparse.Namespace(model="googlenet", val_resize_size=256, val_crop_size=224)}, True),
    ],
)
def test_of_a_state_dict_it_is_asked_unless_a_known_script_built_the_model_by_name(
    tmp_path, architecture, beside, is_asked
):
    found = described(tmp_path, {"state_dict": classifier.build_trainable(architecture, 3).state_dict(), **beside})
    assert ("variant" in found.missing, found.variant) == (is_asked, None if is_asked else "plain")
    assert not is_asked or "--variant plain (all of them as in torchvision's" in found.missing["variant"]
