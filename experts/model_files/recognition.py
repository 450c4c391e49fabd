"""Recognises an architecture by the names and shapes of its weights: torchvision's classifiers, and YOLO.

Guarantees: recognised weights are exactly those of the architecture, each of its shape, so they can be packed. Weights
in another library's layout are named as such, with the conversion to do.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import empty

from experts.architectures import CLASSIFIERS, known_architecture

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    Shapes = dict[str, tuple[int, ...]]

NO_TENSOR = empty(0)
AUXILIARY_HEADS = ("aux1.", "aux2.", "AuxLogits.")  # of GoogLeNet and Inception, used in training only
USUAL_SIZE = 224  # where the weights do not show one
HEAD_MAXIMUM = 16  # tensors of a head that are shown
EXPORT_ADVICE = "export it to ONNX, and add that"
SERVED_AS_GRAPHS = f"such models are served as graphs: {EXPORT_ADVICE}"
SAME_AS = re.compile(r"(tv|legacy|ssl|swsl)_")  # before names of timm: torchvision's models, trained by others
LAYER = re.compile(r"model\.(\d+)\.")
QUERIES = "dec_score_head.0.weight"  # of the last layer of RT-DETR
SCALES = {  # of each family of ultralytics, the sizes that it is made in
    "yolov8": "nsmlx", "yolo11": "nsmlx", "yolo26": "nsmlx", "yolo12": "nsmlx", "yolov5": "nsmlx", "yolov10": "nsmblx",
    "yolov9": "tsmce", "yolov6": "nsmlx",
}  # fmt: skip
VARIANTS = {
    "yolov8": ("-p2", "-p6", "-ghost"), "yolo26": ("-p2", "-p6"), "yolov5": ("-p6",), "yolov3": ("", "-spp", "-tiny"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recognised:
    """Architecture of weights. ``labels``: count of outputs. ``size``: (height, width) where the weights depend on it.

    ``unserved``: reason and alternative where the weights are not served; None for served weights.
    """

    architecture: str
    labels: int | None
    stem: str | None
    size: tuple[int, int] | None
    evidence: str
    unserved: str | None = None


@dataclass(frozen=True, slots=True)
class _ClassifierFamily:
    """Classifiers that share a weight's name; ``head``: the weight that has one row for each label."""

    prefixes: tuple[str, ...]
    mark: str
    head: str


FAMILIES = (
    _ClassifierFamily(("resnet", "resnext", "wide_resnet"), "layer1.0.conv1.weight", "fc.weight"),
    _ClassifierFamily(("shufflenet",), "stage2.0.branch1.0.weight", "fc.weight"),
    _ClassifierFamily(("googlenet",), "inception3a.branch1.conv.weight", "fc.weight"),
    _ClassifierFamily(("inception_v3",), "Mixed_5b.branch1x1.conv.weight", "fc.weight"),
    _ClassifierFamily(("regnet",), "trunk_output.block1.block1-0.f.a.0.weight", "fc.weight"),
    _ClassifierFamily(("densenet",), "features.denseblock1.denselayer1.conv1.weight", "classifier.weight"),
    _ClassifierFamily(("squeezenet",), "features.3.squeeze.weight", "classifier.1.weight"),
    _ClassifierFamily(("efficientnet",), "features.1.0.block.0.0.weight", "classifier.1.weight"),
    _ClassifierFamily(("mobilenet_v2",), "features.1.conv.0.0.weight", "classifier.1.weight"),
    _ClassifierFamily(("mobilenet_v3",), "features.1.block.0.0.weight", "classifier.3.weight"),
    _ClassifierFamily(("mnasnet",), "layers.8.0.layers.0.weight", "classifier.1.weight"),
    _ClassifierFamily(("convnext",), "features.1.0.layer_scale", "classifier.2.weight"),
    _ClassifierFamily(("swin",), "features.1.0.attn.qkv.weight", "head.weight"),
    _ClassifierFamily(("maxvit",), "blocks.0.layers.0.layers.MBconv.layers.pre_norm.weight", "classifier.5.weight"),
    _ClassifierFamily(("vit",), "encoder.layers.encoder_layer_0.self_attention.in_proj_weight", "heads.head.weight"),
    _ClassifierFamily(("alexnet", "vgg"), "features.0.weight", "classifier.6.weight"),
)
OTHERS = (  # a weight's name, the models that have it, and why they are not served directly
    (r"roi_heads\.|rpn\.head\.|head\.classification_head\.", "detector of torchvision", SERVED_AS_GRAPHS),
    (r"conv1\.3\.weight", "ResNet of timm with a deep stem", ""),
    (r"s1\.b1\.conv1\.conv\.weight", "RegNet of timm", ""),
    (r"pre_logits\.fc1\.weight", "VGG of timm", ""),
    (r"patch_embed\.proj\.weight|blocks\.\d+\.attn\.qkv\.weight", "vision transformer of timm", ""),
    (r"stages\.0\.blocks\.0\.conv_dw\.weight", "ConvNeXt of timm", ""),
    (r"conv_stem\.weight|blocks\.0\.0\.conv_dw\.weight", "EfficientNet or MobileNet of timm", ""),
    (r"embeddings\.patch_embeddings|encoder\.layer\.0\.attention", "vision transformer of transformers", ""),
    (r".*memory_bank$|.*anomaly_map_generator\.", "anomaly model", SERVED_AS_GRAPHS),
)


def recognise(weights: Mapping[str, Tensor], hint: str | None = None) -> Recognised | None:
    """Architecture of these weights; None for an unknown one.

    ``hint``: architecture named by the file; tried first, and accepted only if every tensor fits.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    return _yolo(shapes, hint) or _classifier(shapes, hint) or _other(shapes)


def with_usual_head(weights: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], str | None]:
    """Weights whose head is one linear layer at another path, under its usual name; and a remark.

    Sequential(Dropout, Linear) in place of a Linear, and a Linear in place of such a Sequential.
    """
    for family in (each for each in FAMILIES if each.mark in weights and each.head not in weights):
        usual = family.head.removesuffix(".weight")
        for place in (usual, usual.partition(".")[0]):
            of_head = {name.rpartition(".")[0] for name in weights if name.startswith(f"{place}.")}
            if len(of_head) == 1 and weights.get(f"{(own := of_head.pop())}.weight", NO_TENSOR).dim() == 2:
                renamed = {re.sub(rf"^{re.escape(own)}\.", f"{usual}.", name): one for name, one in weights.items()}
                return renamed, f"its head {own}, the only layer with weights there, was taken for {usual}"
    return weights, None


def nearest(weights: Mapping[str, Tensor]) -> str | None:
    """The nearest architecture and the first tensor that differs, in words; None where no family is near."""
    from experts.backends.vision.classifier import weight_shapes  # loads torchvision

    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    marks = [(each, name.removesuffix(each.mark)) for each in FAMILIES for name in shapes if name.endswith(each.mark)]
    for family, prefix in (found for found in marks if not found[1] or found[1].endswith(".")):
        ours = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        labels = _rows(ours.get(family.head)) or 2
        members = {}
        for name in (name for name in CLASSIFIERS if name.startswith(family.prefixes)):
            with suppress(ValueError):
                stem = "3x3" if family.prefixes[0] == "resnet" and ours.get("conv1.weight", ())[2:] == (3, 3) else None
                members[name] = weight_shapes(name, labels, stem, _position_size(ours) or USUAL_SIZE)
        if members:
            if prefix and any(_fits(each, ours) for each in members.values()):
                return f"its names begin with {prefix}: save the state_dict() of that part"
            return _difference(*_nearest_of(members, ours), ours, family.head)
    return _nearest_detector({f"model.{re.sub(r'^(model[.])+', '', name)}": shape for name, shape in shapes.items()})


def _nearest_detector(shapes: Shapes) -> str | None:
    """Detectors with as many layers and first channels."""
    from experts.backends.vision.detector import Outline, outline, weight_shapes  # loads ultralytics

    numbers = [int(match[1]) for name in shapes if (match := LAYER.match(name))]
    last = max(numbers, default=0)
    head = f"model.{last}.cv3.0.2.weight"
    wanted = Outline(last + 1, _rows(shapes.get("model.0.conv.weight")))
    members = {}
    for name in _detectors() if head in shapes else ():
        with suppress(ValueError):
            if outline(name) == wanted:
                members[name] = weight_shapes(name, _rows(shapes[head]))
    return _difference(*_nearest_of(members, shapes), shapes, head) if members else None


def _nearest_of(members: Mapping[str, Shapes], ours: Shapes) -> tuple[str, Shapes]:
    return max(members.items(), key=lambda each: len(each[1].items() & ours.items()) - len(each[1]) / 2)


def _difference(architecture: str, expected: Shapes, ours: Shapes, head: str) -> str:
    """The first tensor, the head's before others, that is not as the architecture has it."""
    near = f"{architecture} is the nearest"
    if head not in ours:
        place = f"{head.partition('.')[0]}."
        others = [name for name in ours if name not in expected and not name.endswith(".bias")]
        of_head = [name for name in others if name.startswith(place)] or others
        shown = ", ".join(f"{name} {_sides(ours[name])}" for name in of_head if len(of_head) <= HEAD_MAXIMUM)
        return f"{near}, whose head is one layer, {head}, and this head is {shown or 'missing'}"
    wanted = {name: shape for name, shape in expected.items() if not name.endswith("num_batches_tracked")}
    for name, shape in wanted.items():
        if ours.get(name) != shape:
            there = _sides(ours[name]) if name in ours else "missing"
            return f"{near}: its {name} is {there}, where {architecture} has {_sides(shape)}"
    more = next((name for name in ours if name not in wanted and not name.startswith(AUXILIARY_HEADS)), head)
    return f"{near}, and has no {more} {_sides(ours[more])}"


def _sides(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"


def may_be_twin(architecture: str, name: str) -> bool:
    """True for the name of another classifier of the architecture's family: its weights may fit both.

    timm's tags (``resnet50.a1_in1k``), prefixes of trainers, separators and less precise names (``resnet``) do not
    count as another classifier.
    """
    last = SAME_AS.sub("", name.lower().rpartition("/")[2].partition(".")[0])
    plain, known = (re.sub(r"[^a-z0-9]", "", each) for each in (last, architecture))
    if known.startswith(plain):
        return False
    prefixes = next((each.prefixes for each in FAMILIES if architecture.startswith(each.prefixes)), ())
    return plain.startswith(tuple(prefix.replace("_", "") for prefix in prefixes))


# torchvision's classifiers


def _classifier(shapes: Shapes, hint: str | None) -> Recognised | None:
    ours = {name: shape for name, shape in shapes.items() if not name.startswith(AUXILIARY_HEADS)}
    for family in FAMILIES:
        if family.mark in ours and _rows(ours.get(family.head)):
            return _member(family, ours, hint)
    return None


def _member(family: _ClassifierFamily, shapes: Shapes, hint: str | None) -> Recognised | None:
    from experts.backends.vision.classifier import weight_shapes  # loads torchvision

    labels, stem = shapes[family.head][0], "3x3" if shapes.get("conv1.weight", ())[2:] == (3, 3) else None
    members = [name for name in CLASSIFIERS if name.startswith(family.prefixes)]
    size = _position_size(shapes)
    for architecture in sorted(members, key=lambda name: name != hint):
        fitting_stem = stem if family.prefixes[0] == "resnet" else None
        try:
            expected = weight_shapes(architecture, labels, fitting_stem, size or USUAL_SIZE)
        except ValueError:  # built for other sizes or label counts only
            continue
        if _fits(expected, shapes):
            shown = (size, size) if size else None
            return Recognised(architecture, labels, fitting_stem, shown, _evidence(shapes, architecture, labels))
    return None


def _position_size(shapes: Shapes) -> int | None:
    """Image side of a ViT, from its positions: one for each patch, and one for the class token."""
    positions, patches = shapes.get("encoder.pos_embedding", ()), shapes.get("conv_proj.weight", ())
    if len(positions) != 3 or len(patches) != 4:
        return None
    return math.isqrt(max(positions[1] - 1, 0)) * patches[3] or None


# YOLO


def _yolo(shapes: Shapes, hint: str | None) -> Recognised | None:
    named = {f"model.{re.sub(r'^(model[.])+', '', name)}": shape for name, shape in shapes.items()}
    numbers = [int(match[1]) for name in named if (match := LAYER.match(name))]
    if not numbers or len(numbers) != len(named):
        return None
    last = max(numbers)
    firsts = {"model.0.conv.weight", "model.1.conv.weight", f"model.{last}.{QUERIES}"}  # RT-DETR has other first layers
    if not firsts & named.keys():
        return None
    if unserved := _other_head(named, last):
        return unserved
    head = named.get(f"model.{last}.cv3.0.2.weight")
    first = named.get("model.0.conv.weight") or named.get("model.1.conv.weight")
    if not _rows(head) or not _rows(first):
        return None
    return _detector(named, hint, labels=_rows(head), layers=last + 1, first_channels=_rows(first))


def _detector(shapes: Shapes, hint: str | None, labels: int, layers: int, first_channels: int) -> Recognised | None:
    from experts.backends.vision.detector import Outline, outline, weight_shapes  # loads ultralytics

    wanted = Outline(layers, first_channels)
    for architecture in dict.fromkeys([*_hinted(hint), *_detectors()]):
        try:
            if outline(architecture) != wanted or not _fits(weight_shapes(architecture, labels), shapes):
                continue
        except ValueError:  # unknown to this version of ultralytics, or another task
            continue
        return Recognised(architecture, labels, None, None, _evidence(shapes, architecture, labels))
    return None


def _hinted(hint: str | None) -> Iterator[str]:
    try:
        if hint is not None and hint.startswith("yolo"):
            yield known_architecture(hint)
    except ValueError:
        return


def _detectors() -> Iterator[str]:
    for family, scales in SCALES.items():
        yield from (f"{family}{scale}" for scale in scales)
    for family, variants in VARIANTS.items():
        letters = tuple(SCALES.get(family, "")) or ("",)
        yield from (f"{family}{letter}{variant}" for variant in variants for letter in letters)


def _other_head(shapes: Shapes, last: int) -> Recognised | None:
    """YOLO model of another task, recognised by its last layer."""
    head = {name.removeprefix(f"model.{last}.") for name in shapes if name.startswith(f"model.{last}.")}
    kinds = (
        ("m.0.weight", "yolov5 with anchors", "models of YOLOv5's own repository are served as graphs"),
        ("linear.weight", "yolo classifier", "classifiers of YOLO are served as graphs"),
        ("proto.cv1.conv.weight", "yolo segmentation", "segmentation is served as a graph, by its boxes"),
        (QUERIES, "rtdetr", "RT-DETR is served as a graph"),
        ("cv4.0.0.conv.weight", "yolo of poses or turned boxes", "poses and turned boxes are not served"),
    )
    for mark, architecture, reason in kinds:
        if mark in head:
            advice = "" if reason.endswith("not served") else f": {EXPORT_ADVICE}"
            return Recognised(architecture, None, None, None, f"model.{last}.{mark} is in it", reason + advice)
    return None


# shared


def _rows(shape: tuple[int, ...] | None) -> int:
    return shape[0] if shape else 0


def _fits(expected: Shapes, shapes: Shapes) -> bool:
    return {name: shape for name, shape in expected.items() if not name.endswith("num_batches_tracked")} == shapes


def _evidence(shapes: Shapes, architecture: str, labels: int) -> str:
    return f"names and shapes of {len(shapes)} weights are those of {architecture} with {labels} labels"


def _other(shapes: Shapes) -> Recognised | None:
    for pattern, what, reason in OTHERS:
        mark = next((name for name in shapes if re.match(pattern, name)), None)
        if mark is not None:
            why = reason or f"its weights are laid out in another way than any that is served: {EXPORT_ADVICE}"
            return Recognised(what, None, None, None, f"{mark} is in it", why)
    return None
