"""Tensors of a Hugging Face directory: model.safetensors, or shards with their index. Or those of a GGUF file.

Guarantees: ``open_checkpoint`` reads headers only, and names each missing, extra or misshapen tensor. Tensors are read
on demand; a tensor that needs neither joining nor conversion is a view of the mapped file.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from experts.errors import LoadError, WeightsCorrupt, WeightsMismatch, WeightsMissing, WeightsRefused
from experts.llm.files.config import ConfigFamily, stored_quantiser
from experts.llm.files.four_bit_files import PARTS, FourBitMatrices
from experts.llm.files.names import EMBEDDING, HEAD_STORED, assemblies
from experts.llm.files.program import ADAPTER_CONFIG
from experts.llm.gguf.header import is_gguf
from experts.llm.gguf.tensors import GgufTensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from experts.llm.files.config import ArchSpec
    from experts.llm.files.names import Assembly, Shape, SourceTensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TEXT_PART = "language_model."  # before names in models of texts and images
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
COMPUTED_ANYWAY = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # stored by old checkpoints
NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    shape: Shape
    number_format: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's tensors on disk, known to fit it. Maps its files: they may be unlinked meanwhile, not rewritten."""

    expert: str
    spec: ArchSpec
    _parts: Mapping[str, tuple[Assembly, tuple[SourceTensor, ...]]]
    _stored: Mapping[str, StoredTensor]
    _files: Mapping[Path, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    @property
    def dtype(self) -> torch.dtype:
        _, (embedding,) = self._parts[EMBEDDING]
        return FORMATS[self._stored[embedding.name].number_format]

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor of the model, in the checkpoint's dtype or this one. Raises LoadError."""
        assembly, parts = self._parts[name]
        wanted = dtype or self.dtype
        if len(parts) == 1:
            return self._tensor(parts[0]).to(wanted).view(assembly.shape)
        whole = torch.empty(assembly.shape, dtype=wanted)
        flat, start = whole.view(-1), 0
        for part in parts:
            tensor = self._tensor(part)
            flat[start : start + tensor.numel()] = tensor.reshape(-1)
            start += tensor.numel()
        return whole

    def read_all(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read all tensors. Raises LoadError, WeightsMismatch where a tied head is stored and differs."""
        self.check_tied_head()
        return {name: self.read(name, dtype) for name in self._parts}

    def read_rows(
        self, name: str, matrix_columns: int, rows: Sequence[tuple[int, int]], columns: tuple[int, int]
    ) -> Tensor:
        """Read ascending ranges of a tensor's rows, seen as a matrix, and one range of its columns. Raises LoadError.

        Files are mapped: other pages are not read from the disk.
        """
        read: list[Tensor] = []
        start = 0
        for part in self._parts[name][1]:
            count = math.prod(part.shape) // matrix_columns
            ranges = [(max(begin - start, 0), min(end - start, count)) for begin, end in rows]
            wanted = [one for one in ranges if one[0] < one[1]]
            if wanted:
                matrix = self._tensor(part).reshape(count, matrix_columns)
                read += [matrix[slice(*one), slice(*columns)] for one in wanted]
            start += count
        return torch.cat(read)

    def _tensor(self, part: SourceTensor) -> Tensor:
        file = self._stored[part.name].file
        return tensor_of(self._files[file], part.name, file, self.expert)

    def check_tied_head(self) -> None:
        """Raises WeightsMismatch for a stored tied head that differs from the embedding: it was not tied."""
        if not self.spec.is_tied or HEAD_STORED not in self._stored:
            return
        _, (embedding,) = self._parts[EMBEDDING]
        file = self._stored[HEAD_STORED].file
        if not torch.equal(self._files[file].get_tensor(HEAD_STORED), self._tensor(embedding)):
            raise WeightsMismatch(
                self.expert,
                f"{file}: {HEAD_STORED} differs from {embedding.name}, though config.json says tie_word_embeddings: "
                "correct the wrong one",
            )


@dataclass(frozen=True, slots=True)
class TextPart:
    """File of a model of texts and images: its language model's tensors alone, by their names in one of texts."""

    file: Any

    def keys(self) -> list[str]:
        return [name.removeprefix(TEXT_PART) for name in self.file.keys() if name.startswith(TEXT_PART)]  # noqa: SIM118

    def get_slice(self, name: str) -> Any:  # noqa: ANN401  safetensors has no types
        return self.file.get_slice(TEXT_PART + name)

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(TEXT_PART + name)
        return tensor


def open_checkpoint(directory: Path, expert: str, spec: ArchSpec) -> Checkpoint:
    """Raises WeightsMissing, WeightsCorrupt, LoadError, WeightsRefused (a pickle), WeightsMismatch with all names."""
    if is_gguf(directory):
        tensors = GgufTensors(directory, expert)
        stored = {name: StoredTensor(directory, shape, "F32") for name, shape in tensors.shapes.items()}
        return _checkpoint(directory, expert, spec, stored, {directory: tensors})
    files = {path: opened(path, expert) for path in _files(directory, expert)}
    are_named = any(name.startswith(TEXT_PART) for file in files.values() for name in file.keys())  # noqa: SIM118
    is_part = are_named and spec.family is ConfigFamily.GEMMA3
    if is_part:
        files = {path: TextPart(file) for path, file in files.items()}
    stored = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118  it is no mapping
            if name in stored:
                raise WeightsCorrupt(expert, f"{name} is in {stored[name].file} and in {path}: remove one")
            header = file.get_slice(name)
            stored[name] = StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
    if (directory / SINGLE_NAME) not in files:
        for whole_name, file in _weight_map(directory / INDEX_NAME, expert).items():
            name = whole_name.removeprefix(TEXT_PART) if is_part else whole_name
            if is_part and name == whole_name:
                continue
            if name not in stored or stored[name].file.name != file:
                raise WeightsCorrupt(expert, f"{name} is not in {directory / file}, where {INDEX_NAME} says it is")
    if (found := stored_quantiser(directory, expert)) is not None:
        return _quantised(directory, expert, spec, stored, FourBitMatrices(expert, *found, _by_name(stored, files)))
    return _checkpoint(directory, expert, spec, stored, files)


def _by_name(stored: Mapping[str, StoredTensor], files: Mapping[Path, Any]) -> dict[str, Any]:
    return {name: files[tensor.file] for name, tensor in stored.items()}


def _quantised(
    directory: Path, expert: str, spec: ArchSpec, stored: Mapping[str, StoredTensor], matrices: FourBitMatrices
) -> Checkpoint:
    """All tensors in fp32: 16 bits would round numbers of four bits once more before they are packed."""
    wanted = {part.name for assembly in assemblies(spec) for form in assembly.forms for part in form}
    whole = {
        name: StoredTensor(one.file, one.shape, "F32" if one.number_format in FORMATS else one.number_format)
        for name, one in stored.items()
        if not name.endswith(PARTS) and (name in wanted or not matrices.is_needless(name))
    }
    file = next(iter(stored.values())).file
    whole |= {name: StoredTensor(file, shape, "F32") for name, shape in matrices.shapes()}
    return _checkpoint(directory, expert, spec, whole, dict.fromkeys([one.file for one in stored.values()], matrices))


def _checkpoint(
    directory: Path, expert: str, spec: ArchSpec, stored: Mapping[str, StoredTensor], files: Mapping[Path, Any]
) -> Checkpoint:
    parts: dict[str, tuple[Assembly, tuple[SourceTensor, ...]]] = {}
    for assembly in assemblies(spec):
        present = (form for form in assembly.forms if any(part.name in stored for part in form))
        parts[assembly.name] = assembly, next(present, assembly.forms[0])
    _check(directory, expert, spec, [part for _, form in parts.values() for part in form], stored)
    return Checkpoint(expert, spec, parts, stored, files)


def _files(directory: Path, expert: str) -> list[Path]:
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME]
    if (directory / INDEX_NAME).is_file():
        names = sorted(set(_weight_map(directory / INDEX_NAME, expert).values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise WeightsCorrupt(expert, f"{directory / INDEX_NAME} names {name!r}, which is no file beside it")
            if not (directory / name).is_file():
                raise WeightsMissing(expert, f"{directory / name} is not there, and {INDEX_NAME} names it: copy it too")
        return [directory / name for name in names]
    if any((directory / name).exists() for name in PICKLES):
        raise WeightsRefused(
            expert,
            f"{directory} holds a pickle, which is never read while serving: save the model again as safetensors",
        )
    if (directory / ADAPTER_CONFIG).exists():
        raise WeightsMismatch(
            expert, f"{directory} holds an adapter alone: name its model as `weights`, and this folder as `adapter`"
        )
    raise WeightsMissing(expert, f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def unused_adapter(directory: Path, adapter: Path | None = None) -> str | None:
    """Sentence about an adapter beside a full model, which is served without it, but by ``adapter``; else None."""
    path = directory / ADAPTER_CONFIG
    if adapter == directory or not path.exists():
        return None
    return f"{path}: this adapter is not applied: name its folder as `adapter` of an expert, or move it away"


def _weight_map(index: Path, expert: str) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsCorrupt(expert, f"{index} cannot be read as JSON: {error}") from error
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise WeightsCorrupt(expert, f"{index}: weight_map must give the file of each tensor")
    return found


def opened(path: Path, expert: str) -> Any:  # noqa: ANN401  safetensors has no types
    """Map a .safetensors file. Raises LoadError, WeightsCorrupt."""
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise LoadError(expert, f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise WeightsCorrupt(expert, f"{path} is not a sound .safetensors file: {error}") from error


def tensor_of(file: Any, name: str, path: Path, expert: str) -> Tensor:  # noqa: ANN401  safetensors has no types
    """Read a tensor of an opened file. Raises LoadError."""
    try:
        tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise LoadError(expert, f"{name} cannot be read from {path}: {error}") from error
    return tensor


def _check(
    directory: Path, expert: str, spec: ArchSpec, parts: Sequence[SourceTensor], stored: Mapping[str, StoredTensor]
) -> None:
    shapes = {part.name: part.shape for part in parts}
    wanted = shapes.keys()
    needless = {HEAD_STORED} if spec.is_tied else set()
    extra = [name for name in stored if name not in wanted | needless and not COMPUTED_ANYWAY.fullmatch(name)]
    present = [name for name in wanted if name in stored]
    misshapen = [name for name in present if stored[name].shape != shapes[name]]
    misformed = [name for name in present if stored[name].number_format not in FORMATS]
    complaints = (
        ("missing", [name for name in wanted if name not in stored]),
        ("unexpected", extra),
        ("of another shape", [f"{name} {stored[name].shape} instead of {shapes[name]}" for name in misshapen]),
        ("in a number format that is not served", [f"{name} {stored[name].number_format}" for name in misformed]),
    )
    if any(names for _, names in complaints):
        described = "metadata" if is_gguf(directory) else "config.json"
        text = "; ".join(f"{what}: {shown(names)}" for what, names in complaints if names)
        raise WeightsMismatch(expert, f"{directory} does not fit its {described} ({spec.family}): {text}")


def shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
