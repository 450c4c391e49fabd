"""Training of the classifiers: one trunk for all components, then a last stage and a head for each.

A whole ResNet18 that knows all components comes first: the stored one of rendered components, else one trained here.
Its head has a row for each label of any component, and each crop is judged among its own component's labels. Then the
trunk (everything before ``layer4``) is frozen, running statistics included. Each component's ``layer4`` and head are
trained on the trunk's features, from the joint ones on. So the experts of a line share their trunk bit for bit, and
each still owns three quarters of its bytes.

Why: a trunk that has seen all components needs few crops of each, and is trained once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import save_file
from torch.nn import functional

from agent.demo.rendering.components import OK
from agent.demo.training.learning import descend
from agent.demo.training.network import (
    ARCHITECTURE,
    EVALUATION_BATCH,
    INPUT_PX,
    STEM,
    Trunk,
    fast_math,
    pictures,
    resnet,
    varied,
)  # fmt: skip
from experts.expert import Expert, InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from agent.demo.training.crops import LabelledCrop

FOREIGN_LOGIT = -1e4  # of a label that the crop's component does not have


class Descent(NamedTuple):
    """Training of a network. ``sides_px``: the pictures' side in each epoch.

    Epochs below INPUT_PX cost less; with ``crops_centre`` they see a crop's middle, else all of it smaller.
    ``turns``: mirror images and quarter turns keep their label, which is untrue of parts with a polarity.
    """

    sides_px: tuple[int, ...]
    learning_rate: float
    batch_size: int
    turns: bool = False
    crops_centre: bool = False


def all_labels(labels: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({label for each in labels.values() for label in each}))


def target(crop: LabelledCrop, labels: Sequence[str]) -> str:
    """Label that a component's classifier learns for a crop: a detector's defect passes as ok."""
    return crop.label if crop.label in labels else OK


def masks_and_targets(
    crops: Sequence[LabelledCrop], labels: Mapping[str, Sequence[str]], rows: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """For each crop, which rows of the joint head are not its component's, and which row is right."""
    foreign = {name: [row not in own for row in rows] for name, own in labels.items()}
    masks = torch.tensor([foreign[crop.component] for crop in crops])
    return masks, torch.tensor([rows.index(target(crop, labels[crop.component])) for crop in crops])


def train_jointly(
    network: nn.Module,
    crops: Sequence[LabelledCrop],
    labels: Mapping[str, Sequence[str]],
    plan: Descent,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> nn.Module:
    """Train a ResNet18 on all components at once. ``labels``: by component; each is one of the network's."""
    generator = torch.Generator().manual_seed(seed)
    images = pictures(crops)
    masks, targets = masks_and_targets(crops, labels, network.labels)
    size = min(plan.batch_size, len(crops))
    batches = [
        (side_px, picked)
        for side_px in plan.sides_px
        for picked in torch.randperm(len(crops), generator=generator).split(size)
        if len(picked) == size
    ]
    network.train()

    def loss(batch: tuple[int, tuple[int, Tensor]]) -> Tensor:
        number, (side_px, picked) = batch
        progress("trunk", number + 1, len(batches))
        shown = smaller(varied(images[picked], plan.turns, generator), side_px, plan.crops_centre)
        with fast_math():
            logits = network(shown).float()
        return functional.cross_entropy(logits.masked_fill(masks[picked], FOREIGN_LOGIT), targets[picked])

    descend(network.parameters(), list(enumerate(batches)), loss, plan.learning_rate)
    return network.eval()


def smaller(batch: Tensor, side_px: int, crops_centre: bool) -> Tensor:
    margin = (batch.shape[2] - side_px) // 2
    if margin <= 0:
        return batch
    if crops_centre:
        return batch[:, :, margin : margin + side_px, margin : margin + side_px]
    return functional.interpolate(batch, size=(side_px, side_px), mode="area")


def train_classifier(
    joint: nn.Module, crops: Sequence[LabelledCrop], labels: tuple[str, ...], plan: Descent, folder: Path, seed: int
) -> Expert:
    """One component's expert, written below ``folder``: its layer4 and head are trained, from the joint ones on."""
    generator = torch.Generator().manual_seed(seed)
    rows = [joint.labels.index(label) for label in labels]
    state = joint.state_dict()
    network = resnet(labels)
    network.load_state_dict(state | {name: state[name][rows] for name in ("fc.weight", "fc.bias")})
    network.eval()  # running statistics are frozen
    trunk, images = Trunk(network), varied(pictures(crops), plan.turns, generator)
    with torch.no_grad(), fast_math():
        features = torch.cat([trunk(chunk)[-1] for chunk in images.split(EVALUATION_BATCH)])
    targets = torch.tensor([labels.index(target(crop, labels)) for crop in crops])

    def loss(picked: Tensor) -> Tensor:
        with fast_math():
            logits = network.fc(network.layer4(features[picked]).mean((2, 3))).float()
        return functional.cross_entropy(logits, targets[picked])

    batches = [
        picked
        for _ in plan.sides_px
        for picked in torch.randperm(len(crops), generator=generator).split(plan.batch_size)
    ]
    descend([*network.layer4.parameters(), *network.fc.parameters()], batches, loss, plan.learning_rate)
    name = f"cls/{crops[0].component}"
    file = folder / f"{name}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, file)
    return Expert(name, ARCHITECTURE, file, labels, InputSpec(INPUT_PX, INPUT_PX), stem=STEM)
