"""The way in: any model's file that can be added to a line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from experts.backends.weight_files import LABELS, read_tensors, saving, write_gathered_onnx
from experts.checkpoints.reading import read_checkpoint
from experts.errors import WeightsMissing, WeightsRefused
from experts.importing import is_checkpoint
from experts.inspection.beside import told_beside
from experts.inspection.graphs import inspect_graph
from experts.inspection.states import inspect_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from experts.inspection.inspected import Inspected, Kind


def inspect_file(file: Path, architecture: str | None = None, kind: Kind | None = None) -> Inspected:
    """What a model's file is. ``architecture`` and ``kind``: given by the user, where the file is not plain.

    Raises WeightsMissing, WeightsCorrupt, LoadError, and WeightsRefused for what is not served.
    """
    if file.is_dir():
        advice = "language models are named in the line file, as docs/texts.md tells"
        raise WeightsRefused(str(file), f"is a folder: {advice}")
    if not file.is_file():
        raise WeightsMissing(str(file), "there is no such file")
    if file.suffix == ".onnx":
        return told_beside(inspect_graph(file, kind))
    if file.suffix == ".safetensors":
        inspected = inspect_tensors(file, read_tensors(str(file), file), architecture)
        return told_beside(replace(inspected, tensors=None))  # it is served as it is
    if is_checkpoint(file):
        found = read_checkpoint(file)
        return told_beside(inspect_tensors(file, found.weights, architecture, found.facts, found.said))
    raise WeightsRefused(str(file), "unknown format: give a .pt, .pth, .ckpt, .safetensors or .onnx file")


def write_weights(inspected: Inspected, destination: Path) -> None:
    """Write the weights as they are served. Raises OSError for what the disk refuses."""
    if inspected.is_served_as_it_is:
        shutil.copyfile(inspected.file, destination)
        return
    if inspected.tensors is None:
        write_gathered_onnx(str(inspected.file), inspected.file, destination)
        return
    with saving(destination):
        tensors = {name: tensor.clone().contiguous() for name, tensor in inspected.tensors.items()}
        save_file(tensors, destination, None if inspected.labels is None else {LABELS: json.dumps(inspected.labels)})


def served_suffix(inspected: Inspected) -> str:
    return inspected.file.suffix if inspected.tensors is None else ".safetensors"
