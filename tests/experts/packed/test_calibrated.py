"""Whether an expert is calibrated as it is: by the bytes of its weights, which are read only where they may differ."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from experts.calibrations import CalibrationFolder, CallRanges, Range
from experts.errors import WeightsMissing
from experts.packed.calibrated import calibration_of, why_not_calibrated

FORM = "onednn-int8"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "packed"


def calibrate(expert, folder, **changes):
    ranges = {FORM: {"conv1.weight": CallRanges(Range(-2.1, 2.6), Range(0.0, 7.25))}}
    found = replace(calibration_of(expert, "cd" * 32, 16, ("bad", "ok"), ranges), **changes)
    CalibrationFolder.beside(folder).write(expert.id, found)


def test_one_of_these_weights_holds(files, folder):
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    assert why_not_calibrated(expert, FORM, folder) is None


def test_none_is_told_with_what_to_do(files, folder):
    told = why_not_calibrated(files.fake("cls/x"), FORM, folder)
    assert told == "it is not calibrated: `coserve profile LINE.yaml --samples FOLDER` calibrates it"


def test_one_of_other_weights_is_told(files, folder):
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    files.fake("cls/x", weight_bytes=20_000)
    told = "its calibration is of other weights than it has now: `coserve profile LINE.yaml --samples FOLDER`"
    assert why_not_calibrated(expert, FORM, folder).startswith(told)


def test_one_of_another_input_is_told(files, folder):
    """A corrected normalisation: the ranges were observed on other numbers."""
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    corrected = replace(expert, input=replace(expert.pixels, normalize="unit"))
    told = "its calibration is of another input than it has now: `coserve profile LINE.yaml --samples FOLDER`"
    assert why_not_calibrated(corrected, FORM, folder).startswith(told)


def test_weights_that_were_only_touched_are_the_same(files, folder):
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    os.utime(expert.weights, ns=(1, 1))
    assert why_not_calibrated(expert, FORM, folder) is None


def test_weights_that_lie_as_they_did_are_not_hashed(files, folder):
    """A start with hundreds of experts looks at how their files lie."""
    expert = files.fake("cls/x")
    calibrate(expert, folder, weights_sha256="0" * 64)
    assert why_not_calibrated(expert, FORM, folder) is None


def test_of_weights_that_are_not_there_is_told(files, folder):
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    expert.weights.unlink()
    with pytest.raises(WeightsMissing):
        why_not_calibrated(expert, FORM, folder)
