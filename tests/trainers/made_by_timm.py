"""Run by the trainers' interpreter: `made_by_timm.py FOLDER IMAGE...` leaves there what timm's users have.

Of each model MODEL/last.pth.tar, as timm's saver writes it while training; mobilenetv3.onnx; and answers.json: the
probabilities that the model gives each image after timm's own transform, that of `--crop-mode squash --crop-pct 1
--interpolation bilinear`, which cuts nothing off. own/whole.pt, a module with numbers and a cut of its own, and its
"own" answers after the transform that timm makes of them; and its graph beside the files that Hugging Face's hub has.
"""

import argparse
import json
import sys
from pathlib import Path

import timm
import timm.optim
import torch
from PIL import Image
from telling_apart import begin, finish
from timm.data import create_transform, resolve_model_data_config
from timm.utils import CheckpointSaver

SIZE = 64
LABELS = 3


def main(folder, images):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    prepare = create_transform(SIZE, interpolation="bilinear", crop_pct=1.0, crop_mode="squash")
    pixels = torch.stack([prepare(Image.open(image).convert("RGB")) for image in images])
    networks = {name: trained(name, pixels) for name in ("resnet18", "resnetblur18", "mobilenetv3_small_050")}
    for name, network in networks.items():
        save(network, name, folder / name)
    network = networks["mobilenetv3_small_050"]
    torch.onnx.export(network, (torch.zeros(1, 3, SIZE, SIZE),), folder / "mobilenetv3.onnx", verbose=False)
    answers = {name: own_answers(network, pixels) for name, network in networks.items()}
    answers["own"] = save_own(folder, images)
    (folder / "answers.json").write_text(json.dumps(answers))


def save_own(folder, images):
    """A resnet18 that was trained with a mean and a deviation of 0.5, and on the middle of its images."""
    said = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "input_size": (3, SIZE, SIZE), "crop_pct": 0.9}
    said |= {"interpolation": "bicubic", "crop_mode": "center"}
    network = begin(timm.create_model("resnet18", pretrained=False, num_classes=LABELS, pretrained_cfg_overlay=said))
    prepare = create_transform(**resolve_model_data_config(network))
    pixels = torch.stack([prepare(Image.open(image).convert("RGB")) for image in images])
    finish(network, network.get_classifier(), pixels)
    for name in ("own", "hub"):
        (folder / name).mkdir()
    torch.save(network, folder / "own" / "whole.pt")
    torch.onnx.export(network, (torch.zeros(1, 3, SIZE, SIZE),), folder / "hub" / "model.onnx", verbose=False)
    (folder / "hub" / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": said}))
    return own_answers(network, pixels)


def trained(name, pixels):
    """One step, as timm's train script takes it."""
    network = begin(timm.create_model(name, pretrained=False, num_classes=LABELS))
    optimizer = timm.optim.create_optimizer_v2(network, opt="sgd", lr=0.1)
    images, labels = torch.randn(6, 3, SIZE, SIZE), torch.tensor([0, 1, 2, 0, 1, 2])
    torch.nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
    return finish(network, network.get_classifier(), pixels)


def save(network, name, folder):
    """last.pth.tar, with the arguments of the run."""
    folder.mkdir()
    arguments = argparse.Namespace(model=name, img_size=SIZE, num_classes=LABELS, mean=None, std=None, lr=0.1)
    optimizer = timm.optim.create_optimizer_v2(network, opt="sgd", lr=0.1)
    saver = CheckpointSaver(network, optimizer, args=arguments, checkpoint_dir=str(folder), max_history=1)
    saver.save_checkpoint(epoch=0, metric=0.5)


def own_answers(network, pixels):
    with torch.no_grad():
        return network(pixels).softmax(dim=1).tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))
