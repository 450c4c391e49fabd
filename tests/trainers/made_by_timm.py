"""Files that timm's users have.

Of each model MODEL/last.pth.tar, as timm's saver writes it while training; mobilenetv3.onnx; and answers.json: the
probabilities that the model gives each image after timm's own transform, that of `--crop-mode squash --crop-pct 1
--interpolation bilinear`, which cuts nothing off. own/whole.pt, a module with numbers and a cut of its own, and its
"own" answers after the transform that timm makes of them; and its graph beside the files that Hugging Face's hub has.
"""

import argparse
import json

import timm
import timm.optim
import torch
from PIL import Image
from telling_apart import begin, finish
from timm.data import create_transform, resolve_model_data_config
from timm.utils import CheckpointSaver

SIZE = 64
LABELS = 3
# The numbers and the cut that a network was trained with: the middle of its images.
SAID = {
    "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "input_size": (3, SIZE, SIZE), "crop_pct": 0.9,
    "interpolation": "bicubic", "crop_mode": "center",
}  # fmt: skip


def quick(folder, images):
    network, answers = with_numbers(images)
    (folder / "own").mkdir()
    torch.save(network, folder / "own" / "whole.pt")
    save(folder, images, ["resnet18"], {"own": answers})


def more(folder, images):
    network, answers = with_numbers(images)
    (folder / "hub").mkdir()
    export(network, folder / "hub" / "model.onnx")
    (folder / "hub" / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": SAID}))
    networks = save(folder, images, ["resnetblur18", "mobilenetv3_small_050"], {"own": answers})
    export(networks["mobilenetv3_small_050"], folder / "mobilenetv3.onnx")


def with_numbers(images):
    """A resnet18 that says SAID of itself, and its answers."""
    torch.manual_seed(0)
    network = begin(timm.create_model("resnet18", pretrained=False, num_classes=LABELS, pretrained_cfg_overlay=SAID))
    pixels = prepared(images, **resolve_model_data_config(network))
    finish(network, network.get_classifier(), pixels)
    return network, own_answers(network, pixels)


def prepared(images, **how):
    prepare = create_transform(**how)
    return torch.stack([prepare(Image.open(image).convert("RGB")) for image in images])


def export(network, file):
    torch.onnx.export(network, (torch.zeros(1, 3, SIZE, SIZE),), file, verbose=False)


def trained(name, pixels):
    """One step, as timm's train script takes it."""
    network = begin(timm.create_model(name, pretrained=False, num_classes=LABELS))
    optimizer = timm.optim.create_optimizer_v2(network, opt="sgd", lr=0.1)
    images, labels = torch.randn(6, 3, SIZE, SIZE), torch.tensor([0, 1, 2, 0, 1, 2])
    torch.nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
    return finish(network, network.get_classifier(), pixels)


def save(folder, images, names, answers):
    """last.pth.tar of each, with the arguments of the run; answers.json with ``answers`` added; the networks."""
    pixels = prepared(images, input_size=SIZE, interpolation="bilinear", crop_pct=1.0, crop_mode="squash")
    networks = {name: trained(name, pixels) for name in names}
    for name, network in networks.items():
        (folder / name).mkdir()
        arguments = argparse.Namespace(model=name, img_size=SIZE, num_classes=LABELS, mean=None, std=None, lr=0.1)
        optimizer = timm.optim.create_optimizer_v2(network, opt="sgd", lr=0.1)
        saver = CheckpointSaver(network, optimizer, args=arguments, checkpoint_dir=str(folder / name), max_history=1)
        saver.save_checkpoint(epoch=0, metric=0.5)
        answers[name] = own_answers(network, pixels)
    (folder / "answers.json").write_text(json.dumps(answers))
    return networks


def own_answers(network, pixels):
    with torch.no_grad():
        return network(pixels).softmax(dim=1).tolist()
