"""Eight bits as a form to pack in: only for experts that are calibrated as they are, and switched by their bytes."""

import os
from dataclasses import replace

import pytest
import torch

from agent.runtime.executor import judge
from experts.backends import backend_for, observed_ranges
from experts.calibrations import CalibrationFolder, Range, read_calibration
from experts.errors import WeightsMismatch
from experts.expert import Precision
from experts.packed.packing import pack_line
from tests.experts.conftest import bound, calibrated, packed_in
from tests.forms import needs

FORM = Precision.ONEDNN_INT8
ARCHITECTURE = "resnet18"
SIZE = 64  # of which every convolution sees more than a pixel

pytestmark = needs(Precision.ONEDNN_INT8)


@pytest.fixture
def expert(files):
    return files.classifier("cls/x", ARCHITECTURE, seed=3, size=SIZE)


@pytest.fixture
def folder(store):
    return CalibrationFolder.beside(store.directory)


def observed(expert, image):
    images = (image, image[::-1].copy(), 255 - image)
    return read_calibration(calibrated(expert, FORM, expert.weights.parent / "calibrations", *images).calibration)


def refusal(store, expert):
    """Why an expert cannot be packed in eight bits; what else it lies packed in stays."""
    report = pack_line([expert], lambda _: {FORM, Precision.FP32}, store)
    assert report.packed[expert.id].keys() == {Precision.FP32}
    error = report.failed[expert.id]
    assert isinstance(error, WeightsMismatch)
    return error.message


def test_partially_calibrated_expert_is_refused_with_the_remedy(expert, files, store, folder, image):
    told = "no form of eight bits: it is not calibrated: `coserve profile LINE.yaml --samples FOLDER` calibrates it"
    assert refusal(store, expert) == told
    with pytest.raises(WeightsMismatch, match="no form of eight bits before it is calibrated: `coserve profile"):
        backend_for(expert.architecture).pack(expert, FORM)
    found = observed(expert, image)
    ((form, ranges),) = found.ranges.items()
    lacking = {name: each for name, each in ranges.items() if "layer1" not in name}
    folder.write(expert.id, replace(found, ranges={form: lacking}))
    assert "its calibration is of another architecture or version: `coserve profile" in refusal(store, expert)
    with pytest.raises(WeightsMismatch, match="onnx has no form of eight bits"):
        observed_ranges(files.onnx("cls/other"), FORM, [torch.zeros(1, 3, 32, 32)])


def test_changed_calibration_packs_again_and_an_equal_one_does_not(expert, store, folder, image):
    found = observed(expert, image)
    folder.write(expert.id, found)
    first = packed_in(store, [expert], FORM, Precision.FP32)[expert.id]
    written = store.segment_path(first[FORM].own.sha256).stat().st_mtime_ns
    folder.write(expert.id, found)
    os.utime(expert.weights, ns=(1, 1))
    assert packed_in(store, [expert], FORM, Precision.FP32)[expert.id] == first
    assert store.segment_path(first[FORM].own.sha256).stat().st_mtime_ns == written
    ((form, ranges),) = found.ranges.items()
    (name, *_) = ranges
    other = dict(ranges) | {name: replace(ranges[name], source=Range(-9.0, 9.0))}
    folder.write(expert.id, replace(found, ranges={form: other}))
    second = packed_in(store, [expert], FORM, Precision.FP32)[expert.id]
    assert second[Precision.FP32] == first[Precision.FP32]
    assert second[FORM].own.sha256 != first[FORM].own.sha256
    assert second[FORM].layout == first[FORM].layout
    assert not store.segment_path(first[FORM].own.sha256).exists()


def test_detector_is_calibrated_and_packed_like_a_classifier(files, store, folder, make_slot, image):
    expert = files.detector("det/x", "yolov5n")
    folder.write(expert.id, observed(expert, image))
    packed = packed_in(store, [expert], FORM, Precision.FP32)[expert.id]
    sizes = {form: sum(segment.size_bytes for segment in each.segments) for form, each in packed.items()}
    assert sizes[FORM] < 0.35 * sizes[Precision.FP32]
    (found,), (expected,) = (make_slot(expert, packed[form], store).infer(expert, image) for form in packed)
    assert found.boxes
    assert expected.boxes


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_before_quantisation_gives_unknown(expert, folder, store, image, wrong):
    """No level tells it: it became 0 or 255, and the expert sure of something."""
    folder.write(expert.id, observed(expert, image))
    expert = replace(expert, calibration=folder.path(expert.id))
    good = backend_for(ARCHITECTURE).prepare(expert, image)
    bad = replace(good, tensor=good.tensor.clone().index_fill_(1, torch.tensor([0]), wrong))
    for form in (Precision.FP32, FORM):
        answers = judge(bound(expert, form), expert, [good, bad])
        assert [type(each).__name__ for each in answers] == ["Prediction", "Rejected"], form
