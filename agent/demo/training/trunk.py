"""The joint network below a line's experts: a ResNet18 that knows all components, trained here or stored.

Its head has a row for each label of any component, and each crop is judged among its own component's labels. A trunk
that has seen all components needs few crops of each, and is trained once.

Guarantees: ``stored_network`` answers the network that ``python -m agent.demo.training.trunk`` wrote, by its hash. That
command renders other crops than any demo does, trains on them for a quarter of an hour of one core and prints the hash.

The file has 6 MB at most: weights are int8 with one scale for each row, and each 3x3 convolution of ``layer4`` is the
product of two narrow matrices. Each component's own ``layer4`` starts from there and is trained in full.
"""

from __future__ import annotations

import sys
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from agent.demo.rendering.components import COMPONENTS, OK
from agent.demo.training.crops import render_crops
from agent.demo.training.network import fast_math, pictures, resnet, varied
from experts.errors import CoServeError
from experts.llm.training.descent import descend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


FILE = Path(__file__).with_name("trunk.safetensors")
SHA256 = "8b8012f7fa0d12452855e45997186cd3763bcf907182a196ab5ca94a4758c947"
RANK = 128
RENDERINGS = (1001, 1002, 1003)  # seeds; a demo's own are small numbers
CROPS_PER_LABEL = 24
LONG = Descent((40, 40, 40, 48, 64, 64, 64), learning_rate=2e-3, batch_size=48)
AFTER_NARROWING = Descent((64,), learning_rate=3e-4, batch_size=48)
CLASSIFIED = tuple(component for component in COMPONENTS if not component.measured)
LABELS = {component.name: component.own_labels for component in CLASSIFIED}


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
    batches = [(side_px, picked) for side_px in plan.sides_px for picked in batches_of(len(crops), plan, generator)]
    network.train()

    def loss(batch: tuple[int, tuple[int, Tensor]]) -> Tensor:
        number, (side_px, picked) = batch
        progress("trunk", number + 1, len(batches))
        shown = smaller(varied(images[picked], plan.turns, generator)[0], side_px, plan.crops_centre)
        with fast_math():
            logits = network(shown).float()
        return functional.cross_entropy(logits.masked_fill(masks[picked], FOREIGN_LOGIT), targets[picked])

    descend(network.parameters(), list(enumerate(batches)), loss, plan.learning_rate)
    return network.eval()


def batches_of(count: int, plan: Descent, generator: torch.Generator) -> list[Tensor]:
    """Rows of an epoch's batches, in random order. All batches are full: what is left over waits for another epoch."""
    size = min(plan.batch_size, count)
    return [picked for picked in torch.randperm(count, generator=generator).split(size) if len(picked) == size]


def smaller(batch: Tensor, side_px: int, crops_centre: bool) -> Tensor:
    margin = (batch.shape[2] - side_px) // 2
    if margin <= 0:
        return batch
    if crops_centre:
        return batch[:, :, margin : margin + side_px, margin : margin + side_px]
    return functional.interpolate(batch, size=(side_px, side_px), mode="area")


def stored_network() -> nn.Module:
    """Raises CoServeError for another file than this version was made with."""
    found = sha256(FILE.read_bytes()).hexdigest()
    if found != SHA256:
        raise CoServeError(f"{FILE} is not the network that this version was made with - install CoServe again")
    network = resnet(all_labels(LABELS))
    network.load_state_dict(unfolded(load_file(FILE), network.state_dict()))
    return network.eval()


def folded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State as stored: ``NAME.values`` (int8) and ``NAME.scales`` of a matrix or both factors; else the tensor."""
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.dim() < 2:
            stored[name] = tensor
            continue
        matrices = {name: tensor.flatten(1)}
        if name.startswith("layer4.") and tensor.dim() == 4 and tensor.shape[2] > 1:  # to the nearest of rank RANK
            left, values, right = torch.linalg.svd(tensor.flatten(1), full_matrices=False)
            roots = values[:RANK].sqrt()
            matrices = {f"{name}.left": left[:, :RANK] * roots, f"{name}.right": roots[:, None] * right[:RANK]}
        for key, matrix in matrices.items():
            scales = matrix.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            stored[f"{key}.values"] = (matrix / scales).round().to(torch.int8)
            stored[f"{key}.scales"] = scales
    return stored


def unfolded(stored: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the shapes of ``like``."""
    state = {}
    for name, tensor in like.items():
        keys = [key for key in (name, f"{name}.left", f"{name}.right") if f"{key}.values" in stored]
        factors = [stored[f"{key}.values"].float() * stored[f"{key}.scales"] for key in keys]
        state[name] = reduce(torch.matmul, factors).view_as(tensor) if factors else stored[name]
    return state


def main() -> None:
    def show(stage: str, done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"{stage} {done}/{total}", file=sys.stderr, flush=True)  # noqa: T201 - a command's progress

    torch.manual_seed(0)
    crops = [crop for seed in RENDERINGS for crop in render_crops(CLASSIFIED, CROPS_PER_LABEL, seed, 2, show)]
    network = resnet(all_labels(LABELS))
    train_jointly(network, crops, LABELS, LONG, 0, show)
    like = network.state_dict()
    network.load_state_dict(unfolded(folded(like), like))
    train_jointly(network, crops, LABELS, AFTER_NARROWING, 1, show)
    save_file({name: tensor.contiguous() for name, tensor in folded(network.state_dict()).items()}, FILE)
    print(sha256(FILE.read_bytes()).hexdigest())  # noqa: T201 - the hash is this command's result


if __name__ == "__main__":
    main()
