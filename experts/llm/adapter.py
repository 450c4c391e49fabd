"""LoRA adapters on disk, as PEFT saves them: adapter_config.json and adapter_model.safetensors.

Guarantees: ``open_adapter`` reads headers only. A field of the config that changes the numbers is read or refused by
name, an unknown one if it is set; so is each tensor that is not half of a delta of a served matrix. Served are the
matrices of attention and of MLPs, with a rank and an alpha of each (``rank_pattern``, ``alpha_pattern``).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from experts.errors import ModelUnsupported, WeightsCorrupt, WeightsError, WeightsMismatch, WeightsMissing
from experts.llm.files.checkpoint import FORMATS, opened, shown, tensor_of
from experts.llm.files.names import assemblies
from experts.llm.files.program import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from experts.llm.low_rank import DOWN, UP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from experts.llm.files.config import ArchSpec

ADAPTED = (".qkv", ".output", ".mlp.up", ".mlp.down")
HALF = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
SERVED = {  # other starts change the base's weights, too
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
OF_TRAINING = {  # fields that change no number of a trained adapter
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
Served: TypeAlias = "tuple[str, int, tuple[int, ...]]"  # the model's matrix, its first output there, and its own shape
DEFAULT = 8  # PEFT's, of rank and alpha
MERGE = "merge it into its model (PEFT's merge_and_unload), and name that folder as `weights`"


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter's tensors on disk, known to fit its base. Like a Checkpoint, it maps its file."""

    expert: str
    _path: Path
    _file: Any
    _stored: Mapping[str, tuple[str, float]]  # by the model's name: the file's name, and a factor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def read(self, name: str) -> Tensor:
        """Read a tensor, scaled. Raises LoadError."""
        stored, factor = self._stored[name]
        return tensor_of(self._file, stored, self._path, self.expert).float() * factor


def open_adapter(directory: Path, expert: str, spec: ArchSpec) -> StoredAdapter:
    """Raises LoadError, and with the ``key`` adapter WeightsMissing, WeightsCorrupt, ModelUnsupported with the field,
    WeightsMismatch with all names."""
    path = directory / ADAPTER_WEIGHTS
    try:
        config = _config(directory / ADAPTER_CONFIG, expert)
        if not path.is_file():
            raise WeightsMissing(expert, f"{path} is not there: save the adapter as safetensors")
        file = opened(path, expert)
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        return StoredAdapter(expert, path, file, _fitted(path, expert, dict(_matrices(spec)), headers, config))
    except WeightsError as error:
        error.key = "adapter"
        raise


def _config(path: Path, expert: str) -> Mapping[str, Any]:
    try:
        config = dict(json.loads(path.read_bytes()))
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}): name a folder that PEFT saved an adapter to"
        raise WeightsMissing(expert, reason) from error
    except (ValueError, TypeError) as error:
        raise WeightsCorrupt(expert, f"{path} holds no JSON object: {error}") from error
    for field, value in config.items():
        is_harmless = not value or field in READ or field in OF_TRAINING
        if value not in SERVED[field] if field in SERVED else not is_harmless:
            raise ModelUnsupported(expert, field, f"{value!r} is not served: {MERGE}", str(path))
    return config


def _fitted(
    path: Path, expert: str, matrices: Mapping[str, Served], headers: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[str, float]]:
    """Stored names and factors by the model's names. Raises WeightsMismatch."""
    fitted: dict[str, tuple[str, float]] = {}
    alone, misshapen, others = [], [], []
    for name, header in headers.items():
        half = HALF.fullmatch(name)
        if half is None or half[1] not in matrices or header.get_dtype() not in FORMATS:
            others.append(name)
            continue
        is_down = half[2] == "A"
        matrix, start, (outputs, inputs) = matrices[half[1]]
        try:
            rank, scale = _rank_and_scale(config, half[1])
        except (re.error, ArithmeticError, AttributeError, TypeError, ValueError) as error:
            reason = f"rank and alpha of {half[1]} cannot be computed: {error}"
            raise WeightsMismatch(expert, f"{path.with_name(ADAPTER_CONFIG)}: {reason}: correct them") from error
        wanted, shape = (rank, inputs) if is_down else (outputs, rank), tuple(header.get_shape())
        if shape != wanted:
            misshapen.append(f"{name} {shape} instead of {wanted}")
        if name.replace(f".lora_{half[2]}.", f".lora_{'B' if is_down else 'A'}.") not in headers:
            alone.append(name)
        fitted[f"{matrix}{DOWN if is_down else UP}{start}"] = name, 1.0 if is_down else scale
    complaints = (("is not served", others), ("has another base's shape", misshapen), ("lacks its other half", alone))
    if told := "; ".join(f"{shown(names)} {what}" for what, names in complaints if names):
        raise WeightsMismatch(expert, f"{path}: {told}: name the base that it was trained on as `weights`, or {MERGE}")
    if not fitted:
        raise WeightsMismatch(expert, f"{path} holds no tensor of an adapter: save it again, or leave `adapter` out")
    return fitted


def _rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank and factor of a module's delta. The first pattern that ends the module's name decides, as in PEFT."""
    rank, alpha = (
        next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), usual)
        for field, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
        for patterns, usual in [(config.get(name) or {}, config.get(field, DEFAULT))]
    )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matrices(spec: ArchSpec) -> Iterator[tuple[str, Served]]:
    """Served matrices by a checkpoint's name."""
    for assembly in assemblies(spec):
        start = 0
        for part in assembly.forms[0] if assembly.name.endswith(ADAPTED) else ():
            yield part.name.removesuffix(".weight"), (assembly.name, start, part.shape)
            start += part.shape[0]
