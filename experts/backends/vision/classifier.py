"""Image classifiers: every classification family of torchvision.models, by its name there.

An expert is a state dict of the family with one output per label. Auxiliary heads (GoogLeNet, Inception) serve training
only and are dropped. ``stem: 3x3`` gives a ResNet a first convolution of 3x3 with stride 1, for crops of about 64 px.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch.nn import Conv2d, Identity

from experts.architectures import NO_MAXPOOL, RESNETS, TRANSFORM_INPUT, served_variants
from experts.backends.modules.batchnorm_folding import fold_structure, fold_weights, foldable_pairs
from experts.backends.modules.binding import Weightless
from experts.backends.modules.compiler import compiler_left_out
from experts.backends.modules.vision import models
from experts.backends.outputs import label_by_label, likeliest, require_numbers, require_several_labels
from experts.backends.torch_backend import Template, TorchBackend
from experts.backends.vision.pixels import fitted
from experts.backends.weight_files import read_state_dict, saving
from experts.errors import WeightsMismatch
from experts.expert import Prediction, Task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.forms.base import Reader
    from experts.expert import Expert

AUXILIARY_HEADS = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
FIXED_SIZE = ("vit_", "maxvit_")  # families whose weights depend on the size of the input
TRANSFORMERS = ("vit_", "swin_", "maxvit_")  # their activations are sequences: channels_last gains nothing
ANY_SIZE = (224, 224)  # of the families that take any


@dataclass(frozen=True, slots=True)
class _Structure:
    architecture: str
    label_count: int
    stem: str | None
    size: tuple[int, int] | None  # height and width where the weights depend on them
    variant: str | None = None


class ClassifierBackend(TorchBackend):
    """Implements ``experts.backends.base.Backend`` for torchvision's classifiers."""

    outputs = ("logits",)
    is_replayable = True

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        return fitted(image, expert.pixels)

    def structure(self, expert: Expert) -> _Structure:
        try:
            return _structure_of(
                expert.architecture, len(expert.labels), expert.stem, expert.pixels.size, expert.variant
            )
        except ValueError as error:
            raise WeightsMismatch(expert.id, str(error)) from error

    def build(self, structure: _Structure) -> Module:
        return _build(structure, init_weights=False)

    def make_template(self, structure: _Structure) -> Template:
        with compiler_left_out(), Weightless():
            original = self.build(structure).to("meta").eval().requires_grad_(False)
        pairs = foldable_pairs(original, structure.size or ANY_SIZE)
        folded = deepcopy(original)
        fold_structure(folded, pairs)
        return Template(original, folded, partial(fold_weights, pairs=pairs))

    def read_weights(self, expert: Expert, *, as_headers: bool = False) -> dict[str, Tensor]:
        require_several_labels(expert)
        heads = AUXILIARY_HEADS.get(expert.architecture, ())
        found = read_state_dict(expert, as_headers=as_headers)
        return {name: tensor for name, tensor in found.items() if not name.startswith(heads)}

    def reader(self, expert: Expert) -> Reader:
        return _answered

    def unseen_structure(self, expert: Expert) -> bytes:
        if not expert.architecture.startswith("maxvit_"):  # a MaxViT cuts its windows by the input's size
            return (expert.variant or "").encode()
        return f"for images of {expert.pixels.height}x{expert.pixels.width}".encode()

    def memory_format(self, expert: Expert) -> torch.memory_format:
        is_transformer = expert.architecture.startswith(TRANSFORMERS)
        return torch.contiguous_format if is_transformer else torch.channels_last


def build_trainable(architecture: str, class_count: int, stem: str | None = None, image_size: int = 224) -> Module:
    """A fresh module in training mode, weights random. Raises ValueError for an unknown architecture or stem."""
    return _build(_structure_of(architecture, class_count, stem, (image_size, image_size)), init_weights=True).train()


def weightless(
    architecture: str, class_count: int, stem: str | None, image_size: int, variant: str | None = None
) -> Module:
    """A module without weights and auxiliary heads. Raises ValueError for an unknown architecture, stem or variant."""
    structure = _structure_of(architecture, class_count, stem, (image_size, image_size), variant)
    with compiler_left_out(), Weightless():
        return _build(structure, init_weights=False)


def weight_shapes(architecture: str, class_count: int, stem: str | None, image_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights but auxiliary heads. Raises as ``weightless``."""
    weights = weightless(architecture, class_count, stem, image_size).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def write_random_weights(path: Path, architecture: str, class_count: int, seed: int, image_size: int = 224) -> None:
    """Untrained weights, for measuring. Raises ValueError for an unknown architecture, OSError from the disk."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tensors = build_trainable(architecture, class_count, image_size=image_size).state_dict()
    with saving(path):
        save_file(tensors, path)


def predictions(expert: Expert, probabilities: Tensor) -> tuple[Prediction, ...]:
    """One prediction per row of (n, labels). Raises OutputInvalid for NaN, infinity and ties."""
    require_numbers(expert, probabilities)
    return likeliest(expert, probabilities)


@cache
def _known_architectures() -> frozenset[str]:
    return frozenset(models.list_models(module=models))


def _structure_of(
    architecture: str, label_count: int, stem: str | None, size: tuple[int, int], variant: str | None = None
) -> _Structure:
    if architecture not in _known_architectures():
        near = get_close_matches(architecture, _known_architectures())
        raise ValueError(f"torchvision has no classifier {architecture!r}; near: {', '.join(near) or 'none'}")
    if stem not in {None, "3x3"}:
        raise ValueError(f"stem is {stem!r}: only '3x3' is known")
    if stem is not None and not architecture.startswith(RESNETS):
        raise ValueError(f"{architecture} takes no other stem: leave `stem` out, or choose a ResNet")
    if variant not in {None, *served_variants(architecture)}:
        raise ValueError(f"{architecture} has no variant {variant}: leave `variant` out")
    if architecture.startswith("vit_") and size[0] != size[1]:
        raise ValueError(f"{architecture} takes square images, not {size[0]}x{size[1]}")
    return _Structure(architecture, label_count, stem, size if architecture.startswith(FIXED_SIZE) else None, variant)


def _build(structure: _Structure, *, init_weights: bool) -> Module:
    arguments: dict[str, object] = {"num_classes": structure.label_count}
    if structure.architecture in AUXILIARY_HEADS:
        arguments |= {"aux_logits": False, "init_weights": init_weights}
    if structure.size is not None:
        is_square = structure.architecture.startswith("vit_")
        arguments |= {"image_size": structure.size[0]} if is_square else {"input_size": structure.size}
    module: Module = models.get_model(structure.architecture, weights=None, **arguments)
    if structure.stem == "3x3":
        module.conv1 = Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    if structure.variant == NO_MAXPOOL:
        module.maxpool = Identity()
    if structure.variant == TRANSFORM_INPUT:
        module.transform_input = True
    return module


def _answered(expert: Expert, outputs: Sequence[Tensor], batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
    """``Reader`` of the logits."""
    require_numbers(expert, *outputs)
    logits = outputs[0].float()
    if expert.task is Task.MULTILABEL:
        return label_by_label(expert, logits.sigmoid().tolist())
    return predictions(expert, logits.softmax(dim=1))
