"""Hugging Face's files beside a model's file, which state the preprocessing of images.

preprocessor_config.json comes from transformers and Optimum, config.json with ``pretrained_cfg`` from timm. Both count
only in a folder with one model; facts of the model's file take precedence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experts.checkpoints.importing import is_checkpoint
from experts.checkpoints.preprocessing import of_image_processor
from experts.checkpoints.trainer_facts import FactCollector, tell_of_arguments
from experts.model_files.description import unserved_fit

if TYPE_CHECKING:
    from pathlib import Path

    from experts.model_files.description import ModelDescription

PROCESSOR, CONFIG = "preprocessor_config.json", "config.json"
LENGTH_MAXIMUM = 1_000_000


def with_sidecars(described: ModelDescription) -> ModelDescription:
    """Add ``size``, ``normalize`` and ``fit`` from files beside the model, where its own file lacks them."""
    folder = described.file.absolute().parent
    models = {each.stem for each in folder.iterdir() if each.suffix in {".onnx", ".safetensors"} or is_checkpoint(each)}
    if described.kind == "detector" or len(models) > 1:
        return described
    facts = FactCollector()
    facts.tell("size", described.size, "")
    for fact, found in of_image_processor(_table(folder / PROCESSOR)).items():
        facts.tell_found(fact, found, f"{PROCESSOR} ")
    if isinstance(configured := _table(folder / CONFIG).get("pretrained_cfg"), dict):
        tell_of_arguments(facts, configured, f"{CONFIG} pretrained_cfg.")
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
