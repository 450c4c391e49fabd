"""Training of the two shared detectors, alignment and polarity: each finds the one part of a crop and names its state.

A detector is the frozen trunk with a head that answers one box. Only the head is trained, on the features that the
classifiers were trained on.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from agent.demo.rendering.components import COMPONENTS, OK, Detector
from agent.demo.training.learning import beside_one_another
from agent.demo.training.network import INPUT_PX, CropFeatures, Trunk, write_graph
from experts.expert import IMAGENET, Expert, Fit, InputSpec, Orientation
from experts.llm.training.descent import descend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HEAD_CHANNELS = 32
BOX_WEIGHT = 20.0  # of the box's loss, whose errors are fractions of a crop
STEPS, BATCH_SIZE, LEARNING_RATE = 300, 64, 5e-3
DETECTORS = {component.name: component.detector for component in COMPONENTS if component.detector}


class BoxDetector(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy here
    """Answers pictures from 0 to 1 with one box each, (n, 4 + labels, 1): centre and size in pixels, then the scores.

    The best label has its softmax as score, the others 0, as if suppression had been there.
    """

    def __init__(self, network: nn.Module, detector: Detector) -> None:
        super().__init__()
        self.detector = detector
        self.trunk = Trunk(deepcopy(network))
        with torch.no_grad():
            channels, height, width = self.trunk(torch.zeros(1, 3, INPUT_PX, INPUT_PX))[-1].shape[1:]
        self.head = nn.Sequential(
            nn.Conv2d(channels, HEAD_CHANNELS, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(HEAD_CHANNELS * height * width, 4 + len(detector.labels)),
        )
        self.register_buffer("mean", torch.tensor(IMAGENET.mean).view(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor(IMAGENET.std).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        answer = self.head(self.trunk((images - self.mean) / self.deviation)[-1])
        scores = functional.softmax(answer[:, 4:], 1)
        best = torch.where(scores == scores.amax(1, keepdim=True), scores, 0.0)
        return torch.cat([answer[:, :4] * INPUT_PX, best], 1)[:, :, None]


def train_detectors(network: nn.Module, seen: Sequence[CropFeatures], folder: Path, seed: int) -> list[Expert]:
    """A detector for each question that some component asks, trained on good parts and on those with its defect."""
    asked = []
    for detector in Detector:
        own = [each for each in seen if DETECTORS.get(each.crops[0].component) is detector]
        if own:
            asked.append((BoxDetector(network, detector), own, seed))
    list(beside_one_another(lambda each: train_head(*each), asked))
    experts = []
    for module, _, _ in asked:
        name = f"det/{module.detector}"
        pixels = InputSpec(INPUT_PX, INPUT_PX, "unit", fit=Fit.LETTERBOXED, orientation=Orientation.EXIF)
        file = folder / f"{name}.onnx"
        experts.append(Expert(name, "onnx", file, module.detector.labels, pixels, detector="yolov8"))
        write_graph(module.eval(), "boxes", experts[-1].weights)
    return experts


def train_head(module: BoxDetector, seen: Sequence[CropFeatures], seed: int) -> None:
    """Train the head on good parts and on those with the detector's defect."""
    generator = torch.Generator().manual_seed(seed)
    labels = (OK, module.detector.defect)
    crops = [crop for each in seen for crop in each.crops]
    rows = [row for row, crop in enumerate(crops) if crop.label in labels]
    features = torch.cat([each.features for each in seen])[rows]
    shifts = torch.cat([each.shifts_px for each in seen])[rows].repeat(1, 2) / INPUT_PX
    boxes = centred(torch.tensor([crops[row].body for row in rows]) + shifts)
    targets = torch.tensor([labels.index(crops[row].label) for row in rows])

    def loss(picked: Tensor) -> Tensor:
        answers = module.head(features[picked])
        box_loss = functional.smooth_l1_loss(answers[:, :4], boxes[picked], beta=0.05)
        return functional.cross_entropy(answers[:, 4:], targets[picked]) + BOX_WEIGHT * box_loss

    batches = torch.randint(len(features), (STEPS, BATCH_SIZE), generator=generator)
    descend(module.head.parameters(), list(batches), loss, LEARNING_RATE)


def centred(corners: Tensor) -> Tensor:
    """Left, top, right and bottom (n, 4) as centre and size, within 0 to 1."""
    left, top, right, bottom = corners.clamp(0.0, 1.0).T
    return torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], 1)
