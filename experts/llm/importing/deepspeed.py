"""Import of DeepSpeed checkpoints as servable directories: `coserve experts import`, once and offline.

A folder has ``mp_rank_<r>_model_states.pt`` for each model-parallel rank, and ``layer_<l>_expert_<e>_mp_rank_<r>_...``
(older: ``expert_<e>_mp_rank_<r>_...``) for each moe_expert. A separate process reads these pickles as data
(``experts.checkpoints``). Guarantees: no class of the trainer is imported or run; names and shapes are checked against
the written config.json; the destination appears atomically.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from experts.checkpoints.reading import convert_states
from experts.errors import LoadError, WeightsMissing, WeightsRefused
from experts.filesystem import is_taken, whole_folder
from experts.llm.files.checkpoint import INDEX_NAME, open_checkpoint
from experts.llm.files.config import CONFIG_NAME, TOKENIZER_FILES, read_spec
from experts.llm.importing.megatron import EXPERT_FILE, RANK_FILE, Arguments, GptCheckpoint, StateFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

LATEST = "latest"  # the file that names the newest folder of a run
PIPELINE_FILE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
PARTED_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """Written directory. ``moe_experts``: count in each layer; 0: a dense layer."""

    directory: Path
    moe_experts: tuple[int, ...]
    size_bytes: int
    has_tokenizer: bool


def import_deepspeed(
    source: Path, destination: Path, given: Mapping[str, Any] | None = None, tokenizer: Path | None = None
) -> ImportedModel:
    """Write a checkpoint as a Hugging Face directory of model_type ``pr_moe``.

    ``given``: the trainer's arguments, by name. ``tokenizer``: a folder whose files are copied.
    Raises WeightsMissing, WeightsRefused, WeightsCorrupt, WeightsMismatch, LoadError, TrainingUnsupported (argument).
    """
    folder = _tagged(source)
    files = _files(folder)
    if is_taken(destination):
        raise WeightsRefused(str(source), f"{destination} exists already: name a new folder for the import")
    try:
        with whole_folder(destination) as made, tempfile.TemporaryDirectory(dir=made.parent) as states:
            convert_states(source, files, Path(states))
            moe_experts = _convert(source, StateFiles(Path(states), files), given or {}, made)
            _copy_tokenizer(source, tokenizer, made)
    except OSError as error:
        raise LoadError(str(source), f"cannot be imported: {error}") from error
    size_bytes = sum(file.stat().st_size for file in destination.glob("*.safetensors"))
    return ImportedModel(destination, moe_experts, size_bytes, (destination / TOKENIZER_FILES[0]).is_file())


def _tagged(source: Path) -> Path:
    if any(RANK_FILE.fullmatch(file.name) for file in source.iterdir()) or not (source / LATEST).is_file():
        return source
    tag = (source / LATEST).read_text("utf-8").strip()
    if not tag or Path(tag).name != tag or not (source / tag).is_dir():
        raise WeightsMissing(str(source), f"{LATEST} names {tag!r}, which is no folder beside it")
    return source / tag


def _files(folder: Path) -> tuple[Path, ...]:
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    if any(PIPELINE_FILE.fullmatch(name) for name in names):
        raise WeightsRefused(str(folder), "its layers were trained in a pipeline: save it again without one")
    if any(PARTED_FILE.fullmatch(name) for name in names):
        raise WeightsRefused(str(folder), "its weights are in parts (ZeRO 3): join them with zero_to_fp32.py first")
    found = tuple(folder / name for name in names if RANK_FILE.fullmatch(name) or EXPERT_FILE.fullmatch(name))
    if not any(RANK_FILE.fullmatch(file.name) for file in found):
        if (folder / "config.json").is_file():
            raise WeightsRefused(
                str(folder), "is a Hugging Face directory and needs no import: name it as `weights:` of an llm"
            )
        raise WeightsMissing(str(folder), "holds no mp_rank_<n>_model_states.pt, as a checkpoint of DeepSpeed does")
    return found


def _convert(source: Path, states: StateFiles, given: Mapping[str, Any], made: Path) -> tuple[int, ...]:
    """Write config.json, a file for each layer and one for the rest. Returns each layer's number of experts."""
    model = GptCheckpoint(str(source), states, Arguments(str(source), states.facts, given))
    values = model.config()
    (made / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", "utf-8")
    weight_map: dict[str, str] = {}
    for number, layer in enumerate((None, *range(model.layers)), start=1):
        file = f"model-{number:05}-of-{model.layers + 1:05}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in model.tensors(layer)}
        save_file(tensors, made / file)
        weight_map |= dict.fromkeys(tensors, file)
    (made / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}, indent=2) + "\n", "utf-8")
    open_checkpoint(made, str(source), read_spec(made, str(source)))
    return tuple(values["num_experts"])


def _copy_tokenizer(source: Path, tokenizer: Path | None, made: Path) -> None:
    if tokenizer is None:
        return
    if not (tokenizer / TOKENIZER_FILES[0]).is_file():
        raise WeightsMissing(str(source), f"{tokenizer} holds no {TOKENIZER_FILES[0]}: name a folder that does")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, made / name)
