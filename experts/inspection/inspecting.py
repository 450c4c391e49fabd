"""The way in: any model's file that can be added to a line."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from experts.backends.weight_files import saving, write_gathered_onnx
from experts.checkpoints.reading import read_checkpoint
from experts.errors import WeightsMissing, WeightsRefused
from experts.importing import is_checkpoint
from experts.inspection.graphs import inspect_graph
from experts.inspection.states import inspect_checkpoint, inspect_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from experts.inspection.inspected import Inspected, Kind


def inspect_file(file: Path, architecture: str | None = None, kind: Kind | None = None) -> Inspected:
    """What a model's file is. ``architecture`` and ``kind``: what whoever brings it says of it, where it is not plain.

    Raises WeightsMissing, WeightsCorrupt, LoadError, and WeightsRefused for what is not served.
    """
    if file.is_dir():
        raise WeightsRefused(
            str(file), "is a folder: language models are named in the line file, as docs/texts.md tells"
        )
    if not file.is_file():
        raise WeightsMissing(str(file), "there is no such file")
    if file.suffix == ".onnx":
        return inspect_graph(file, kind)
    if file.suffix == ".safetensors":
        return inspect_safetensors(file, architecture)
    if is_checkpoint(file):
        return inspect_checkpoint(file, read_checkpoint(file), architecture)
    raise WeightsRefused(str(file), "unknown format: give a .pt, .pth, .ckpt, .safetensors or .onnx file")


def write_weights(inspected: Inspected, destination: Path) -> None:
    """The weights of an inspected file as they are served. Raises OSError for what the disk refuses."""
    if inspected.is_served_as_it_is:
        shutil.copyfile(inspected.file, destination)
        return
    if inspected.tensors is None:
        write_gathered_onnx(str(inspected.file), inspected.file, destination)
        return
    with saving(destination):
        save_file({name: tensor.clone().contiguous() for name, tensor in inspected.tensors.items()}, destination)


def served_suffix(inspected: Inspected) -> str:
    """Of the file that its weights are served from."""
    return inspected.file.suffix if inspected.tensors is None else ".safetensors"
