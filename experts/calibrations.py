"""Calibrations: the ranges of an expert's values on images of the line, and by how much rounding moves its answers.

An expert's eight-bit form is made by them. One JSON file per expert, beside the packed weights. Guarantees: a power cut
leaves the old file or the new; a file of another format, or one that cannot be understood, counts as absent.
``experts.packed.calibrated`` tells whether a calibration is of the expert's present weights.
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

FORMAT = 3  # of what a file holds and how it was found; one of another is not understood
HOW = "`coserve profile LINE.yaml --samples FOLDER` calibrates it"


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the greatest of some values. Raises ValueError for NaN and infinity."""

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
    """Inputs and outputs of a layer. ``summand`` None: nothing is added in it.

    ``shifts``: by how much rounding moves the mean of each output channel, before the activation; empty: not measured.
    Raises ValueError for NaN and infinity.
    """

    source: Range
    answer: Range
    summand: Range | None = None
    shifts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.shifts)):
            raise ValueError("what answers are shifted by is no number")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Observed ranges. ``ranges``: by form, then by layer or value; ``labels``: shown by the images.

    ``weights_sha256``, ``stamp``: the weights' file, and how it lay on its drive (experts.packed.sources).
    ``input``: what the sample images were made into (``InputSpec.text``).
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
    """An expert's own file in a folder. Raises ValueError for what is no expert's id."""
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
        """Raises OSError for what the disk refuses."""
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
    """None where the file is absent or cannot be understood."""
    try:
        content = path.read_bytes()
        return _CALIBRATION.validate_json(content) if json.loads(content)["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def required_ranges(expert: Expert, form: str, calls: Set[str]) -> Mapping[str, CallRanges]:
    """A form's ranges. Raises WeightsMismatch where none was observed, or those of some ``calls`` are absent."""
    found = None if expert.calibration is None else read_calibration(expert.calibration)
    if found is None or form not in found.ranges:
        raise WeightsMismatch(expert.id, f"it has no form of eight bits before it is calibrated: {HOW}")
    if not calls <= found.ranges[form].keys():
        raise WeightsMismatch(expert.id, f"its calibration is of another architecture or version: {HOW} anew")
    return found.ranges[form]


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes; empty where there is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
