"""The stored network of the demo's experts: a ResNet18 that has seen renderings of every component.

Guarantees: ``stored_network`` answers the network that ``python -m agent.demo.training.trunk`` wrote, by its hash. That
command renders other crops than any demo does, trains on them for about half an hour and prints the hash.

The file has 6 MB at most: weights are int8 with one scale for each row, and each 3x3 convolution of ``layer4`` is the
product of two narrow matrices. Each component's own ``layer4`` starts from there and is trained in full.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from agent.demo.rendering.components import OK, synthetic_components
from agent.demo.training.classifiers import (
    ClassifierPlan,
    JointNetwork,
    classifier_set,
    resnet,
    train_jointly,
    union_labels,
)
from agent.demo.training.crops import load_crops, write_crops
from experts.errors import CoServeError

if TYPE_CHECKING:
    from torch import Tensor

    from agent.demo.training.classifiers import ClassifierSet
    from agent.demo.training.crops import LabelledCrop

FILE = Path(__file__).with_name("trunk.safetensors")
SHA256 = "8b8012f7fa0d12452855e45997186cd3763bcf907182a196ab5ca94a4758c947"
RANK = 128
RENDERINGS = (1001, 1002, 1003)  # seeds; a demo's own are small numbers
CROPS_PER_LABEL = 24
LONG = ClassifierPlan(
    joint_px=(40, 40, 40, 48, 64, 64, 64),
    crops_centre=False,
    turns=False,
    joint_batch_size=48,
    joint_learning_rate=2e-3,
)
AFTER_NARROWING = replace(LONG, joint_px=(64,), joint_learning_rate=3e-4)


def stored_network() -> JointNetwork:
    """Raises CoServeError for another file than this version was made with."""
    found = sha256(FILE.read_bytes()).hexdigest()
    if found != SHA256:
        raise CoServeError(f"{FILE} is not the network that this version was made with - install CoServe again")
    model = resnet(len(stored_labels()))
    model.load_state_dict(unfolded(load_file(FILE), model.state_dict()))
    return JointNetwork(model.eval(), stored_labels())


def stored_labels() -> tuple[str, ...]:
    """All that the synthetic components' classifiers tell apart, sorted."""
    return tuple(sorted({label for each in synthetic_components() if not each.measured for label in each.own_labels}))


def folded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As stored: ``NAME.values`` (int8) and ``NAME.scales`` of a matrix or of both factors; else the tensor itself."""
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.dim() < 2:
            stored[name] = tensor
            continue
        factors = {f"{name}.left": None, f"{name}.right": None} if is_narrow(name, tensor) else {name: None}
        for key, matrix in zip(factors, parted(tensor) if len(factors) == 2 else [tensor.flatten(1)], strict=True):
            scales = matrix.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            stored[f"{key}.values"] = (matrix / scales).round().to(torch.int8)
            stored[f"{key}.scales"] = scales
    return stored


def unfolded(stored: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the shapes of ``like``."""

    def matrix(key: str) -> Tensor:
        return stored[f"{key}.values"].float() * stored[f"{key}.scales"]

    state = {}
    for name, tensor in like.items():
        if name in stored:
            state[name] = stored[name]
        elif is_narrow(name, tensor):
            state[name] = (matrix(f"{name}.left") @ matrix(f"{name}.right")).view_as(tensor)
        else:
            state[name] = matrix(name).view_as(tensor)
    return state


def is_narrow(name: str, tensor: Tensor) -> bool:
    return name.startswith("layer4.") and tensor.dim() == 4 and tensor.shape[2] > 1


def parted(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of rank RANK whose product is nearest to a convolution's weight as a matrix."""
    left, values, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    roots = values[:RANK].sqrt()
    return left[:, :RANK] * roots, roots[:, None] * right[:RANK]


def rendered(folder: Path) -> ClassifierSet:
    told_apart = [component for component in synthetic_components() if not component.measured]
    crops: list[LabelledCrop] = []
    for seed in RENDERINGS:
        write_crops(folder / str(seed), told_apart, CROPS_PER_LABEL, seed, 2, show)
        crops += load_crops(folder / str(seed))
    labels = {component.name: component.own_labels for component in told_apart}
    targets = {
        (component.name, label): label if label in component.own_labels else OK
        for component in told_apart
        for label in component.labels
    }
    return classifier_set(crops, labels, lambda crop: targets[crop.component, crop.label], LONG.input_px)


def show(stage: str, done: int, total: int) -> None:
    if done % 100 == 0 or done == total:
        print(f"{stage} {done}/{total}", file=sys.stderr, flush=True)  # noqa: T201 - a command's progress


def main() -> None:
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        data = rendered(Path(folder))
    assert union_labels(data) == stored_labels()
    network = resnet(len(stored_labels()))
    train_jointly(network, data, LONG, 0, show)
    like = network.state_dict()
    network.load_state_dict(unfolded(folded(like), like))
    train_jointly(network, data, AFTER_NARROWING, 1, show)
    save_file({name: tensor.contiguous() for name, tensor in folded(network.state_dict()).items()}, FILE)
    print(sha256(FILE.read_bytes()).hexdigest())  # noqa: T201 - the hash is this command's result


if __name__ == "__main__":
    main()
