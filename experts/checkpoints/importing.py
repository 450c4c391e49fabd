"""Brings a weights file into a format that is safe to read: `coserve experts import`.

A .pt, .pth or .ckpt is a pickle, and unpickling can run its author's code. A separate, limited process reads the file
as data (experts.checkpoints.reading), and writes the weights as .safetensors.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.checkpoints.reading import convert_checkpoint
from experts.errors import LoadError, WeightsMissing, WeightsRefused
from experts.filesystem import whole_file
from experts.labels import folded

if TYPE_CHECKING:
    from pathlib import Path

PICKLES = (".pt", ".pth", ".ckpt", ".pth.tar")  # timm's and torchvision's example scripts write the last; it is no tar
FORMATS = frozenset({".safetensors", ".onnx"})


@dataclass(frozen=True, slots=True)
class ImportedWeights:
    """Weights that were written. ``remarks``: for the user."""

    sha256: str
    remarks: tuple[str, ...]


def is_checkpoint(file: Path) -> bool:
    return file.name.endswith(PICKLES)


def bring(source: Path, destination: Path) -> ImportedWeights:
    """Copy weights to ``destination``, as .safetensors or .onnx.

    ``source``: .safetensors and .onnx are copied and checked; of a .pt, .pth or .ckpt the weights are taken, wherever
    its trainer put them. Raises WeightsMissing, WeightsCorrupt, LoadError, and WeightsRefused for a file without
    weights or with harmful calls. An error leaves ``destination`` unchanged.
    """
    wanted = ".safetensors" if is_checkpoint(source) else source.suffix
    if wanted not in FORMATS:
        raise WeightsRefused(str(source), "unknown format: give a .safetensors, .onnx, .pt, .pth or .ckpt file")
    if destination.suffix != wanted:
        raise WeightsRefused(str(source), f"its import is a {wanted} file: name the destination so, not {destination}")
    if not source.is_file():
        raise WeightsMissing(str(source), "there is no such file")
    candidate = destination.with_name(f".{destination.stem}.import{wanted}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        remarks: tuple[str, ...] = ()
        if is_checkpoint(source):
            remarks = convert_checkpoint(source, candidate).remarks
        else:
            shutil.copyfile(source, candidate)
        from experts.backends.weight_files import check_weights  # imports torch

        check_weights(str(source), candidate)
        remarks += _other_order(candidate, destination)
        with candidate.open("rb") as file, whole_file(destination, has_rivals=True) as final:
            shutil.copyfileobj(file, final)
        with destination.open("rb") as file:
            return ImportedWeights(hashlib.file_digest(file, "sha256").hexdigest(), remarks)
    except OSError as error:
        raise LoadError(str(source), f"cannot be imported: {error}") from error
    finally:
        if candidate.is_file():
            candidate.unlink()


def _other_order(candidate: Path, destination: Path) -> tuple[str, ...]:
    """A remark where the replaced file, and so the line, has the labels in another order."""
    from experts.backends.weight_files import read_labels

    before, now = read_labels(destination), read_labels(candidate)
    if before is None or now is None or folded(before) == folded(now):
        return ()
    return (
        f"its labels are {', '.join(now)}, and those of the file that it replaced were {', '.join(before)}: write "
        "`labels:` in the new order, or no line that names the old order serves it",
    )
