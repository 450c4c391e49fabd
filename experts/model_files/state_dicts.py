"""Weights by name, as trainers save them: .safetensors, and checkpoints of torch.

Guarantees: an architecture is named only if every tensor fits it. Facts that weights lack are never guessed: names of
labels, input size, preprocessing of pixels. What has no weights decides, too: activation, pooling, stride, blur. A
whole module states it, layer by layer, so a variant of an architecture is known; of a state dict it is asked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from experts.architectures import NO_MAXPOOL, PLAIN, RESNETS, TRANSFORM_INPUT, served_variants
from experts.backends import family
from experts.backends.vision import classifier, detector
from experts.checkpoints.modules import CHANGES, CLASS, built_layers
from experts.errors import WeightsRefused
from experts.model_files.description import (
    NORMALIZE_OPTIONS,
    ONE_OUTPUT,
    ModelDescription,
    unknown_labels,
    unknown_task,
    unserved_fit,
)
from experts.model_files.recognition import (
    EXPORT_ADVICE,
    USUAL_SIZE,
    Recognised,
    may_be_twin,
    nearest,
    recognise,
    with_usual_head,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module

    from experts.checkpoints.facts import Facts

    Layers = Mapping[str, Mapping[str, Any]]

LIBRARIES = frozenset({"torch", "torchvision", "ultralytics", "timm"})
NEUTRAL = re.compile(r"Identity|Dropout\d?d?|StochasticDepth|DropPath|DropBlock2d")  # once a model is trained
AUXILIARY = re.compile(r"(aux1|aux2|AuxLogits)(\.|$)")
SAME_CLASSES = {
    "ConvBNReLU": "Conv2dNormActivation", "ConvBNActivation": "Conv2dNormActivation",
    "ConvNormActivation": "Conv2dNormActivation", "_LinearWithBias": "NonDynamicallyQuantizableLinear",
}  # fmt: skip  # earlier names in torch and torchvision
TIMMS = (  # paths of layers of timm's ResNets, and torchvision's; None: a call in torchvision's code
    (r"(.*?)\.?act\d", r"\1.relu"),
    (r"global_pool(\.flatten)?", None),
    (r"global_pool\.pool", "avgpool"),
)
MEANINGS = {
    NO_MAXPOOL: "its maxpool taken out, as is usual for small images",
    TRANSFORM_INPUT: "made with weights=..., so it scales its input itself",
}
UNSERVED = (  # beginnings of architectures, and others with their names and shapes
    (RESNETS, "a stem of stride 2, resnetaa, resnetblur, dilation, a stride in the first 1x1 convolution"),
    (("densenet", "mobilenet", "efficientnet"), "blurred pooling, dilation"),
    (("yolo",), "another kernel of its SPPF"),
)


def settled(found: Recognised, facts: Facts | None, size: int, changed: str | None = None) -> tuple[str, str] | None:
    """Variant and evidence, of a whole module and of the files of known scripts; None: to be asked.

    ``changed``: remark on a head at another path than its library's. Raises ValueError with the first layer that no
    served variant has.
    """
    if facts is None or (facts.layers is None and facts.builder is None):
        return None
    if facts.layers is None:
        is_plain = changed is None and TRANSFORM_INPUT not in served_variants(found.architecture)
        is_named = is_plain and facts.architecture == found.architecture
        return (PLAIN, f"its script builds a {facts.architecture} by name ({facts.builder})") if is_named else None
    root = facts.layers[""][CLASS]
    if root.startswith("timm.") and not root.endswith(".ResNet"):
        return None  # its layers have other names
    differences = {}
    for variant in (PLAIN, *served_variants(found.architecture)):
        expected = built_layers(_built(found, None if variant == PLAIN else variant, size))
        differences[variant] = difference(facts.layers, expected, found.architecture)
        if differences[variant] is None:
            return (variant, f"the {len(facts.layers)} layers of the module") if facts.wrapper is None else None
    raise ValueError(str(differences[PLAIN]))


def question(found: Recognised, facts: Facts | None, changed: str | None = None) -> str:
    architecture, stem = found.architecture, "" if found.stem is None else f" with a {found.stem} stem of stride 1"
    library = "ultralytics" if family(architecture) == "detector" else "torchvision"
    options = [f"--variant {PLAIN} (all of them as in {library}'s {architecture}{stem})"]
    options += [f"--variant {each} ({MEANINGS[each]})" for each in served_variants(architecture)]
    others = next((f", {each}" for prefixes, each in UNSERVED if architecture.startswith(prefixes)), "")
    why = "weights do not show layers without weights"
    if facts is not None and facts.wrapper is not None:
        why = f"the model is inside a {facts.wrapper}, whose code the file does not have"
    beside = "" if changed is None else f"; {changed}: beside it only a Dropout is plain"
    return (
        f"{why}: {', '.join(options)}; export others to ONNX (another activation{others}); `--check DATA` shows which"
        f"{beside}"
    )


def difference(recorded: Layers, expected: Layers, architecture: str) -> str | None:
    """The first layer that is not as in the architecture, in words."""
    found = _by_path(_collapsed(recorded))
    wanted = {path: each for path, (each,) in _by_path(_collapsed(expected)).items()}
    for path, layer in wanted.items():
        where, others = path or "model", found.get(path, ())
        if not others:
            there = _name(recorded[path]) if path in recorded else "missing"
            return f"its {where} is {there}, where {architecture} has {_name(layer)}"
        for there, here in filter(None, (_change(each, layer) for each in others)):
            return f"its {where} is {there}, where {architecture} has {here}"
    more = next((path for path in found if path not in wanted), None)
    return None if more is None else f"its {more} is {_name(found[more][0])}, which {architecture} does not have"


def _built(found: Recognised, variant: str | None, size: int) -> Module:
    if family(found.architecture) == "detector":
        return detector.weightless(found.architecture, found.labels or 0)
    return classifier.weightless(found.architecture, found.labels or 0, found.stem, size, variant)


def _collapsed(layers: Layers) -> Layers:
    """Layers that compute; a Sequential of a single one is that one, wherever a Dropout stood beside it."""
    found = {path: one for path, one in layers.items() if not (path and _is_neutral(one))}
    for path in [each for each in reversed(found) if _name(found[each]) == "Sequential"]:
        inside = [each for each in found if each.startswith(f"{path}.")]
        children = [each for each in inside if "." not in each.removeprefix(f"{path}.")]
        if len(children) == 1:
            (child,) = children
            found = {path + each.removeprefix(child) if each in inside else each: one for each, one in found.items()
                     if each != path}  # fmt: skip
    return found


def _by_path(recorded: Layers) -> dict[str, list[Mapping[str, Any]]]:
    """Layers that compute something, by their paths in torchvision and ultralytics."""
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    is_of_timm = recorded[""][CLASS].startswith("timm.")
    for path, layer in recorded.items():
        if not AUXILIARY.match(path):
            for here in _translated(path) if is_of_timm else (path,):
                found[here].append(layer)
    return found


def _translated(path: str) -> Iterator[str]:
    for pattern, replacement in TIMMS:
        if match := re.fullmatch(pattern, path):
            if replacement is not None:
                yield match.expand(replacement).removeprefix(".")
            return
    yield path


def _change(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, str] | None:
    """Both layers in words, if they compute otherwise."""
    if _name(there) != _name(wanted):
        return _name(there), _name(wanted)
    if there[CHANGES]:
        return f"a {_name(there)} with hooks or a forward of its own", "none"
    for key in sorted(there.keys() & wanted.keys() - {CLASS, CHANGES}):
        if not _is_same(there[key], wanted[key]):
            name = _name(there)
            return f"{name}({key}={there[key]})", f"{name}({key}={wanted[key]})"
    return None


def _is_same(one: object, other: object) -> bool:
    """Settings of one number mean that number in each direction."""
    if isinstance(one, list) != isinstance(other, list):
        return all(each == other for each in one) if isinstance(one, list) else _is_same(other, one)
    return one == other


def _is_neutral(layer: Mapping[str, Any]) -> bool:
    return NEUTRAL.fullmatch(_name(layer)) is not None


def _name(layer: Mapping[str, Any]) -> str:
    """Class of a layer; with its module where its code is not of a known library."""
    whole: str = layer[CLASS]
    name = whole.rpartition(".")[2]
    return SAME_CLASSES.get(name, name) if whole.partition(".")[0] in LIBRARIES else whole


def describe_state_dict(
    file: Path,
    tensors: Mapping[str, Tensor],
    architecture: str | None = None,
    facts: Facts | None = None,
    remarks: tuple[str, ...] = (),
) -> ModelDescription:
    """Describe weights by name. ``architecture``: given by the user. ``facts``: stated in the file beside the weights.

    Raises WeightsRefused for tensors of an unserved model.
    """
    tensors, remark = with_usual_head(tensors)
    remarks = remarks if remark is None else (*remarks, remark)
    found = recognise(tensors, None if facts is None else facts.architecture)
    if found is None:
        raise WeightsRefused(str(file), _unknown(tensors, facts))
    if found.labels is None or found.unserved is not None:
        article = "an" if found.architecture[0].lower() in "aeiou" else "a"
        raise WeightsRefused(str(file), f"is {article} {found.architecture} ({found.evidence}): {found.unserved}")
    if architecture not in {None, found.architecture}:
        raise WeightsRefused(str(file), f"is no {architecture}: {found.evidence}")
    if architecture is None and facts is not None and facts.architecture is not None:
        _require_no_twin(file, found, facts.architecture, facts.evidence.get("architecture", "the checkpoint"))
    try:
        variant = settled(found, facts, min(found.size or (USUAL_SIZE,)), remark)
    except ValueError as error:
        raise WeightsRefused(
            str(file), f"has the weights of {found.architecture}, and computes otherwise: {error}: {EXPORT_ADVICE}"
        ) from error
    known = _known_facts(found, facts) | ({} if variant is None else {"variant": variant})
    if "labels" in known and len(known["labels"][0]) != found.labels:
        names, where = known.pop("labels")
        remarks = (*remarks, f"{where} names {len(names)} labels, and the weights have {found.labels}: not taken")
    return ModelDescription(
        file,
        "detector" if family(found.architecture) == "detector" else "classifier",
        **{key: value for key, (value, _) in known.items()},
        label_count=found.labels,
        tensors=tensors,
        evidence={key: evidence for key, (_, evidence) in known.items()},
        missing={key: why for key, why in _unknowable(found, facts, remark).items() if key not in known},
        remarks=remarks,
    )


def _require_no_twin(file: Path, found: Recognised, name: str, where: str) -> None:
    """Raise WeightsRefused if the file names another member of the family than its weights fit.

    Some models have equal weights and other computations: timm's resnetaa50 and resnetblur50 differ from resnet50 in
    layers without weights.
    """
    if may_be_twin(found.architecture, name):
        raise WeightsRefused(
            str(file),
            f"says that it is a {name} ({where}), and its weights are laid out as those of {found.architecture}, which "
            f"may compute otherwise: say --architecture {found.architecture} if it is one, else {EXPORT_ADVICE}",
        )


def _known_facts(found: Recognised, facts: Facts | None) -> dict[str, tuple[Any, str]]:
    """Values with their evidence, by key: from the weights first, then from the file's statements."""
    known: dict[str, tuple[Any, str]] = {"architecture": (found.architecture, found.evidence)}
    if found.stem is not None:
        known["stem"] = (found.stem, "the shape of conv1.weight")
    if found.size is not None:
        known["size"] = (found.size, "the places that its patches have")
    if family(found.architecture) == "detector":
        known["normalize"] = ("unit", "ultralytics trains on pixels in [0, 1]")
    elif found.labels == 1:
        known["task"] = ("multilabel", ONE_OUTPUT)
    elif facts is not None and facts.problem is not None:
        known["task"] = (facts.problem, facts.evidence.get("problem", "the checkpoint"))
    if facts is not None:
        stated = {"labels": facts.labels, "size": facts.size, "normalize": facts.normalize, "fit": facts.fit}
        for key, value in stated.items():
            if value is not None:
                known.setdefault(key, (value, facts.evidence.get(key, "the checkpoint")))
    return known


def _unknowable(found: Recognised, facts: Facts | None, remark: str | None) -> dict[str, str]:
    """Questions, by key, for facts that weights alone do not show."""
    unknown = {
        "labels": unknown_labels("weights have", found.labels),
        "size": "weights do not show to what size images were scaled in training: --size HEIGHTxWIDTH",
        "normalize": f"weights do not show how pixels were scaled in training: {NORMALIZE_OPTIONS}",
        "variant": question(found, facts, remark),
    }
    if family(found.architecture) != "detector":
        unknown["task"] = unknown_task("weights do")
    if facts is not None and "fit" in facts.evidence:
        unknown["fit"] = unserved_fit(facts.evidence["fit"])
    return unknown


def _unknown(tensors: Mapping[str, Tensor], facts: Facts | None) -> str:
    shown = ", ".join(sorted(tensors)[:3]) or "none"
    named = "" if facts is None or facts.architecture is None else f"says that it is a {facts.architecture}; "
    near = nearest(tensors)
    return (
        f"{named}its tensors ({shown}, ...) fit none of torchvision's classifiers and none of ultralytics' YOLO "
        f"detectors{'' if near is None else f' ({near})'}: export the model to ONNX with its trainer and add the .onnx"
    )
