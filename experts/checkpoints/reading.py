"""Reads trainers' files in a separate process with limits: for `coserve experts import` and `coserve experts add`.

Guarantees: no code of the file runs. A file that exceeds the limits of memory or time is refused in one line. This
process receives a .safetensors file and a short report, nothing else of the source.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.checkpoints.facts import CheckpointWeights, ConvertedCheckpoint, Facts
from experts.errors import LoadError, WeightsCorrupt, WeightsMissing, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = Path(__file__).with_name("reading_process.py")
REFUSED, CORRUPT, FAILED = 3, 4, 5  # exit codes of the script
LIMIT_S_PER_GB = 30


def read_checkpoint(path: Path) -> CheckpointWeights:
    """Weights of a file of torch.save, with its facts. Tensors are read from disk on first use.

    Raises WeightsMissing, WeightsCorrupt, WeightsRefused, LoadError.
    """
    from safetensors.torch import load_file  # imports torch, which convert_checkpoint does without

    with tempfile.TemporaryDirectory(prefix="coserve-checkpoint-") as folder:
        weights = Path(folder) / "weights.safetensors"
        converted = convert_checkpoint(path, weights)
        return CheckpointWeights(converted.where, converted.facts, converted.said, load_file(weights))


def convert_checkpoint(source: Path, destination: Path) -> ConvertedCheckpoint:
    """Write a checkpoint's weights as a .safetensors file; an error may leave a part of the file.

    Raises WeightsMissing, WeightsCorrupt, WeightsRefused, LoadError.
    """
    if not source.is_file():
        raise WeightsMissing(str(source), "there is no such file")
    values: dict[str, Any] = json.loads(_read_apart(source, "weights", [source], [source, destination]))
    facts: dict[str, Any] = values["facts"]
    listed = {key: tuple(facts[key]) for key in ("labels", "size") if facts[key] is not None}
    return ConvertedCheckpoint(values["where"], Facts(**{**facts, **listed}), tuple(values["said"]))


def convert_states(source: Path, files: Sequence[Path], folder: Path) -> None:
    """Write the training state of each file to ``folder`` (see ``training_states``). ``source``: named in errors.

    Raises WeightsCorrupt, WeightsRefused, LoadError, with the name of the file.
    """
    _read_apart(source, "states", files, [folder, *files])


def _read_apart(source: Path, kind: str, files: Sequence[Path], paths: Sequence[Path]) -> bytes:
    limit_s = LIMIT_S_PER_GB * max(1, math.ceil(sum(file.stat().st_size for file in files) / 1e9))
    arguments = [kind, str(limit_s), *(str(path.resolve()) for path in paths)]
    try:
        ended = subprocess.run(
            [sys.executable, "-I", str(SCRIPT), *arguments],
            capture_output=True, timeout=limit_s, check=False, env={"OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise WeightsRefused(str(source), f"reading it took over {limit_s} s: no weights do") from error
    if ended.returncode == 0:
        return ended.stdout
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"the process that read it was ended ({ended.returncode}): no weights do that"
    kinds = {REFUSED: WeightsRefused, FAILED: LoadError}
    raise kinds.get(ended.returncode, WeightsCorrupt)(str(source), reason)
