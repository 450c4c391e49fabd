"""Calibrations: ranges of an expert's values on images of the line, and the shift of its outputs by rounding.

An eight-bit form needs them. Each expert has one JSON file beside the packed weights. Guarantees: a power cut leaves
the old file or the new one. A file of another format, or an invalid one, counts as absent.
``experts.packed.calibrated`` checks whether a calibration belongs to the expert's current weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping  # noqa: TC003  pydantic reads it
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from experts.errors import WeightsMismatch
from experts.filesystem import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Set
    from pathlib import Path

    from experts.expert import Expert

FORMAT = 3  # version of content and method; files of another version count as absent
HOW = "`coserve profile LINE.yaml --samples FOLDER` calibrates it"


@dataclass(frozen=True, slots=True)
class Range:
    """Least and greatest value. Raises ValueError for NaN and infinity."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"values from {self.low} to {self.high} have no levels")

    @classmethod
    def around(cls, ranges: Iterable[Range]) -> Range:
        found = list(ranges)
        return cls(min(each.low for each in found), max(each.high for each in found))


@dataclass(frozen=True, slots=True)
class CallRanges:
    """Ranges of a layer's inputs and outputs. ``summand`` None: the layer adds nothing.

    ``shifts``: shift of each output channel's mean by rounding, before the activation; empty: not measured.
    Raises ValueError for NaN and infinity.
    """

    source: Range
    answer: Range
    summand: Range | None = None
    shifts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.shifts)):
            raise ValueError("a shift of outputs is NaN or infinite")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Observed ranges. ``ranges``: by form, then by layer or value. ``labels``: the sample images' labels.

    ``weights_sha256``, ``stamp``: hash and file stamp of the weights (experts.packed.sources). ``input``: preprocessing
    of the sample images (``InputSpec.text``).
    """

    weights_sha256: str
    stamp: str
    input: str
    samples_sha256: str
    images: int
    labels: tuple[str, ...]
    ranges: Mapping[str, Mapping[str, CallRanges]]


_CALIBRATION = TypeAdapter(Calibration)


def path_of(directory: Path, expert: str, suffix: str) -> Path:
    """File of an expert in a folder. Raises ValueError for an invalid id."""
    *above, name = expert.split("/")
    if any(part in {"", ".", ".."} or "\0" in part for part in (*above, name)):
        raise ValueError(f"{expert!r} cannot be an expert's id: it is not kind/name")
    return directory.joinpath(*above, name + suffix)


class CalibrationFolder:
    """The calibrations of one line, by expert."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def beside(cls, packed: Path) -> CalibrationFolder:
        return cls(packed / "calibrations")

    def path(self, expert: str) -> Path:
        return path_of(self.directory, expert, ".json")

    def write(self, expert: str, calibration: Calibration) -> None:
        """Raises OSError."""
        path = self.path(expert)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, has_rivals=True) as file:
            file.write(json.dumps({"format": FORMAT, **asdict(calibration)}).encode())

    def copy(self, expert: str, to: CalibrationFolder) -> None:
        if (found := self.read(expert)) is not None:
            to.write(expert, found)

    def read(self, expert: str) -> Calibration | None:
        return read_calibration(self.path(expert))


def read_calibration(path: Path) -> Calibration | None:
    """Calibration of a file; None if absent or invalid."""
    try:
        content = path.read_bytes()
        return _CALIBRATION.validate_json(content) if json.loads(content)["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def required_ranges(expert: Expert, form: str, calls: Set[str]) -> Mapping[str, CallRanges]:
    """Ranges of a form. Raises WeightsMismatch without a calibration, or if some of ``calls`` lack ranges."""
    found = None if expert.calibration is None else read_calibration(expert.calibration)
    if found is None or form not in found.ranges:
        raise WeightsMismatch(expert.id, f"it has no form of eight bits before it is calibrated: {HOW}")
    if not calls <= found.ranges[form].keys():
        raise WeightsMismatch(expert.id, f"its calibration is of another architecture or version: {HOW} again")
    return found.ranges[form]


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes; empty where there is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
