"""Files of Hugging Face's libraries that lie beside a model's file and tell how images come to it.

preprocessor_config.json is of transformers and of Optimum's exports, config.json with ``pretrained_cfg`` of timm. They
count only in a folder of one model, and after the model's own file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experts.checkpoints.preprocessing import of_image_processor
from experts.checkpoints.telling import Telling, tell_of_arguments
from experts.importing import is_checkpoint
from experts.inspection.inspected import unserved_fit

if TYPE_CHECKING:
    from pathlib import Path

    from experts.inspection.inspected import Inspected

PROCESSOR, CONFIG = "preprocessor_config.json", "config.json"
LENGTH_MAXIMUM = 1_000_000


def told_beside(inspected: Inspected) -> Inspected:
    """Adds ``size``, ``normalize`` and ``fit`` as told beside the file, where it does not tell."""
    folder = inspected.file.absolute().parent
    models = {each.stem for each in folder.iterdir() if each.suffix in {".onnx", ".safetensors"} or is_checkpoint(each)}
    if inspected.kind == "detector" or len(models) > 1:
        return inspected
    telling = Telling()
    telling.tell("size", inspected.size, "")
    for fact, found in of_image_processor(_table(folder / PROCESSOR)).items():
        telling.tell_found(fact, found, f"{PROCESSOR} ")
    if isinstance(configured := _table(folder / CONFIG).get("pretrained_cfg"), dict):
        tell_of_arguments(telling, configured, f"{CONFIG} pretrained_cfg.")
    new = {key for key in ("size", "normalize", "fit") if getattr(inspected, key) is None}
    values = {key: telling.values[key] for key in new & telling.values.keys()}
    missing = {key: why for key, why in inspected.missing.items() if key not in values}
    if "fit" in new and telling.lacks("fit"):
        missing["fit"] = unserved_fit(telling.evidence["fit"])
    sure = {**inspected.sure, **{key: telling.evidence[key] for key in values}}
    return replace(inspected, **values, sure=sure, missing=missing)


def _table(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(LENGTH_MAXIMUM))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
