"""Weights by name, as trainers save them: .safetensors, and checkpoints of torch.

Guarantees: an architecture is named only if every tensor fits it. Facts that weights lack are never guessed: names of
labels, input size, preprocessing of pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experts.backends import family
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
from experts.model_files.variants import question, settled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from experts.checkpoints.facts import Facts


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
