"""The network below all experts of a demo line: a ResNet18 for small crops, and pictures as it takes them."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from experts.backends.forms.plain import is_multiplied
from experts.backends.ort.export import IMAGES, OPSET
from experts.backends.vision.classifier import build_trainable
from experts.expert import IMAGENET, Precision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.demo.training.crops import LabelledCrop

ARCHITECTURE = "resnet18"
STEM = "3x3"
INPUT_PX = 64
EVALUATION_BATCH = 128


def resnet(labels: Sequence[str]) -> nn.Module:
    """A new network whose head has a row for each of its ``labels``."""
    network = build_trainable(ARCHITECTURE, len(labels), STEM).to(memory_format=torch.channels_last)
    network.labels = tuple(labels)
    return network


def narrowed(joint: nn.Module, labels: Sequence[str]) -> nn.Module:
    """A copy of the joint network whose head has only the rows of these labels; running statistics are frozen."""
    rows = [joint.labels.index(label) for label in labels]
    network = deepcopy(joint).eval()
    network.fc = nn.Linear(joint.fc.in_features, len(labels))
    network.fc.load_state_dict({name: tensor[rows] for name, tensor in joint.fc.state_dict().items()})
    network.labels = tuple(labels)
    return network


class Trunk(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy here
    """The layers before ``layer4``. Answers normalised pictures with the maps of its three stages."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.entry = nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool)
        self.stages = nn.ModuleList([network.layer1, network.layer2, network.layer3])

    def forward(self, images: Tensor) -> list[Tensor]:
        maps, x = [], self.entry(images)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class CropFeatures(NamedTuple):
    """One component's crops, each shifted at random, as the frozen trunk sees them.

    ``features``: its last maps, (n, channels, height, width). ``shifts_px``: right and down, (n, 2).
    """

    crops: Sequence[LabelledCrop]
    features: Tensor
    shifts_px: Tensor


def fast_math() -> torch.autocast:
    """bf16 where this processor multiplies it natively, else fp32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=is_multiplied(Precision.BF16))


def pictures(crops: Sequence[LabelledCrop]) -> Tensor:
    """The crops' pixels, scaled as the serving backend scales them: uint8 (n, 3, INPUT_PX, INPUT_PX)."""
    scaled = []
    for crop in crops:
        image = Image.fromarray(crop.pixels)
        if image.size != (INPUT_PX, INPUT_PX):
            image = image.resize((INPUT_PX, INPUT_PX), Image.Resampling.BILINEAR)
        scaled.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    return torch.stack(scaled)


def normalised(batch: Tensor) -> Tensor:
    """uint8 pictures as the serving backend feeds them: scaled to [0, 1], ImageNet's mean and deviation taken out."""
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET.mean, IMAGENET.std))
    return ((batch.float() / 255.0 - mean) / deviation).contiguous(memory_format=torch.channels_last)


def varied(batch: Tensor, turns: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normalised pictures, each eighth of the batch mirrored and turned its own way, and shifted by up to 2 pixels.

    Beside them the shift of each, right and down in pixels: (n, 2).
    """
    chunks, shifts = [], []
    for chunk in normalised(batch).chunk(8):
        quarter, mirror, down, right = torch.randint(0, 20, (4,), generator=generator).tolist()
        if turns:
            chunk = torch.rot90(chunk, quarter % 4, (2, 3))
            chunk = chunk.flip(3) if mirror % 2 else chunk
        chunks.append(torch.roll(chunk, (down % 5 - 2, right % 5 - 2), (2, 3)))
        shifts.append(torch.tensor([right % 5 - 2, down % 5 - 2]).expand(len(chunk), 2))
    return torch.cat(chunks).contiguous(memory_format=torch.channels_last), torch.cat(shifts)


def write_graph(module: nn.Module, output: str, file: Path) -> None:
    """Write an ONNX graph that answers images (n, 3, INPUT_PX, INPUT_PX) with ``output``.

    By torch's older exporter, which takes a twentieth of the newer one's time for these networks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and advises on networks that are trained on
        torch.onnx.export(
            deepcopy(module).eval(), (torch.zeros(2, 3, INPUT_PX, INPUT_PX),), file, dynamo=False, opset_version=OPSET,
            input_names=[IMAGES], output_names=[output], dynamic_axes={IMAGES: {0: "n"}, output: {0: "n"}},
            training=torch.onnx.TrainingMode.PRESERVE,  # else names of folded tensors differ by graph: no sharing
        )  # fmt: skip
