"""Formats of model files: dispatch by format, files beside them, and writing of weights in the served format."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from experts.backends.weight_files import LABELS, read_tensors, saving, write_gathered_onnx
from experts.checkpoints.importing import is_checkpoint
from experts.checkpoints.preprocessing import of_image_processor
from experts.checkpoints.reading import read_checkpoint
from experts.checkpoints.trainer_facts import FactCollector, add_arguments
from experts.errors import WeightsMissing, WeightsRefused
from experts.model_files.description import unserved_fit
from experts.model_files.onnx_graphs import describe_graph
from experts.model_files.state_dicts import describe_state_dict

if TYPE_CHECKING:
    from pathlib import Path

    from experts.model_files.description import Kind, ModelDescription

PROCESSOR, CONFIG = "preprocessor_config.json", "config.json"
LENGTH_MAXIMUM = 1_000_000


def describe_file(
    file: Path, architecture: str | None = None, kind: Kind | None = None, detector: str | None = None
) -> ModelDescription:
    """Describe a model's file. ``architecture``, ``kind`` and ``detector``: given by the user.

    Raises WeightsMissing, WeightsCorrupt, LoadError, and WeightsRefused for what is not served.
    """
    if file.is_dir():
        advice = "language models are named in the line file, as docs/texts.md shows"
        raise WeightsRefused(str(file), f"is a folder: {advice}")
    if not file.is_file():
        raise WeightsMissing(str(file), "there is no such file")
    if file.suffix == ".onnx":
        return with_sidecars(describe_graph(file, kind, detector))
    if file.suffix == ".safetensors":
        described = describe_state_dict(file, read_tensors(str(file), file), architecture)
        return with_sidecars(replace(described, tensors=None))  # served directly
    if is_checkpoint(file):
        found = read_checkpoint(file)
        return with_sidecars(describe_state_dict(file, found.weights, architecture, found.facts, found.said))
    raise WeightsRefused(str(file), "unknown format: give a .pt, .pth, .ckpt, .safetensors or .onnx file")


def write_weights(described: ModelDescription, destination: Path) -> None:
    """Write the weights in the served format. Raises OSError."""
    if described.is_served_as_it_is:
        shutil.copyfile(described.file, destination)
        return
    if described.tensors is None:
        write_gathered_onnx(str(described.file), described.file, destination)
        return
    with saving(destination):
        tensors = {name: tensor.clone().contiguous() for name, tensor in described.tensors.items()}
        save_file(tensors, destination, None if described.labels is None else {LABELS: json.dumps(described.labels)})


def served_suffix(described: ModelDescription) -> str:
    return described.file.suffix if described.tensors is None else ".safetensors"


def with_sidecars(described: ModelDescription) -> ModelDescription:
    """Add ``size``, ``normalize`` and ``fit`` from Hugging Face's files beside the model, where its own lacks them.

    preprocessor_config.json comes from transformers and Optimum, config.json with ``pretrained_cfg`` from timm. Both
    count only in a folder with one model.
    """
    folder = described.file.absolute().parent
    models = {each.stem for each in folder.iterdir() if each.suffix in {".onnx", ".safetensors"} or is_checkpoint(each)}
    if described.kind == "detector" or len(models) > 1:
        return described
    facts = FactCollector()
    facts.add("size", described.size, "")
    for fact, found in of_image_processor(_table(folder / PROCESSOR)).items():
        facts.add_found(fact, found, f"{PROCESSOR} ")
    if isinstance(configured := _table(folder / CONFIG).get("pretrained_cfg"), dict):
        add_arguments(facts, configured, f"{CONFIG} pretrained_cfg.")
    new = {key for key in ("size", "normalize", "fit") if getattr(described, key) is None}
    values = {key: facts.values[key] for key in new & facts.values.keys()}
    missing = {key: why for key, why in described.missing.items() if key not in values}
    if "fit" in new and facts.lacks("fit"):
        missing["fit"] = unserved_fit(facts.evidence["fit"])
    sure = {**described.sure, **{key: facts.evidence[key] for key in values}}
    return replace(described, **values, sure=sure, missing=missing)


def _table(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(LENGTH_MAXIMUM))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
