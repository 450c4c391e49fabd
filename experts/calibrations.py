"""Calibrations: the ranges of an expert's values on images of the line, and how far rounding to them moves its answers:
what its eight-bit form is made by.

One JSON file per expert, beside what is packed. Guarantees: it is written beside its place, synced and renamed, so that
a power cut leaves the old one or the new; one that cannot be understood, or is of another format, counts as absent.
Whether one is of the weights that an expert has now tells ``experts.packed.calibrated``.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from experts.filesystem import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT = 2  # of what a file holds and how it was found; one of another is not understood
HOW = "`coserve profile LINE.yaml --samples FOLDER` calibrates it"


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the greatest of some values. Raises ValueError where one of these is no number, or infinite."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"values from {self.low} to {self.high} have no levels")

    @classmethod
    def around(cls, ranges: Iterable[Range]) -> Range:
        """The least that holds all of these. Raises ValueError for none."""
        found = list(ranges)
        return cls(min(each.low for each in found), max(each.high for each in found))


@dataclass(frozen=True, slots=True)
class CallRanges:
    """What a layer read and answered with. ``summand`` None: nothing is added in it.

    ``shifts``: by how much rounding moves the mean of each output channel, before the activation; empty where that was
    not measured. Raises ValueError where one of these is no number, or infinite.
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
    """What was observed, and on what. ``ranges``: by the name of the layer's weight; ``labels``: shown by the images.

    ``weights_sha256``, ``stamp``: the weights' file, and how it lay on its drive (experts.packed.sources).
    ``input``: what the sample images were made into (``InputSpec.text``).
    """

    weights_sha256: str
    stamp: str
    input: str
    samples_sha256: str
    images: int
    labels: tuple[str, ...]
    ranges: Mapping[str, CallRanges]


class CalibrationFolder:
    """The calibrations of one line, by expert."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def beside(cls, packed: Path) -> CalibrationFolder:
        """The one of a folder of packed weights."""
        return cls(packed / "calibrations")

    def path(self, expert: str) -> Path:
        """Where an expert's lies. Raises ValueError for what is no expert's id."""
        parts = expert.split("/")
        if any(part in {"", ".", ".."} or "\0" in part for part in parts):
            raise ValueError(f"{expert!r} cannot be an expert's id: it is not kind/name")
        return self.directory.joinpath(*parts[:-1], f"{parts[-1]}.json")

    def write(self, expert: str, calibration: Calibration) -> None:
        """Raises OSError for what the disk refuses."""
        path = self.path(expert)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, has_rivals=True) as file:
            file.write(json.dumps({"format": FORMAT, **asdict(calibration)}).encode())

    def copy(self, expert: str, to: CalibrationFolder) -> None:
        """Have another folder hold the same of an expert, where there is one. Raises OSError as ``write``."""
        found = self.read(expert)
        if found is not None:
            to.write(expert, found)

    def read(self, expert: str) -> Calibration | None:
        """An expert's; None where there is none, or none that can be understood."""
        return read_calibration(self.path(expert))


def read_calibration(path: Path) -> Calibration | None:
    """A file's; None where there is none, or none that can be understood."""
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != FORMAT:
            return None
        found = {name: _call_ranges(each) for name, each in document["ranges"].items()}
        return Calibration(
            str(document["weights_sha256"]),
            str(document["stamp"]),
            str(document["input"]),
            str(document["samples_sha256"]),
            int(document["images"]),
            tuple(map(str, document["labels"])),
            found,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def digest_of(path: Path) -> str:
    """Of a file's bytes; empty where none is there."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _call_ranges(document: Mapping[str, Any]) -> CallRanges:
    """Raises TypeError, ValueError, KeyError, AttributeError, OverflowError for what is none."""
    summand = document["summand"]
    return CallRanges(
        _range(document["source"]),
        _range(document["answer"]),
        None if summand is None else _range(summand),
        tuple(map(float, document["shifts"])),
    )


def _range(document: Mapping[str, float]) -> Range:
    return Range(float(document["low"]), float(document["high"]))
