"""Weights by name, as trainers save them: .safetensors, and checkpoints of torch.

Guarantees: an architecture is named only where every tensor fits it. What weights cannot tell is not guessed: the
names of labels, the size that images were scaled to, how their pixels were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experts.backends import family
from experts.backends.weight_files import read_tensors
from experts.checkpoints.recognition import EXPORT_ADVICE, Recognised, may_be_twin, recognise
from experts.errors import WeightsRefused
from experts.inspection.inspected import Inspected

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from experts.checkpoints.found import Facts, Found


def inspect_safetensors(file: Path, architecture: str | None = None) -> Inspected:
    """What a .safetensors file is. ``architecture``: what whoever brings it says of it.

    Raises WeightsMissing, WeightsCorrupt, and WeightsRefused where its tensors are of nothing that is served.
    """
    inspected = inspect_tensors(file, read_tensors(str(file), file), architecture)
    return replace(inspected, tensors=None)  # it is served as it is


def inspect_checkpoint(file: Path, found: Found, architecture: str | None = None) -> Inspected:
    """What a checkpoint of torch is, whose weights and facts are read already. Raises as above."""
    return inspect_tensors(file, found.weights, architecture, found.facts, found.said)


def inspect_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    architecture: str | None = None,
    facts: Facts | None = None,
    said: tuple[str, ...] = (),
) -> Inspected:
    """As above, of weights that are read already. ``facts``: what else the file tells."""
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
    told = _told(found, facts)
    if "labels" in told and len(told["labels"][0]) != found.labels:
        names, where = told.pop("labels")
        said = (*said, f"{where} names {len(names)} labels, and the weights tell {found.labels} apart: not taken")
    values = {key: value for key, (value, _) in told.items()}
    return Inspected(
        file,
        "detector" if family(found.architecture) == "detector" else "classifier",
        found.architecture,
        labels=values.get("labels"),
        size=values.get("size"),
        normalize=values.get("normalize"),
        stem=found.stem,
        label_count=found.labels,
        tensors=tensors,
        sure={key: evidence for key, (_, evidence) in told.items()},
        missing={key: why for key, why in _unknowable(found).items() if key not in told},
        said=said,
    )


def _require_no_twin(file: Path, found: Recognised, name: str, where: str) -> None:
    """Raises WeightsRefused where the file names another member of the family than its weights fit.

    Some have the same weights and compute otherwise: timm's resnetaa50 and resnetblur50 differ from resnet50 in layers
    that have none.
    """
    if may_be_twin(found.architecture, name):
        raise WeightsRefused(
            str(file),
            f"says that it is a {name} ({where}), and its weights are laid out as those of {found.architecture}, which "
            f"may compute otherwise: say --architecture {found.architecture} if it is one, else {EXPORT_ADVICE}",
        )


def _told(found: Recognised, facts: Facts | None) -> dict[str, tuple[Any, str]]:
    """What is known, and what says so: by the weights, which cannot err, then by what the file says of them."""
    told: dict[str, tuple[Any, str]] = {"architecture": (found.architecture, found.evidence)}
    if found.stem is not None:
        told["stem"] = (found.stem, "the shape of conv1.weight")
    if found.size is not None:
        told["size"] = (found.size, "the places that its patches have")
    if family(found.architecture) == "detector":
        told["normalize"] = ("unit", "ultralytics trains on pixels in [0, 1]")
    if facts is not None:
        said = {"labels": facts.labels, "size": facts.size, "normalize": facts.normalize}
        for key, value in said.items():
            if value is not None:
                told.setdefault(key, (value, facts.evidence.get(key, "the checkpoint")))
    return told


def _unknowable(found: Recognised) -> dict[str, str]:
    """What weights alone do not show, and which option gives it."""
    return {
        "labels": f"weights have no names for their {found.labels} outputs: --labels first,second,... in their order",
        "size": "weights do not show to what size images were scaled in training: --size HEIGHTxWIDTH",
        "normalize": "weights do not show how pixels were scaled in training: --normalize imagenet (torchvision's mean "
        "and deviation) or --normalize unit (pixels in [0, 1])",
    }


def _unknown(tensors: Mapping[str, Tensor], facts: Facts | None) -> str:
    """Why weights are not served as they are, and what to do."""
    shown = ", ".join(sorted(tensors)[:3]) or "none"
    named = "" if facts is None or facts.architecture is None else f"says that it is a {facts.architecture}; "
    return (
        f"{named}its tensors ({shown}, ...) fit none of torchvision's classifiers and none of ultralytics' YOLO "
        "detectors: export the model to ONNX with its trainer and add the .onnx"
    )
