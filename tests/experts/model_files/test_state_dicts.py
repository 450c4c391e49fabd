"""What weights tell of themselves; what has no weights a module states, and of a state dict it is asked."""

import argparse
import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision import models
from torchvision.models.resnet import BasicBlock

from experts.backends.vision import classifier, detector
from experts.backends.vision.classifier import build_trainable, weight_shapes
from experts.backends.vision.detector import build_trainable as build_detector
from experts.checkpoints.modules import built_layers
from experts.errors import WeightsRefused
from experts.model_files.formats import describe_file, served_suffix, write_weights
from experts.model_files.state_dicts import difference


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    save_file(build_trainable("resnet18", 3, stem="3x3").state_dict(), file)
    return file


def test_state_dict_of_a_classifier_states_its_architecture_but_no_labels(resnet):
    found = describe_file(resnet)
    assert (found.kind, found.architecture, found.stem, found.label_count) == ("classifier", "resnet18", "3x3", 3)
    assert set(found.missing) == {"labels", "size", "normalize", "fit", "task", "variant"}
    assert "the 3 outputs" in found.missing["labels"]
    assert "of resnet18 with 3 labels" in found.evidence["architecture"]
    with pytest.raises(WeightsRefused, match=r"is no resnet34: .* of resnet18 with 3 labels"):
        describe_file(resnet, "resnet34")


def test_state_dict_of_an_ultralytics_detector_has_unit_pixels(tmp_path):
    save_file(build_detector("yolov8n", 2).state_dict(), tmp_path / "y.safetensors")
    found = describe_file(tmp_path / "y.safetensors")
    assert (found.kind, found.architecture, found.normalize, found.label_count) == ("detector", "yolov8n", "unit", 2)
    assert set(found.missing) == {"labels", "size", "variant"}


def test_unknown_or_unsupported_weights_are_refused_by_name(tmp_path):
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsRefused, match=r"its tensors \(a\.weight, .* fit none of .* export the model to ONNX"):
        describe_file(tmp_path / "x.safetensors")
    save_file({"blocks.0.attn.qkv.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsRefused, match=r"is a vision transformer of timm \(blocks.* export it to ONNX"):
        describe_file(tmp_path / "x.safetensors")


class TestCheckpoints:
    def saved(self, folder, **beside):
        network = torch.nn.DataParallel(build_trainable("mobilenet_v3_small", 2))
        torch.save({"model": network.state_dict(), **beside}, folder / "net.pt")
        return folder / "net.pt"

    def test_facts_of_a_checkpoint_are_taken_with_their_places(self, tmp_path):
        found = describe_file(self.saved(tmp_path, classes=["ok", "bent"], args={"img_size": 96}))
        assert (found.architecture, found.labels, found.size) == ("mobilenet_v3_small", ("ok", "bent"), (96, 96))
        assert (found.evidence["labels"], found.evidence["size"]) == ("classes", "args.img_size")
        assert set(found.missing) == {"normalize", "fit", "task", "variant"}
        assert "module. before every name was left out" in found.remarks

    def test_unrelated_names_are_not_taken_for_labels(self, tmp_path):
        found = describe_file(self.saved(tmp_path, classes=["a", "b", "c"]))
        assert found.labels is None
        assert "labels" in found.missing
        assert "classes names 3 labels, and the weights have 2: not taken" in found.remarks

    def test_checkpoint_that_calls_itself_a_twin_is_refused_unless_overridden(self, tmp_path):
        """timm's resnetblur18 has the weights of resnet18, and blurs between its layers."""
        torch.save(
            {"arch": "resnetblur18", "state_dict": build_trainable("resnet18", 2).state_dict()}, tmp_path / "x.pt"
        )
        with pytest.raises(
            WeightsRefused, match=r"is a resnetblur18 \(arch\), .* those of resnet18.* export it to ONNX"
        ):
            describe_file(tmp_path / "x.pt")
        assert describe_file(tmp_path / "x.pt", "resnet18").architecture == "resnet18"

    def test_unknown_checkpoint_is_refused_by_its_own_name(self, tmp_path):
        torch.save({"arch": "resnet26", "state_dict": {"conv1.weight": torch.zeros(2)}}, tmp_path / "x.pt")
        with pytest.raises(WeightsRefused, match=r"says that it is a resnet26; its tensors \(conv1"):
            describe_file(tmp_path / "x.pt")

    def test_weights_are_written_without_their_wrappers(self, tmp_path):
        found = describe_file(self.saved(tmp_path))
        write_weights(found, tmp_path / "net.safetensors")
        assert describe_file(tmp_path / "net.safetensors").architecture == "mobilenet_v3_small"
        assert served_suffix(found) == ".safetensors"
        (tmp_path / "net.pt").rename(tmp_path / "best.pth.tar")
        assert describe_file(tmp_path / "best.pth.tar").architecture == "mobilenet_v3_small"


def test_tensors_that_share_memory_are_written_apart(tmp_path):
    from experts.model_files.state_dicts import describe_state_dict

    shared = torch.randn(1000)
    tensors = {name: torch.zeros(shape) for name, shape in weight_shapes("resnet18", 2, None, 224).items()}
    tensors["bn1.weight"], tensors["bn1.bias"] = shared[:64], shared[32:96]
    found = describe_state_dict(tmp_path / "model.pt", tensors)
    write_weights(found, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["bn1.bias"], shared[32:96])
    assert served_suffix(found) == ".safetensors"


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
def test_first_layer_that_differs_is_named(change, told):
    built = classifier.weightless("resnet18", 3, None, 64)
    changed = copy.deepcopy(built)
    change(changed)
    assert difference(built_layers(changed), built_layers(built), "resnet18") == told


@pytest.mark.parametrize("architecture", ["yolo11n", "yolov5n"])
@pytest.mark.parametrize(("layer", "told"), [("act", "its model.0.act is ReLU, where"), ("pool", "kernel_size=13")])
def test_detector_with_another_activation_or_pooling_is_not_recognised_as_its_architecture(architecture, layer, told):
    built = detector.weightless(architecture, 2)
    changed = copy.deepcopy(built)
    if layer == "act":
        changed.model[0].act = nn.ReLU()
    else:
        next(one for one in changed.model if type(one).__name__ == "SPPF").m = nn.MaxPool2d(13, 1, 6)
    assert told in difference(built_layers(changed), built_layers(built), architecture)


def resnet_module(*, change=None):
    net = classifier.build_trainable("resnet18", 3, stem="3x3")
    if change is not None:
        change(net)
    return net


def described(folder, document):
    torch.save(document, folder / "x.pt")
    return describe_file(folder / "x.pt")


def test_whole_module_is_served_as_the_variant_of_its_layers(tmp_path):
    assert described(tmp_path, nn.DataParallel(resnet_module())).variant == "plain"
    found = described(tmp_path, {"model": resnet_module(change=without_maxpool)})
    assert (found.stem, found.variant) == ("3x3", "no-maxpool")
    assert found.evidence["variant"] == "the 68 layers of the module"
    net = models.googlenet(weights=None, num_classes=3, transform_input=True, init_weights=False)
    assert described(tmp_path, net).variant == "transform-input"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_gelu, "its layer1.0.relu is GELU, where resnet18 has ReLU: export it to ONNX"),
        (with_own_block, "its layer1.1 is tests.experts.model_files.test_state_dicts.OwnBlock, where"),
        (lambda net: net.layer1.register_forward_hook(print), "its layer1 is a Sequential with hooks"),
    ],
)
def test_whole_module_that_computes_otherwise_is_refused_by_its_layer(tmp_path, change, told):
    with pytest.raises(WeightsRefused, match="has the weights of resnet18, and computes otherwise: ") as caught:
        described(tmp_path, resnet_module(change=change))
    assert told in str(caught.value)


def test_code_around_a_module_absent_from_the_file_is_asked_for(tmp_path):
    found = described(tmp_path, OwnNet(resnet_module()))
    assert (
        "inside a tests.experts.model_files.test_state_dicts.OwnNet, whose code the file does not have"
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
def test_state_dict_asks_for_the_variant_unless_a_known_script_built_it(tmp_path, architecture, beside, is_asked):
    found = described(tmp_path, {"state_dict": classifier.build_trainable(architecture, 3).state_dict(), **beside})
    assert ("variant" in found.missing, found.variant) == (is_asked, None if is_asked else "plain")
    assert not is_asked or "--variant plain (all of them as in torchvision's" in found.missing["variant"]
