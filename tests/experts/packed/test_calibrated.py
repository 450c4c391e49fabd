"""Whether an expert is calibrated as it is: by the bytes of its weights, which are read only where they may differ."""

import os
from dataclasses import replace

import pytest

from experts.backends.forms import form_of
from experts.backends.onednn import operators
from experts.backends.onednn.operators import NARROW, WIDE
from experts.calibrations import CalibrationFolder, CallRanges, Range
from experts.errors import LoadError, WeightsMissing
from experts.packed.calibrated import calibration_of, why_not_calibrated
from tests.forms import needs

FORM = "onednn-int8"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "packed"


def calibrate(expert, folder, **changes):
    ranges = {form_of(FORM).name_here: {"conv1.weight": CallRanges(Range(-2.1, 2.6), Range(0.0, 7.25))}}
    found = replace(calibration_of(expert, "cd" * 32, 16, ("bad", "ok"), lambda: ranges), **changes)
    CalibrationFolder.beside(folder).write(expert.id, found)


def test_calibration_of_other_weights_is_reported(files, folder):
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    files.fake("cls/x", weight_bytes=20_000)
    told = "its calibration is of other weights than it has now: `coserve profile LINE.yaml --samples FOLDER`"
    assert why_not_calibrated(expert, FORM, folder).startswith(told)


def test_calibration_of_another_input_is_reported(files, folder):
    """A corrected normalisation: the ranges were observed on other numbers."""
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    corrected = replace(expert, input=replace(expert.pixels, normalize="unit"))
    told = "its calibration is of another input than it has now: `coserve profile LINE.yaml --samples FOLDER`"
    assert why_not_calibrated(corrected, FORM, folder).startswith(told)


@needs(FORM)
def test_calibration_for_another_greatest_weight_does_not_count(files, folder, monkeypatch):
    """Rounding to fewer bits shifts other answers."""
    expert = files.fake("cls/x")
    calibrate(expert, folder)
    other = {WIDE: NARROW, NARROW: WIDE}[operators.weight_highest()]
    monkeypatch.setattr(operators, "weight_highest", lambda: other)
    assert why_not_calibrated(expert, FORM, folder).startswith("it is not calibrated: `coserve profile")


def test_calibration_holds_for_its_weights_which_are_hashed_only_if_touched(files, folder):
    expert = files.fake("cls/x")
    told = "it is not calibrated: `coserve profile LINE.yaml --samples FOLDER` calibrates it"
    assert why_not_calibrated(expert, FORM, folder) == told
    calibrate(expert, folder, weights_sha256="0" * 64)
    assert why_not_calibrated(expert, FORM, folder) is None
    calibrate(expert, folder)
    os.utime(expert.weights, ns=(1, 1))
    assert why_not_calibrated(expert, FORM, folder) is None
    expert.weights.unlink()
    with pytest.raises(WeightsMissing):
        why_not_calibrated(expert, FORM, folder)


def test_weights_overwritten_during_observation_get_no_calibration(files):
    expert = files.fake("cls/x")

    def observe():
        files.fake("cls/x", weight_bytes=20_000)
        return {}

    with pytest.raises(LoadError, match="was overwritten meanwhile, so nothing was written"):
        calibration_of(expert, "cd" * 32, 16, ("bad", "ok"), observe)
