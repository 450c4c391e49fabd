"""The stored network of the demo's experts: a ResNet18 that has seen renderings of every component.

Guarantees: ``stored_network`` answers the network that ``python -m agent.demo.training.trunk`` wrote, by its hash. That
command renders other crops than any demo does, trains on them for about half an hour and prints the hash.

The file has 6 MB at most: weights are int8 with one scale for each row, and each 3x3 convolution of ``layer4`` is the
product of two narrow matrices. Each component's own ``layer4`` starts from there and is trained in full.
"""

from __future__ import annotations

import sys
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from agent.demo.rendering.components import COMPONENTS
from agent.demo.training.classifiers import Descent, all_labels, train_jointly
from agent.demo.training.crops import render_crops
from agent.demo.training.network import resnet
from experts.errors import CoServeError

if TYPE_CHECKING:
    from torch import Tensor, nn

FILE = Path(__file__).with_name("trunk.safetensors")
SHA256 = "8b8012f7fa0d12452855e45997186cd3763bcf907182a196ab5ca94a4758c947"
RANK = 128
RENDERINGS = (1001, 1002, 1003)  # seeds; a demo's own are small numbers
CROPS_PER_LABEL = 24
LONG = Descent((40, 40, 40, 48, 64, 64, 64), learning_rate=2e-3, batch_size=48)
AFTER_NARROWING = Descent((64,), learning_rate=3e-4, batch_size=48)
CLASSIFIED = tuple(component for component in COMPONENTS if not component.measured)
LABELS = {component.name: component.own_labels for component in CLASSIFIED}


def stored_network() -> nn.Module:
    """Raises CoServeError for another file than this version was made with."""
    found = sha256(FILE.read_bytes()).hexdigest()
    if found != SHA256:
        raise CoServeError(f"{FILE} is not the network that this version was made with - install CoServe again")
    network = resnet(all_labels(LABELS))
    network.load_state_dict(unfolded(load_file(FILE), network.state_dict()))
    return network.eval()


def folded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As stored: ``NAME.values`` (int8) and ``NAME.scales`` of a matrix or of both factors; else the tensor itself."""
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
