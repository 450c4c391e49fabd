"""Training of the two shared detectors, alignment and polarity: each finds the one part of a crop and names its state.

A detector is the frozen trunk with a head that answers one box. Only the head is trained, on trunk features that are
computed once for each of a few shifted copies of a crop.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from agent.demo.rendering.components import OK, Detector
from agent.demo.training.classifiers import EVALUATION_BATCH, Trunk, fast_math, normalised, pictures
from agent.demo.training.crops import BODIES_FILE
from agent.demo.training.learning import Descent, Pace
from experts.errors import ConfigError
from experts.expert import CONFIDENCE_MINIMUM, IMAGENET, NOTHING_FOUND, Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.demo.training.crops import LabelledCrop

OUTPUT = "boxes"
HEAD_CHANNELS = 32
BOX_WEIGHT = 20.0  # of the box's loss, whose errors are fractions of a crop
MAX_SHIFT_PX = 3
PACE = Pace(steps=600, learning_rate=5e-3)


@dataclass(frozen=True, slots=True)
class DetectorPlan:
    """Components that share a detector, and the length of its training. ``copies``: of each crop, shifted."""

    shared_by: Mapping[str, Detector]
    input_px: int = 64
    copies: int = 4
    pace: Pace = PACE
    batch_size: int = 64


class BoxDetector(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy here
    """Answers pictures from 0 to 1 with one box each, (n, 4 + labels, 1): centre and size in pixels, then the scores.

    The best label has its softmax as score, the others 0, as if suppression had been there.
    """

    def __init__(self, network: nn.Module, label_count: int, input_px: int) -> None:
        super().__init__()
        self.trunk = Trunk(deepcopy(network))
        with torch.no_grad():
            channels, height, width = self.trunk(torch.zeros(1, 3, input_px, input_px))[-1].shape[1:]
        self.head = nn.Sequential(
            nn.Conv2d(channels, HEAD_CHANNELS, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(HEAD_CHANNELS * height * width, 4 + label_count),
        )
        self.input_px = input_px
        self.register_buffer("mean", torch.tensor(IMAGENET.mean).view(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor(IMAGENET.std).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        answer = self.head(self.trunk((images - self.mean) / self.deviation)[-1])
        scores = functional.softmax(answer[:, 4:], 1)
        best = torch.where(scores == scores.amax(1, keepdim=True), scores, 0.0)
        return torch.cat([answer[:, :4] * self.input_px, best], 1)[:, :, None]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedDetector:
    """One expert; ``module`` answers uint8 pictures scaled to [0, 1]."""

    detector: Detector
    module: BoxDetector


def concerned(crops: Sequence[LabelledCrop], plan: DetectorPlan, detector: Detector) -> list[LabelledCrop]:
    """The crops that a detector would be asked about: its components' good parts, and those with its defect.

    Raises ConfigError for one of them of which it is not known where in the crop the part lies.
    """
    labels = {OK, detector.defect}
    chosen = [crop for crop in crops if plan.shared_by.get(crop.component) is detector and crop.label in labels]
    for crop in chosen:
        if crop.body is None:
            raise ConfigError(
                f"{crop.component}/{BODIES_FILE} does not say where the part lies in {crop.label}/{crop.file}: "
                f"the {detector} detector needs it"
            )
    return chosen


def train_detector(
    module: BoxDetector, detector: Detector, crops: Sequence[LabelledCrop], plan: DetectorPlan, seed: int
) -> TrainedDetector:
    """Train the head for one question on the crops that it concerns."""
    generator = torch.Generator().manual_seed(seed)
    module.eval()
    targets = torch.tensor([int(crop.label == detector.defect) for crop in crops]).repeat(plan.copies)
    features, boxes = shifted_features(module.trunk, crops, plan, generator)
    descent = Descent(module.head.parameters(), plan.pace, weight_decay=0.05)
    for _ in range(plan.pace.steps):
        picked = torch.randint(len(features), (plan.batch_size,), generator=generator)
        answers = module.head(features[picked])
        box_loss = functional.smooth_l1_loss(answers[:, :4], boxes[picked], beta=0.05)
        descent.step(functional.cross_entropy(answers[:, 4:], targets[picked]) + BOX_WEIGHT * box_loss)
    return TrainedDetector(detector, module)


def shifted_features(
    trunk: Trunk, crops: Sequence[LabelledCrop], plan: DetectorPlan, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The trunk's last maps of all crops, ``plan.copies`` times over, and each copy's box as fractions of the crop."""
    images, corners = pictures(crops, plan.input_px), torch.tensor([crop.body for crop in crops])
    features, boxes = [], []
    for picked in list(torch.arange(len(crops)).split(EVALUATION_BATCH)) * plan.copies:
        right, down = (torch.randint(-MAX_SHIFT_PX, MAX_SHIFT_PX + 1, (2,), generator=generator)).tolist()
        moved = torch.roll(images[picked], (down, right), (2, 3))
        with torch.no_grad(), fast_math():
            features.append(trunk(normalised(moved))[-1].float())
        boxes.append(centred(corners[picked] + torch.tensor([right, down, right, down]) / plan.input_px))
    return torch.cat(features), torch.cat(boxes)


def centred(corners: Tensor) -> Tensor:
    """Left, top, right and bottom (n, 4) as centre and size, within 0 to 1."""
    left, top, right, bottom = corners.clamp(0.0, 1.0).T
    return torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], 1)


def predict(trained: TrainedDetector, batch: Tensor) -> list[Prediction]:
    """For each picture (uint8) the label of its box, as the serving backend would find it."""
    with torch.inference_mode():
        scores, rows = trained.module(batch.float() / 255.0)[:, 4:, 0].max(1)
    labels = trained.detector.labels
    return [
        Prediction(labels[row], score) if score > CONFIDENCE_MINIMUM else Prediction(NOTHING_FOUND, 0.0)
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True)
    ]
