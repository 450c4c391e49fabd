"""Training of the two shared detectors, alignment and polarity: small YOLOs that look at whole crops.

Both questions are learned by one network first, whose four classes are the labels of both; then each detector takes
over all tensors, keeps its own two rows of the class head, and is trained on its own components' crops alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agent.demo.classifiers import pictures
from agent.demo.components import OK, Detector
from experts.backends.detector import build_trainable
from experts.expert import NOTHING_FOUND

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.demo.crops import LabelledCrop

ARCHITECTURE = "yolov5n"
CONFIDENCE = 0.25  # below it the serving backend reports no box
MAX_GRADIENT = 10.0


@dataclass(frozen=True, slots=True)
class DetectorPlan:
    """Which components share which detector, and how long both are trained."""

    shared_by: Mapping[str, Detector]
    input_px: int = 64
    joint_steps: int = 180
    own_steps: int = 30
    joint_learning_rate: float = 3e-3
    own_learning_rate: float = 3e-4
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
    """The crops that a detector would be asked about: its components' good parts, and those with its defect."""
    return [
        crop
        for crop in crops
        if crop.body is not None
        and plan.shared_by.get(crop.component) is detector
        and crop.label in {OK, detector.defect}
    ]


def train_detectors(
    crops: Sequence[LabelledCrop], plan: DetectorPlan, seed: int, progress: Callable[[str, int, int], None]
) -> tuple[TrainedDetector, ...]:
    """One trained detector for each question that some component of these crops asks."""
    asked = {detector: chosen for detector in Detector if (chosen := concerned(crops, plan, detector))}
    if not asked:
        return ()
    classes = [label for detector in asked for label in detector.labels]
    everything = detector_set([crop for chosen in asked.values() for crop in chosen], plan, classes)
    steps = plan.joint_steps + plan.own_steps * len(asked)
    generator = torch.Generator().manual_seed(seed)
    joint = build_trainable(ARCHITECTURE, len(classes)).to(memory_format=torch.channels_last)
    fit(
        joint,
        everything,
        plan,
        plan.joint_steps,
        plan.joint_learning_rate,
        generator,
        lambda done: progress("detectors", done, steps),
    )
    trained = []
    for number, (detector, chosen) in enumerate(asked.items()):
        before = plan.joint_steps + number * plan.own_steps
        module = build_trainable(ARCHITECTURE, len(detector.labels)).to(memory_format=torch.channels_last)
        inherit(module, joint, [classes.index(label) for label in detector.labels])
        own = detector_set(chosen, plan, list(detector.labels))
        fit(
            module, own, plan, plan.own_steps, plan.own_learning_rate, generator,
            lambda done, before=before: progress("detectors", before + done, steps),
        )  # fmt: skip
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


def fit(
    module: nn.Module,
    data: DetectorSet,
    plan: DetectorPlan,
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
    progress: Callable[[int], None],
) -> None:
    """Train for a number of steps with the network's own detection loss."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps + 1, pct_start=0.2)
    count, size = len(data.pictures), min(plan.batch_size, len(data.pictures))
    order = torch.randperm(count, generator=generator)
    for step in range(steps):
        if len(order) < size:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        picked, order = order[:size], order[size:]
        loss = module.loss(shifted_batch(data, picked, generator))[0].sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), MAX_GRADIENT)
        optimizer.step()
        schedule.step()
        progress(step + 1)


def shifted_batch(data: DetectorSet, picked: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch as ultralytics' losses take it; all its pictures shifted by up to 3 pixels, each lit a little differently."""
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


def deciding_boxes(trained: TrainedDetector, batch: Tensor) -> list[tuple[str, float]]:
    """For each picture (uint8) the label that decides its route, and its score.

    A box with the defect decides, else the best box; a box below CONFIDENCE does not count. Suppressing overlapping boxes
    of one class never changes the best of a class, so none are suppressed here.
    """
    with torch.inference_mode():
        answer = trained.module(scaled(batch))
    best = (answer[0] if isinstance(answer, (tuple, list)) else answer)[:, 4:].amax(2)
    passing, defect = trained.detector.labels
    decided = []
    for good, bad in best.tolist():
        if bad >= CONFIDENCE:
            decided.append((defect, bad))
        else:
            decided.append((passing, good) if good >= CONFIDENCE else (NOTHING_FOUND, 0.0))
    return decided
