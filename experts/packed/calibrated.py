"""Validity of an expert's calibration: of its present weights and input.

Guarantees: a calibration of other weights, or of another input, never counts. Weights are hashed only where the file's
stamp has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends.forms import form_of
from experts.calibrations import HOW, Calibration, CalibrationFolder, read_calibration
from experts.packed.sources import sha256_of, stamp_of, unchanged_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from experts.calibrations import CallRanges
    from experts.expert import Expert


def calibration_of(
    expert: Expert,
    samples_sha256: str,
    images: int,
    labels: tuple[str, ...],
    observe: Callable[[], Mapping[str, Mapping[str, CallRanges]]],
) -> Calibration:
    """Raises LoadError, WeightsMissing, and as ``observe``; LoadError if the weights were overwritten meanwhile."""
    with unchanged_source(expert) as seen:
        ranges = observe()
    return Calibration(seen.sha256, seen.stamp, expert.pixels.text, samples_sha256, images, labels, ranges)


def why_not_calibrated(expert: Expert, form: str, packed: Path) -> str | None:
    """Reason why an expert has no calibrated form now. ``packed``: the folder of packed weights.

    Raises LoadError, WeightsMissing.
    """
    found = read_calibration(CalibrationFolder.beside(packed).path(expert.id))
    if found is None or form_of(form).name_here not in found.ranges:
        return f"it is not calibrated: {HOW}"
    if found.input != expert.pixels.text:
        return f"its calibration is of another input than it has now: {HOW} again"
    if stamp_of(expert) == found.stamp or sha256_of(expert) == found.weights_sha256:
        return None
    return f"its calibration is of other weights than it has now: {HOW} again"
