"""Training of the classifiers: one trunk for all components, then a last stage and a head for each.

A whole ResNet18 that knows all components comes first: trained here, or the stored one of rendered components. Its head
knows the union of their labels, and each crop is judged among its own component's labels. Then the trunk (everything
before ``layer4``) is frozen, running statistics included. Each component's own ``layer4`` and head are trained on its
crops' trunk features, from where the joint ones stand. So the experts of a line share their trunk bit for bit, and each
still owns three quarters of its bytes.

Why: a trunk that has seen all components needs few crops of each, and is trained once.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from agent.demo.training.learning import Descent, Pace
from experts.backends.classifier import build_trainable
from experts.backends.forms.plain import is_multiplied
from experts.expert import IMAGENET, Precision, Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agent.demo.training.crops import LabelledCrop

ARCHITECTURE = "resnet18"
STEM = "3x3"
OWN_STAGES = ("layer4.", "fc.")
EVALUATION_BATCH = 128
FOREIGN_LOGIT = -1e4  # of a label that the crop's component does not have


@dataclass(frozen=True, slots=True)
class ClassifierPlan:
    """Epochs and sizes of the classifiers' training. ``joint_px``: the picture's side in each joint epoch.

    Epochs below ``input_px`` cost less; with ``crops_centre`` they see a crop's middle, else all of it smaller.
    ``turns``: mirror images and quarter turns keep their label, which is untrue of parts with a polarity.
    """

    input_px: int = 64
    joint_px: tuple[int, ...] = (48, 48, 64)
    crops_centre: bool = True
    turns: bool = True
    joint_learning_rate: float = 3e-3
    joint_batch_size: int = 64
    own_epochs: int = 2
    own_learning_rate: float = 2e-4
    own_batch_size: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class ClassifierSet:
    """Pictures, uint8 (n, 3, side, side), and truths. Targets count a component's own labels from 0."""

    labels: dict[str, tuple[str, ...]]
    pictures: Tensor
    components: tuple[str, ...]
    targets: Tensor

    def of(self, component: str) -> Tensor:
        return torch.tensor([i for i, name in enumerate(self.components) if name == component], dtype=torch.long)


def classifier_set(
    crops: Sequence[LabelledCrop],
    labels: dict[str, tuple[str, ...]],
    target_of: Callable[[LabelledCrop], str],
    side_px: int,
) -> ClassifierSet:
    """Crops as tensors. ``target_of`` says what a component's classifier shall answer for a crop."""
    targets = [labels[crop.component].index(target_of(crop)) for crop in crops]
    return ClassifierSet(
        labels, pictures(crops, side_px), tuple(crop.component for crop in crops), torch.tensor(targets)
    )


def pictures(crops: Sequence[LabelledCrop], side_px: int) -> Tensor:
    """The crops' pixels, scaled as the serving backend scales them: uint8 (n, 3, side_px, side_px)."""
    scaled = []
    for crop in crops:
        image = Image.fromarray(crop.pixels)
        if image.size != (side_px, side_px):
            image = image.resize((side_px, side_px), Image.Resampling.BILINEAR)
        scaled.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    return torch.stack(scaled)


@dataclass(frozen=True, slots=True, eq=False)
class JointNetwork:
    """A whole ResNet18 that tells all components' labels apart; ``labels``: of its head's rows."""

    network: nn.Module
    labels: tuple[str, ...]


def train_jointly(
    model: nn.Module, data: ClassifierSet, plan: ClassifierPlan, seed: int, progress: Callable[[str, int, int], None]
) -> JointNetwork:
    """Train a ResNet18 on all components at once; its head has a row for each of ``union_labels``."""
    generator = torch.Generator().manual_seed(seed)
    union = union_labels(data)
    masks, targets = masks_and_targets(data, union)
    model.train()
    count, size = len(data.pictures), min(plan.joint_batch_size, len(data.pictures))
    steps = count // size * len(plan.joint_px)
    descent = Descent(model.parameters(), Pace(steps, plan.joint_learning_rate), weight_decay=0.05)
    done = 0
    for side_px in plan.joint_px:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - size + 1, size):
            picked = order[start : start + size]
            batch = smaller(varied(data.pictures[picked], plan.turns, generator), side_px, plan.crops_centre)
            with fast_math():
                logits = model(batch).float()
            descent.step(functional.cross_entropy(logits.masked_fill(masks[picked], FOREIGN_LOGIT), targets[picked]))
            done += 1
            progress("trunk", done, steps)
    return JointNetwork(model.eval(), union)


def union_labels(data: ClassifierSet) -> tuple[str, ...]:
    return tuple(sorted({label for labels in data.labels.values() for label in labels}))


def masks_and_targets(data: ClassifierSet, union: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """For each crop, which rows of the joint head are not its component's, and which row is right."""
    rows = {name: torch.tensor([union.index(label) for label in labels]) for name, labels in data.labels.items()}
    foreign = {name: torch.ones(len(union), dtype=torch.bool).index_fill(0, own, False) for name, own in rows.items()}
    masks = torch.stack([foreign[name] for name in data.components])
    targets = torch.stack([rows[name][target] for name, target in zip(data.components, data.targets, strict=True)])
    return masks, targets


@dataclass(frozen=True, slots=True, eq=False)
class TrainedClassifier:
    """One expert's tensors under torchvision's names; those of the trunk are the same objects for all experts."""

    component: str
    labels: tuple[str, ...]
    tensors: dict[str, Tensor]


def train_own_stages(
    joint: JointNetwork, data: ClassifierSet, component: str, plan: ClassifierPlan, seed: int
) -> TrainedClassifier:
    """One component's layer4 and head, trained on the frozen trunk's features from the joint ones on."""
    generator = torch.Generator().manual_seed(seed)
    members = data.of(component)
    labels = data.labels[component]
    features = trunk_features(joint.network, varied(data.pictures[members], plan.turns, generator))
    targets = data.targets[members]
    stage, head = own_stages(joint.network, [joint.labels.index(label) for label in labels])
    size = min(plan.own_batch_size, len(members))
    pace = Pace(-(-len(members) // size) * plan.own_epochs, plan.own_learning_rate)
    descent = Descent([*stage.parameters(), *head.parameters()], pace, weight_decay=0.01)
    for _ in range(plan.own_epochs):
        for picked in torch.randperm(len(members), generator=generator).split(size):
            with fast_math():
                logits = head(stage(features[picked]).mean((2, 3))).float()
            descent.step(functional.cross_entropy(logits, targets[picked]))
    return TrainedClassifier(component, labels, merged_tensors(joint.network, stage, head))


def own_stages(trunk: nn.Module, rows: Sequence[int]) -> tuple[nn.Module, nn.Linear]:
    """Copies of the joint layer4, its statistics frozen, and of the joint head's rows of one component."""
    stage = resnet(1).layer4
    stage.load_state_dict(trunk.layer4.state_dict())
    head = nn.Linear(trunk.fc.in_features, len(rows))
    with torch.no_grad():
        head.weight.copy_(trunk.fc.weight[list(rows)])
        head.bias.copy_(trunk.fc.bias[list(rows)])
    return stage.eval(), head


def merged_tensors(trunk: nn.Module, stage: nn.Module, head: nn.Module) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in trunk.state_dict().items() if not name.startswith(OWN_STAGES)}
    tensors |= {f"layer4.{name}": tensor for name, tensor in stage.state_dict().items()}
    tensors |= {f"fc.{name}": tensor for name, tensor in head.state_dict().items()}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def predict(trunk: nn.Module, classifier: TrainedClassifier, batch: Tensor) -> list[Prediction]:
    """Predictions of one trained expert for these pictures (uint8)."""
    stage, head = own_stages(trunk, range(len(classifier.labels)))
    for module, prefix in ((stage, "layer4."), (head, "fc.")):
        own = {name: tensor for name, tensor in classifier.tensors.items() if name.startswith(prefix)}
        module.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in own.items()})
    with torch.inference_mode(), fast_math():
        logits = head(stage(trunk_features(trunk, normalised(batch))).mean((2, 3)))
    scores, rows = (values.tolist() for values in logits.float().softmax(1).max(1))
    return [Prediction(classifier.labels[row], score) for row, score in zip(rows, scores, strict=True)]


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


def trunk_features(network: nn.Module, batch: Tensor) -> Tensor:
    """The frozen trunk's last map of normalised pictures: what enters layer4."""
    trunk = Trunk(network)
    with torch.no_grad(), fast_math():
        return torch.cat([trunk(chunk)[-1] for chunk in batch.split(EVALUATION_BATCH)])


def resnet(label_count: int) -> nn.Module:
    return build_trainable(ARCHITECTURE, label_count, STEM).to(memory_format=torch.channels_last)


def varied(batch: Tensor, turns: bool, generator: torch.Generator) -> Tensor:
    """Normalised pictures, each eighth of the batch mirrored and turned its own way, and shifted by up to 2 pixels."""
    chunks = []
    for chunk in normalised(batch).chunk(8):
        quarter, mirror, down, right = torch.randint(0, 20, (4,), generator=generator).tolist()
        if turns:
            chunk = torch.rot90(chunk, quarter % 4, (2, 3))
            chunk = chunk.flip(3) if mirror % 2 else chunk
        chunks.append(torch.roll(chunk, (down % 5 - 2, right % 5 - 2), (2, 3)))
    return torch.cat(chunks).contiguous(memory_format=torch.channels_last)


def smaller(batch: Tensor, side_px: int, crops_centre: bool) -> Tensor:
    """The pictures' middle of this side, or the whole made this small."""
    margin = (batch.shape[2] - side_px) // 2
    if margin <= 0:
        return batch
    if crops_centre:
        return batch[:, :, margin : margin + side_px, margin : margin + side_px]
    return functional.interpolate(batch, size=(side_px, side_px), mode="area")


def normalised(batch: Tensor) -> Tensor:
    """uint8 pictures as the serving backend feeds them: scaled to [0, 1], ImageNet's mean and deviation taken out."""
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET.mean, IMAGENET.std))
    return ((batch.float() / 255.0 - mean) / deviation).contiguous(memory_format=torch.channels_last)


@contextmanager
def fast_math() -> Iterator[None]:
    """bf16 where this processor multiplies it natively, else fp32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_multiplied(Precision.BF16)):
        yield
