"""Calibrates experts of a line: observes the ranges of their values on sample images, for forms of eight bits.

Guarantees: no expert is calibrated on an image that it is judged by, nor on images that show one label only, whose
ranges say nothing of what the others look like; why one is not is told, once. A calibration of the same weights on the
same images is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agent.runtime.preparation import prepare
from experts.backends import observed_ranges
from experts.calibrations import CalibrationFolder
from experts.errors import ExpertError, ImageError
from experts.images import decode_image
from experts.packed.calibrated import calibration_of, why_not_calibrated
from profiler.workload.samples import stamps_sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from experts.expert import Expert
    from profiler.workload.samples import LineSamples, Sample

LABELS_LEAST = 2
BATCH = 4  # images at a time; how many does not matter to what is observed


class Calibrating:
    """The calibrations of one profiling run. ``packed``: the folder of packed weights that they lie beside."""

    def __init__(self, samples: LineSamples, packed: Path, progress: Callable[[str, int, int], None]) -> None:
        self._samples = samples
        self._packed = packed
        self._progress = progress
        self._folder = CalibrationFolder.beside(packed)
        self._reasons: dict[str, str | None] = {}

    def why_not(self, expert: Expert) -> str | None:
        """Why an expert has no eight-bit form that these samples can judge; it is calibrated now if it was not yet."""
        if expert.id not in self._reasons:
            try:
                self._reasons[expert.id] = self._calibrated(expert)
            except (ExpertError, ImageError) as error:
                self._reasons[expert.id] = error.message
        return self._reasons[expert.id]

    def has_form(self, expert: Expert) -> bool:
        """Whether an agent runs it in eight bits: it is calibrated on these samples, or was on others."""
        if self.why_not(expert) is None:
            return True
        try:
            return why_not_calibrated(expert, self._packed) is None
        except ExpertError:  # weights that are not there: packing tells
            return False

    def _calibrated(self, expert: Expert) -> str | None:
        images = self._samples.calibrating.get(expert.id, ())
        there = self._folder.read(expert.id)
        labels = _labels(images)
        if len(labels) < LABELS_LEAST:
            every = self._samples.of(expert.id)
            return _too_few(_labels(every)) if every or why_not_calibrated(expert, self._packed) else None
        digest = stamps_sha256(images)
        if there is not None and there.samples_sha256 == digest and why_not_calibrated(expert, self._packed) is None:
            return None
        ranges = observed_ranges(expert, _batches(expert, images))
        found = calibration_of(expert, digest, len(images), labels, ranges)
        self._folder.write(expert.id, found)
        asked = self._samples.calibrating.keys() & {*self._reasons, expert.id}
        self._progress("calibrate", len(asked), len(self._samples.calibrating))
        return None


def _labels(images: Sequence[Sample]) -> tuple[str, ...]:
    return tuple(sorted({sample.label or sample.folder for sample in images}))


def _too_few(labels: Sequence[str]) -> str:
    """``labels``: of all its sample images."""
    if not labels:
        return "there are no sample images to calibrate it on: give --samples FOLDER"
    if len(labels) < LABELS_LEAST:
        return f"its sample images show one label only ({labels[0]}): give --samples FOLDER with good and bad parts"
    return (
        "it takes two sample images of each of two labels at least, of which one calibrates and one judges: give "
        "--samples FOLDER with more"
    )


def _batches(expert: Expert, images: Sequence[Sample]) -> Iterator[Tensor]:
    """Raises ImageError for one that cannot be read any more."""
    for start in range(0, len(images), BATCH):
        few = images[start : start + BATCH]
        decoded = (decode_image(sample.path, str(sample.path), sample.max_pixels) for sample in few)
        yield torch.stack([prepare(expert, each).tensor for each in decoded])
