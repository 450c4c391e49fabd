"""Weights as trainers save them: under wrappers' names, beside losses and averages, with a head of their own."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from experts.backends.vision.classifier import build_trainable
from experts.backends.vision.detector import weight_shapes
from experts.errors import WeightsRefused
from experts.model_files.formats import describe_file, served_suffix, write_weights

NETWORK = build_trainable("shufflenet_v2_x0_5", 3)
WEIGHTS = NETWORK.state_dict()
AVERAGE = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in WEIGHTS.items()}
LIGHTNING = {"pytorch-lightning_version": "2.5.0", "hyper_parameters": {"lr": 0.1}, "loops": {}}


def under(prefix, weights=None):
    return {prefix + name: tensor.clone() for name, tensor in (weights or WEIGHTS).items()}


def described(folder, document):
    torch.save(document, folder / "x.pt")
    return describe_file(folder / "x.pt")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({**under("model."), "criterion.weight": torch.ones(3)}, "criterion.weight is of a loss: left out"),
        ({**under("model."), "loss_fn.0.pos_weight": torch.ones(3)}, "loss_fn.0.pos_weight is of a loss: left out"),
        ({**under("net."), "class_weights": torch.ones(3)}, "class_weights is of a loss: left out"),
        ({**under("model."), "val_cm.confmat": torch.zeros(3, 3)}, "val_cm.confmat is of a metric: left out"),
        ({**under("model."), "test_acc.tp": torch.zeros(3)}, "test_acc.tp is of a metric: left out"),
        (under("model._orig_mod."), "model._orig_mod. before every name was left out"),
        (
            {name.replace("stage2.", "stage2._orig_mod."): each for name, each in under("net.").items()},
            "wrappers inside names were left out",
        ),
    ],
)
def test_metric_and_loss_weights_of_lightning_are_left_out_by_name(tmp_path, state, said):
    found = described(tmp_path, {**LIGHTNING, "state_dict": state})
    assert (found.architecture, found.tensors.keys()) == ("shufflenet_v2_x0_5", WEIGHTS.keys())
    assert said in found.remarks


@pytest.mark.parametrize(
    ("one", "average"), [("model.", "ema_model.module."), ("net.", "averaged_net."), ("model.", "swa_model.module.")]
)
def test_average_is_served_rather_than_its_network_which_is_noted(tmp_path, one, average):
    state = {**under(one), **under(average, AVERAGE), f"{average.partition('.')[0]}.n_averaged": torch.tensor(5)}
    found = described(tmp_path, {**LIGHTNING, "state_dict": state})
    assert torch.equal(found.tensors["fc.bias"], AVERAGE["fc.bias"])
    assert any("the average" in each and f"{one[:-1]} has weights, too: left out" in each for each in found.remarks)


def test_parallel_network_inside_an_average_is_unwrapped(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(nn.DataParallel(NETWORK))
    found = described(tmp_path, {"model": WEIGHTS, "model_ema": average.state_dict()})
    assert "module.module. before every name was left out" in found.remarks
    assert found.architecture == "shufflenet_v2_x0_5"


def test_two_networks_without_an_average_are_refused(tmp_path):
    with pytest.raises(WeightsRefused, match="of the same layers under student, teacher: save the"):
        described(tmp_path, {**LIGHTNING, "state_dict": {**under("student."), **under("teacher.")}})


def test_weights_that_may_belong_to_the_network_are_not_left_out(tmp_path):
    with pytest.raises(WeightsRefused, match=r"shufflenet_v2_x0_5 is the nearest, and has no norm\.mean 3"):
        described(tmp_path, {**LIGHTNING, "state_dict": {**under("model."), "norm.mean": torch.zeros(3)}})


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "backbone.", "module._orig_mod."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrapped_names_and_half_precision_of_a_safetensors_file_are_served_plain(tmp_path, prefix, dtype):
    state = {name: each.to(dtype) if each.is_floating_point() else each for name, each in under(prefix).items()}
    save_file(state, tmp_path / "x.safetensors", {"labels": '["a", "b", "c"]'})
    found = describe_file(tmp_path / "x.safetensors")
    write_weights(found, tmp_path / f"own{served_suffix(found)}")
    again = describe_file(tmp_path / "own.safetensors")
    assert again.tensors is None
    assert (again.architecture, again.labels) == ("shufflenet_v2_x0_5", ("a", "b", "c"))


def with_head(architecture, place, head):
    net = build_trainable(architecture, 3)
    setattr(net, place, head)
    return net


HEADS = [
    ("shufflenet_v2_x0_5", "fc", nn.Sequential(nn.Dropout(0.3), nn.Linear(1024, 3)), "fc.weight"),
    ("efficientnet_b0", "classifier", nn.Linear(1280, 3), "classifier.1.weight"),
    ("mobilenet_v2", "classifier", nn.Sequential(nn.Linear(1280, 3)), "classifier.1.weight"),
]


@pytest.mark.parametrize(("architecture", "place", "head", "name"), HEADS)
def test_single_layer_head_is_served_at_any_place(tmp_path, architecture, place, head, name):
    net = with_head(architecture, place, head)
    found = described(tmp_path, net.state_dict())
    assert (found.architecture, found.tensors[name].shape[0]) == (architecture, 3)
    assert "beside it only a Dropout is plain" in found.missing["variant"]
    assert described(tmp_path, net).variant == "plain"


def test_softmax_in_a_modules_own_head_is_refused(tmp_path):
    net = with_head("shufflenet_v2_x0_5", "fc", nn.Sequential(nn.Linear(1024, 3), nn.Softmax(1)))
    with pytest.raises(WeightsRefused, match=r"computes otherwise: its fc is Sequential, where shufflenet_v2_x0_5 has"):
        described(tmp_path, net)


@pytest.mark.slow
def test_unknown_detector_names_the_nearest_one(tmp_path):
    state = {name: torch.zeros(each) for name, each in weight_shapes("yolov8n", 2).items()}
    state["model.9.cv2.conv.weight"] = torch.zeros(256, 512, 3, 3)
    told = "yolov8n is the nearest: its model.9.cv2.conv.weight is 256x512x3x3, where yolov8n has 256x512x1x1"
    with pytest.raises(WeightsRefused, match=told):
        described(tmp_path, state)


def test_network_below_an_unknown_attribute_is_reported_by_its_prefix(tmp_path):
    with pytest.raises(WeightsRefused, match=r"its names begin with cnn\.: save the state_dict\(\) of that part"):
        described(tmp_path, under("cnn."))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda net: setattr(net, "fc", nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 3))),
            "whose head is one layer, fc.weight, and this head is fc.0.weight 64x1024, fc.2.weight 3x64",
        ),
        (
            lambda net: setattr(net.conv1, "0", nn.Conv2d(1, 24, 3, 2, 1, bias=False)),
            "its conv1.0.weight is 24x1x3x3, where shufflenet_v2_x0_5 has 24x3x3x3",
        ),
        (lambda net: setattr(net, "extra", nn.Linear(2, 2)), "and has no extra."),
        (
            lambda net: (delattr(net, "fc"), setattr(net, "last_linear", nn.Linear(1024, 3))),
            "whose head is one layer, fc.weight, and this head is last_linear.weight 3x1024",
        ),
    ],
)
def test_unknown_weights_name_the_nearest_and_the_first_difference(tmp_path, change, told):
    net = build_trainable("shufflenet_v2_x0_5", 3)
    change(net)
    with pytest.raises(
        WeightsRefused, match=r"fit none of torchvision's .*shufflenet_v2_x0_5 is the nearest"
    ) as caught:
        described(tmp_path, net.state_dict())
    assert told in str(caught.value)
