"""Reads trainers' files in a separate process with limits: for `coserve experts import` and `coserve experts add`.

Guarantees: no code of the file runs. A file that exceeds the limits of memory or time is refused in one line. This
process receives a .safetensors file and a short report, nothing else of the source.
"""

from __future__ import annotations

import math
import signal
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.checkpoints.archive import WRITTEN_ALWAYS_BYTES, WRITTEN_MAXIMUM
from experts.checkpoints.conversion import convert, convert_state, read_apart
from experts.checkpoints.facts import CheckpointWeights, ConvertedCheckpoint, Facts
from experts.children.bounded import BoundedProcess, BoundedWork, ResourceLimits
from experts.errors import WeightsMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LIMIT_S_PER_GB = 30
MEMORY_BYTES = 2_000_000_000  # beyond the size of the mapped file
TOO_LARGE = f"takes over {MEMORY_BYTES / 1e9:.0f} GB of memory to read: no weights do"


def read_checkpoint(path: Path) -> CheckpointWeights:
    """Weights of a file of torch.save, with its facts. Tensors are read from disk on first use.

    Raises WeightsMissing, WeightsCorrupt, WeightsRefused, LoadError.
    """
    from safetensors.torch import load_file  # imports torch, which convert_checkpoint does without

    with tempfile.TemporaryDirectory(prefix="coserve-checkpoint-") as folder:
        weights = Path(folder) / "weights.safetensors"
        converted = convert_checkpoint(path, weights)
        return CheckpointWeights(converted.where, converted.facts, converted.remarks, load_file(weights))


def convert_checkpoint(source: Path, destination: Path) -> ConvertedCheckpoint:
    """Write a checkpoint's weights as a .safetensors file; an error may leave a part of the file.

    Raises WeightsMissing, WeightsCorrupt, WeightsRefused, LoadError.
    """
    if not source.is_file():
        raise WeightsMissing(str(source), "there is no such file")
    (values,) = _read_apart(source, convert, {source: destination})
    facts: dict[str, Any] = values["facts"]
    listed = {key: tuple(facts[key]) for key in ("labels", "size") if facts[key] is not None}
    return ConvertedCheckpoint(values["where"], Facts(**{**facts, **listed}), tuple(values["remarks"]))


def convert_states(source: Path, files: Sequence[Path], folder: Path) -> None:
    """Write the training state of each file to ``folder`` (see ``training_states``). ``source``: named in errors.

    Raises WeightsCorrupt, WeightsRefused, LoadError, with the name of the file.
    """
    _read_apart(source, convert_state, {file: folder / f"{file.name}.safetensors" for file in files})


def _read_apart(source: Path, convert: Callable[[Path, Path], object], destinations: Mapping[Path, Path]) -> list[Any]:
    """Results of each file's conversion, up to the first error."""
    sizes = [file.stat().st_size for file in destinations]
    limit_s = LIMIT_S_PER_GB * max(1, math.ceil(sum(sizes) / 1e9))
    written_bytes = WRITTEN_MAXIMUM * max(sizes) + 2 * WRITTEN_ALWAYS_BYTES
    limits = ResourceLimits(MEMORY_BYTES + max(sizes), written_bytes, limit_s, limit_s)

    def too_long(code: int) -> str:
        if code == -signal.SIGALRM:
            return f"reading it took over {limit_s} s: no weights do"
        return f"the process that read it was ended ({code}): no weights do that"

    with closing(BoundedProcess({"OPENBLAS_NUM_THREADS": "1"}, is_bare=True)) as process:
        return [
            process.result(
                BoundedWork(
                    partial(read_apart, convert, file.resolve(), destination.resolve()), limits, TOO_LARGE, too_long
                ),
                str(source),
                "" if file == source else f"{file.name}: ",
            )
            for file, destination in destinations.items()
        ]
