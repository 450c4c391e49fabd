"""Which architecture weights are of, told by the names and shapes of their tensors: torchvision's and YOLO's.

Guarantees: an answer is one that fits to the last tensor, so that packing does not find otherwise; what fits none is
None. Nothing is loaded to try it: architectures are compared as shapes, without memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from experts.architectures import CLASSIFIERS, YOLO_DETECTORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

Shapes: TypeAlias = "dict[str, tuple[int, ...]]"

MOST_CLASSES = 1000  # what templates of classifiers are built for
RESNETS = ("resnet", "resnext", "wide_resnet")
SMALL_STEM = {"conv1.weight": (64, 3, 3, 3)}  # in the place of a ResNet's first convolution of 7x7, stride 2
YOLO_BLOCK = re.compile(r"(\d+)[.]")
YOLO_LABELS = re.compile(r"(\d+)[.]cv3[.]0[.]2[.]bias")


@dataclass(frozen=True, slots=True)
class Recognised:
    """An architecture that weights fit. ``labels``: how many it tells apart. ``evidence``: in words.

    ``size``: (height, width) of its images, of architectures whose weights depend on it.
    """

    architecture: str
    labels: int
    stem: str | None
    evidence: str
    size: tuple[int, int] | None = None


def recognise(weights: Mapping[str, Tensor]) -> Recognised | None:
    """The architecture of these weights; None for one that is not served, or that is not known."""
    shapes = {name: tuple(each.shape) for name, each in weights.items() if not name.endswith("num_batches_tracked")}
    return _yolo(shapes) or _classifier(shapes)


def _classifier(shapes: Shapes) -> Recognised | None:
    from experts.backends.classifier import AUXILIARY_HEADS

    for architecture in _likely(shapes):
        heads = AUXILIARY_HEADS.get(architecture, ())
        found = {name: shape for name, shape in shapes.items() if not (heads and name.startswith(heads))}
        like = _classifier_shapes(architecture)
        if found.keys() == like.keys() and (fitting := _fitting(architecture, found, like)) is not None:
            return fitting
    return None


@cache
def _classifier_shapes(architecture: str) -> Shapes:
    from experts.backends.classifier import tensor_shapes

    return tensor_shapes(architecture, MOST_CLASSES)


@cache
def _yolo_shapes(architecture: str, labels: int) -> Shapes:
    from experts.backends.detector import tensor_shapes

    return {name.removeprefix("model."): shape for name, shape in tensor_shapes(architecture, labels).items()}


def _likely(shapes: Shapes) -> Iterable[str]:
    """The classifiers that may be meant: all, or ResNets and their like where it has their first block."""
    is_resnet = "layer1.0.conv1.weight" in shapes
    return (name for name in CLASSIFIERS if name.startswith(RESNETS) == is_resnet)


def _fitting(architecture: str, found: Shapes, like: Shapes) -> Recognised | None:
    """The architecture as it was built, if what differs is its number of labels, its stem or its input size."""
    differing = {name for name, shape in found.items() if shape != like[name]}
    stem = size = None
    if architecture.startswith(RESNETS) and all(found[name] == shape for name, shape in SMALL_STEM.items()):
        stem = "3x3"
        differing -= SMALL_STEM.keys()
    if architecture.startswith("vit_"):
        size = _vit_size(found)
        differing.discard("encoder.pos_embedding")
    counts = {found[name][:1] for name in differing}
    is_head = all(like[name] == (MOST_CLASSES, *found[name][1:]) for name in differing)
    if not is_head or len(counts) > 1 or (architecture.startswith("vit_") and size is None):
        return None
    labels = counts.pop()[0] if counts else MOST_CLASSES
    evidence = f"its {len(found)} tensors are those of torchvision's {architecture}, by name and shape"
    return Recognised(architecture, labels, stem, evidence, size)


def _vit_size(found: Shapes) -> tuple[int, int] | None:
    """By how many patches it knows places for: one each, and one for the class."""
    patches, patch_px = found["encoder.pos_embedding"][1] - 1, found["conv_proj.weight"][-1]
    side = round(patches**0.5)
    return (side * patch_px, side * patch_px) if patches > 0 and side * side == patches else None


def _yolo(shapes: Shapes) -> Recognised | None:
    found = {re.sub(r"^(model[.])+", "", name): shape for name, shape in shapes.items()}
    blocks = [int(block[1]) for name in found if (block := YOLO_BLOCK.match(name))]
    labels = [shape[0] for name, shape in found.items() if YOLO_LABELS.fullmatch(name) and len(shape) == 1]
    if not blocks or len(labels) != 1 or len(found) != len(shapes):
        return None
    for architecture in _with_blocks(max(blocks) + 1):
        if found == _yolo_shapes(architecture, labels[0]):
            evidence = f"its {len(found)} tensors are those of ultralytics' {architecture}, by name and shape"
            return Recognised(architecture, labels[0], None, evidence)
    return None


def _with_blocks(count: int) -> Iterator[str]:
    from experts.backends.detector import block_count

    return (architecture for architecture in YOLO_DETECTORS if block_count(architecture) == count)
