"""Training of the two shared detectors, alignment and polarity: small YOLOs that look at whole crops.

Both questions are learned by one network first, whose four classes are the labels of both; then each detector takes
over all tensors, keeps its own two rows of the class head, and is trained on its own components' crops alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agent.demo.rendering.components import OK, Detector
from agent.demo.training.classifiers import pictures
from agent.demo.training.crops import BODIES_FILE
from agent.demo.training.learning import Descent, Pace
from experts.backends.detector import build_trainable
from experts.errors import ConfigError
from experts.expert import CONFIDENCE_MINIMUM, NOTHING_FOUND, Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent.demo.training.crops import LabelledCrop

ARCHITECTURE = "yolov5n"
JOINT_PACE = Pace(steps=200, learning_rate=3e-3)
OWN_PACE = Pace(steps=40, learning_rate=3e-4)


@dataclass(frozen=True, slots=True)
class DetectorPlan:
    """Components that share a detector, and the length of both trainings."""

    shared_by: Mapping[str, Detector]
    input_px: int = 64
    joint: Pace = JOINT_PACE
    own: Pace = OWN_PACE
    batch_size: int = 64


@dataclass(frozen=True, slots=True, eq=False)
class DetectorSet:
    """Pictures, uint8 (n, 3, side, side); the one body in each as left, top, right, bottom from 0 to 1; its class."""

    pictures: Tensor
    bodies: Tensor
    classes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TrainedDetector:
    """One expert; ``module`` answers uint8 pictures scaled to [0, 1]."""

    detector: Detector
    module: nn.Module

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors under ultralytics' names."""
        return {name: tensor.detach().contiguous() for name, tensor in self.module.state_dict().items()}


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


def train_detectors(
    crops: Sequence[LabelledCrop], plan: DetectorPlan, seed: int, progress: Callable[[str, int, int], None]
) -> tuple[TrainedDetector, ...]:
    """One trained detector for each question that some component of these crops asks."""
    asked = {detector: chosen for detector in Detector if (chosen := concerned(crops, plan, detector))}
    if not asked:
        return ()
    classes = [label for detector in asked for label in detector.labels]
    everything = detector_set([crop for chosen in asked.values() for crop in chosen], plan, classes)
    total = plan.joint.steps + plan.own.steps * len(asked)
    generator = torch.Generator().manual_seed(seed)
    joint = network(len(classes))
    for done in fit(joint, everything, plan.joint, plan.batch_size, generator):
        progress("detectors", done, total)
    trained = []
    for number, (detector, chosen) in enumerate(asked.items()):
        module = network(len(detector.labels))
        inherit(module, joint, [classes.index(label) for label in detector.labels])
        own = detector_set(chosen, plan, list(detector.labels))
        for done in fit(module, own, plan.own, plan.batch_size, generator):
            progress("detectors", plan.joint.steps + number * plan.own.steps + done, total)
        trained.append(TrainedDetector(detector, module.eval()))
    return tuple(trained)


def detector_set(crops: Sequence[LabelledCrop], plan: DetectorPlan, classes: list[str]) -> DetectorSet:
    targets = [
        classes.index(plan.shared_by[crop.component].labels[0] if crop.label == OK else crop.label) for crop in crops
    ]
    bodies = torch.tensor([crop.body for crop in crops])
    return DetectorSet(pictures(crops, plan.input_px), bodies, torch.tensor(targets))


def inherit(module: nn.Module, joint: nn.Module, rows: list[int]) -> None:
    """Take over the joint network's tensors; where they have a row for each class, only these rows."""
    tensors = joint.state_dict()
    module.load_state_dict(
        {
            name: tensors[name] if tensors[name].shape == own.shape else tensors[name][rows]
            for name, own in module.state_dict().items()
        }
    )


def network(class_count: int) -> nn.Module:
    return build_trainable(ARCHITECTURE, class_count).to(memory_format=torch.channels_last)


def fit(module: nn.Module, data: DetectorSet, pace: Pace, batch_size: int, generator: torch.Generator) -> Iterator[int]:
    """Train with the network's own detection loss; gives the number of steps done, after each."""
    module.train()
    descent = Descent(module.parameters(), pace, weight_decay=0.01)
    count, size = len(data.pictures), min(batch_size, len(data.pictures))
    order = torch.randperm(count, generator=generator)
    for step in range(pace.steps):
        if len(order) < size:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        picked, order = order[:size], order[size:]
        descent.step(module.loss(shifted_batch(data, picked, generator))[0].sum())
        yield step + 1


def shifted_batch(data: DetectorSet, picked: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch as ultralytics' losses take it: shifted together by up to 3 pixels, each picture lit in its own way."""
    side_px = data.pictures.shape[2]
    right, down = (int(shift) - 3 for shift in torch.randint(0, 7, (2,), generator=generator))
    light = 1.0 + 0.15 * (torch.rand(len(picked), 1, 1, 1, generator=generator) - 0.5)
    images = (scaled(torch.roll(data.pictures[picked], (down, right), (2, 3))) * light).clamp(0.0, 1.0)
    left, top, end, bottom = (
        (data.bodies[picked] + torch.tensor([right, down, right, down]) / side_px).clamp(0.0, 1.0).T
    )
    return {
        "img": images.contiguous(memory_format=torch.channels_last),
        "cls": data.classes[picked].float()[:, None],
        "bboxes": torch.stack([(left + end) / 2, (top + bottom) / 2, end - left, bottom - top], 1),
        "batch_idx": torch.arange(len(picked)).float(),
    }


def scaled(batch: Tensor) -> Tensor:
    """uint8 pictures as the serving backend feeds them to a detector: scaled to [0, 1]."""
    return (batch.float() / 255.0).contiguous(memory_format=torch.channels_last)


def predict(trained: TrainedDetector, batch: Tensor) -> list[Prediction]:
    """For each picture (uint8) the box that decides its route, as the serving backend would find it.

    A cell speaks for its best class only and counts above CONFIDENCE_MINIMUM; of these boxes one with the defect
    decides, else the best. Suppression keeps the best box of each class, so it cannot change the answer.
    """
    with torch.inference_mode():
        scores = trained.module(scaled(batch))[0][:, 4:]
    best = scores.masked_fill(scores < scores.amax(1, keepdim=True), 0.0).amax(2)
    return [decided(good, bad, trained.detector) for good, bad in best.tolist()]


def decided(passing_score: float, defect_score: float, detector: Detector) -> Prediction:
    passing, defect = detector.labels
    if defect_score > CONFIDENCE_MINIMUM:
        return Prediction(defect, defect_score)
    return Prediction(passing, passing_score) if passing_score > CONFIDENCE_MINIMUM else Prediction(NOTHING_FOUND, 0.0)
