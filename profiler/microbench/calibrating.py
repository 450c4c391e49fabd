"""Calibrates experts for forms of eight bits: observes the ranges of their activations on sample images.

Guarantees: an expert is never calibrated on images that judge it, nor on images of one label, whose ranges do not cover
other labels. A calibration of the same weights on the same images stays.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from agent.runtime.images.preparation import prepare
from experts.backends import observed_ranges
from experts.calibrations import CalibrationFolder
from experts.errors import ExpertError, ImageError
from experts.images import decode_image
from experts.packed.calibrated import calibration_of, why_not_calibrated
from profiler.workload.samples import stamps_sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from experts.expert import Expert, Precision
    from profiler.workload.samples import LineSamples, Sample

LABELS_LEAST = 2
BATCH = 4  # images at a time; the ranges do not depend on it


class Calibrating:
    """Calibrations of one profiling run. ``packed``: the folder of packed weights, beside which they are stored."""

    def __init__(self, samples: LineSamples, packed: Path, progress: Callable[[str, int, int], None]) -> None:
        self._samples = samples
        self._packed = packed
        self._progress = progress
        self._folder = CalibrationFolder.beside(packed)
        self._reasons: dict[tuple[str, Precision], str | None] = {}

    def why_not(self, expert: Expert, form: Precision) -> str | None:
        """Reason why these samples cannot judge a calibrated form of the expert; the first call calibrates it."""
        if (expert.id, form) not in self._reasons:
            try:
                self._reasons[expert.id, form] = self._calibrated(expert, form)
            except (ExpertError, ImageError) as error:
                self._reasons[expert.id, form] = error.message
        return self._reasons[expert.id, form]

    def has_form(self, expert: Expert, form: Precision) -> bool:
        """True where an agent runs the expert in the form, calibrated on these samples or on earlier ones."""
        if self.why_not(expert, form) is None:
            return True
        try:
            return why_not_calibrated(expert, form, self._packed) is None
        except ExpertError:  # missing weights, which packing reports
            return False

    def _calibrated(self, expert: Expert, form: Precision) -> str | None:
        images = self._samples.calibrating.get(expert.id, ())
        there = self._folder.read(expert.id)
        labels = _labels(images)
        lacking = why_not_calibrated(expert, form, self._packed)
        if len(labels) < LABELS_LEAST:
            every = self._samples.of(expert.id)
            return _too_few(_labels(every)) if every or lacking else None
        digest = stamps_sha256(images)
        if there is not None and there.samples_sha256 == digest and lacking is None:
            return None
        decoded = (decode_image(each.path, str(each.path), each.max_pixels) for each in images)
        prepared = (prepare(expert, image).tensor for image in decoded)
        batches = (torch.stack([first, *islice(prepared, BATCH - 1)]) for first in prepared)
        found = calibration_of(expert, digest, len(images), labels, {form: observed_ranges(expert, form, batches)})
        if there is not None and replace(there, ranges=found.ranges) == found:  # of other forms of the same expert
            found = replace(found, ranges={**there.ranges, **found.ranges})
        self._folder.write(expert.id, found)
        asked = self._samples.calibrating.keys() & {*(name for name, _ in self._reasons), expert.id}
        self._progress("calibrate", len(asked), len(self._samples.calibrating))
        return None


def _labels(images: Sequence[Sample]) -> tuple[str, ...]:
    return tuple(sorted({sample.label or sample.folder for sample in images}))


def _too_few(labels: Sequence[str]) -> str:
    if not labels:
        return "there are no sample images to calibrate it on: give --samples FOLDER"
    if len(labels) < LABELS_LEAST:
        return f"its sample images show one label only ({labels[0]}): give --samples FOLDER with good and bad parts"
    return (
        "it takes two sample images of each of two labels at least, of which one calibrates and one judges: give "
        "--samples FOLDER with more"
    )
