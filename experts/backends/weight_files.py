"""Weights files of users: checks of readable formats, and tensors by name. Only functions of ONNX import onnx."""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager, suppress
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

import torch
from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open

from experts.backends.onnx.heading import read_heading
from experts.backends.onnx.layouts import require_names
from experts.errors import LoadError, WeightsCorrupt, WeightsMissing, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import onnx
    from torch import Tensor

    from experts.expert import Expert

LABELS = "labels"  # in the metadata of a .safetensors file: a JSON list
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # in safetensors' messages


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn safetensors' error back into the OSError of the disk."""
    try:
        yield
    except SafetensorError as error:
        found = SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def read_state_dict(expert: Expert, *, as_headers: bool = False) -> dict[str, Tensor]:
    """Raises WeightsRefused for all but .safetensors, WeightsMismatch for labels in another order. ``as_headers``:
    tensors on meta, whose numbers are not read."""
    if expert.weights.suffix in {".pt", ".pth"}:
        target = expert.weights.with_suffix(".safetensors")
        raise WeightsRefused(
            expert.id,
            f"{expert.weights} is a pickle, which is never read while serving: "
            f"run `coserve experts import {expert.weights} {target}` and name that file instead",
        )
    if expert.weights.suffix != ".safetensors":
        raise WeightsRefused(expert.id, f"{expert.weights}: {expert.architecture} takes a .safetensors file")
    tensors = read_tensors(expert.id, expert.weights, as_headers=as_headers)
    names = read_labels(expert.weights)
    if names is not None and len(names) == len(expert.labels):  # other numbers belong to another head
        require_names(expert, names)
    return tensors


def read_labels(path: Path) -> tuple[str, ...] | None:
    """A file's labels in the order of its outputs, if it has any. An import writes them into .safetensors."""
    try:
        if path.suffix == ".onnx":
            return read_heading(str(path), path).names
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {})[LABELS])
    except (KeyError, ValueError, OSError, SafetensorError, LoadError, WeightsCorrupt, WeightsMissing):
        return None
    return tuple(found) if isinstance(found, list) and all(isinstance(each, str) for each in found) else None


def read_onnx(expert: str, path: Path, *, gathers: bool = False) -> onnx.ModelProto:
    """A complete ONNX model, checked. Raises WeightsRefused for weights in other files, unless ``gathers``."""
    import onnx

    model = read_graph(expert, path)
    try:
        if is_scattered(model):
            _gather(expert, path, model, gathers=gathers)
        sort_nodes(model.graph)
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:  # ValueError: more than protobuf holds
        raise WeightsCorrupt(expert, f"{path} is not a valid ONNX model: {error}") from error
    return model


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Put nodes behind those that they read, as ONNX Runtime does; exporters leave casts behind them. In place.

    A circle stays for the checker.
    """
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    before = {
        place: {makers[name] for name in read_by(node) if name in makers} for place, node in enumerate(graph.node)
    }
    if all(each < place for place, made in before.items() for each in made):
        return
    with suppress(CycleError):
        nodes = [graph.node[place] for place in TopologicalSorter(before).static_order()]
        graph.ClearField("node")
        graph.node.extend(nodes)


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Names of values that a node reads, also inside its branches and bodies."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from read_by(inner)


def read_graph(expert: str, path: Path) -> onnx.ModelProto:
    """An ONNX model as its file has it, not checked, without weights in other files."""
    import onnx

    try:
        return onnx.load_model(path, load_external_data=False)
    except FileNotFoundError as error:
        raise _missing(expert, path) from error
    except OSError as error:
        raise LoadError(expert, f"{path} cannot be read: {error.strerror}") from error
    except DecodeError as error:
        raise WeightsCorrupt(expert, f"{path} is not an ONNX model: {error}") from error


def is_scattered(model: onnx.ModelProto) -> bool:
    from onnx.external_data_helper import uses_external_data

    return any(uses_external_data(tensor) for tensor in model.graph.initializer)


def write_gathered_onnx(expert: str, source: Path, destination: Path) -> None:
    """Write an ONNX model as one file. Raises as ``read_onnx``, and OSError from the disk."""
    destination.write_bytes(read_onnx(expert, source, gathers=True).SerializeToString(deterministic=True))


def _gather(expert: str, path: Path, model: onnx.ModelProto, *, gathers: bool) -> None:
    """Read weights from other files, all in the model's own folder, into the model. In place."""
    import onnx

    if not gathers:
        raise WeightsRefused(
            expert, f"{path} keeps its weights in other files: save it as one file, or bring it with "
            "`coserve experts add`, which does"
        )  # fmt: skip
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, onnx.checker.ValidationError) as error:
        raise WeightsRefused(
            expert, f"{path} keeps its weights in other files, which cannot be read: {error}: put them beside it"
        ) from error


def check_weights(expert: str, path: Path) -> None:
    """Read a .safetensors or .onnx file to its end. Raises as the readers."""
    if path.suffix == ".onnx":
        read_onnx(expert, path)
    else:
        read_tensors(expert, path)


def read_tensors(expert: str, path: Path, *, as_headers: bool = False) -> dict[str, Tensor]:
    """The tensors of a .safetensors file. Raises WeightsMissing, WeightsCorrupt, LoadError."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # the file is no mapping
            if as_headers:
                return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in names}
            return {name: file.get_tensor(name) for name in names}
    except FileNotFoundError as error:
        raise _missing(expert, path) from error
    except OSError as error:
        raise LoadError(expert, f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise WeightsCorrupt(expert, f"{path} is not a sound .safetensors file: {error}") from error


def _missing(expert: str, path: Path) -> WeightsMissing:
    return WeightsMissing(expert, f"{path} is not there: copy it there, or correct `weights`")
