"""Formats of model files: dispatch by format, files beside them, and writing of weights in the served format."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from experts.backends.weight_files import LABELS, read_labels, read_tensors, saving, write_gathered_onnx
from experts.checkpoints.importing import is_checkpoint
from experts.checkpoints.names import network_of
from experts.checkpoints.reading import read_checkpoint
from experts.errors import WeightsMissing, WeightsRefused
from experts.model_files.onnx_graphs import describe_graph
from experts.model_files.side_files import SideFiles, with_side_facts
from experts.model_files.state_dicts import describe_state_dict

if TYPE_CHECKING:
    from pathlib import Path

    from experts.model_files.description import Kind, ModelDescription


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
    side = SideFiles.of(file)
    if file.suffix == ".onnx":
        return with_side_facts(describe_graph(file, kind, detector), side)
    if file.suffix == ".safetensors":
        tensors, labels = read_tensors(str(file), file), read_labels(file)
        network, facts = network_of(str(file), tensors, anyone=False), side.of_weights(file, architecture)
        if labels is not None:
            facts = replace(facts, labels=labels, evidence={**facts.evidence, "labels": "its metadata"})
        described = describe_state_dict(file, network.weights, architecture, facts, network.remarks)
        is_as_served = described.tensors is not None and described.tensors.keys() == tensors.keys()
        return with_side_facts(replace(described, tensors=None) if is_as_served else described, side)
    if is_checkpoint(file):
        found = read_checkpoint(file)
        facts = side.of_weights(file, architecture, found.facts)
        described = describe_state_dict(file, found.weights, architecture, facts, found.remarks)
        return with_side_facts(described, side)
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
