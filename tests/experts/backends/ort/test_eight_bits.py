"""ONNX Runtime's eight bits: fused as its own tools would have them, by calibration, in eight bits or in seven."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from experts.backends import backend_for
from experts.backends.forms import form_of
from experts.backends.onednn import operators
from experts.backends.onednn.operators import NARROW, WIDE
from experts.backends.ort import eight_bits
from experts.backends.ort.eight_bits import quantised_graph, sums_exactly
from experts.backends.ort.export import exported
from experts.calibrations import CalibrationFolder, read_calibration
from experts.errors import WeightsMismatch
from experts.expert import Precision
from profiler.microbench.agreement import candidate_precisions
from tests.experts import conftest
from tests.experts.conftest import answers, tell_apart, trained_looking
from tests.forms import needs

FORM = Precision.ONNXRUNTIME_INT8
LABELS = ("ok", "bad")
SIZE = 64
SHOWN = {"ok": 230, "bad": 25}

pytestmark = needs(FORM)


def picture(label, number=0):
    return np.full((40, 40, 3), SHOWN[label] + number, dtype=np.uint8)


@pytest.fixture
def expert(files):
    """A classifier whose last layer is sure of what is bright and what is dark."""
    module = trained_looking(files.build("squeezenet1_1", len(LABELS)), seed=1)
    described = files.expert("cls/x", "squeezenet1_1", files.folder, LABELS, SIZE)
    tell_apart(module, prepared(described), logit=10.0)
    return files.torch_module("cls/x", module, "squeezenet1_1", LABELS, SIZE)


def prepared(expert):
    return torch.stack([backend_for(expert.architecture).prepare(expert, picture(label)).tensor for label in LABELS])


@pytest.fixture
def calibrated(expert, tmp_path):
    return conftest.calibrated(expert, FORM, tmp_path / "calibrations", *map(picture, LABELS))


def decided(expert, precision):
    return answers(expert, *(picture(label, 3) for label in LABELS), precision=precision)


@pytest.mark.parametrize("highest", [WIDE, NARROW])
def test_eight_bit_classifier_decides_as_in_fp32(calibrated, monkeypatch, highest):
    if not sums_exactly(highest):
        pytest.skip(f"this CPU's sums of weights up to {highest} saturate")
    monkeypatch.setattr(eight_bits, "weight_highest", lambda: highest)
    expected, found = decided(calibrated, Precision.FP32), decided(calibrated, FORM)
    assert [each.label for each in found] == [each.label for each in expected] == list(LABELS)
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=0.02)


def test_weights_as_wide_as_this_cpu_sums_exactly_decide_as_in_fp32(calibrated):
    assert sums_exactly(eight_bits.weight_highest())
    assert [each.label for each in decided(calibrated, FORM)] == list(LABELS)
    packed = backend_for(calibrated.architecture).pack(calibrated, FORM)
    levels = [tensor for tensor in packed.tensors.values() if tensor.dtype == torch.int8]
    assert max(int(each.max()) for each in levels) == eight_bits.weight_highest()


def test_all_convolutions_but_the_last_run_in_eight_bits(calibrated):
    packed = backend_for(calibrated.architecture).pack(calibrated, FORM)
    operators = Counter(node.op_type for node in onnx.load_from_string(packed.program).graph.node)
    assert operators["QLinearConv"] == 25
    assert operators["Conv"] == operators["DequantizeLinear"] == 1
    levels = sum(tensor.numel() for tensor in packed.tensors.values() if tensor.dtype == torch.int8)
    assert levels > 0.9 * sum(tensor.numel() for tensor in packed.tensors.values())


def test_calibration_that_lacks_a_value_is_refused(calibrated, tmp_path):
    found, folder = read_calibration(calibrated.calibration), CalibrationFolder(tmp_path / "calibrations")
    kept = {name: each for name, each in found.ranges[FORM].items() if name != "images"}
    folder.write(calibrated.id, replace(found, ranges={FORM: kept}))
    with pytest.raises(WeightsMismatch, match="of another architecture or version: `coserve profile"):
        backend_for(calibrated.architecture).pack(calibrated, FORM)


def test_module_without_convolutions_is_refused():
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4)).to("meta")
    with pytest.raises(ValueError, match="no convolution that ONNX Runtime runs in eight bits"):
        quantised_graph(exported(module, (8, 8), ("answer",)))


def test_weights_are_as_wide_as_the_cpu_sums_exactly(monkeypatch):
    assert sums_exactly(NARROW)
    monkeypatch.setattr(eight_bits, "sums_exactly", lambda highest: highest == NARROW)
    assert eight_bits.weight_highest.__wrapped__() == NARROW
    monkeypatch.setattr(eight_bits, "sums_exactly", lambda highest: False)
    monkeypatch.setattr(eight_bits, "weight_highest", eight_bits.weight_highest.__wrapped__)
    assert form_of(FORM).why_absent() == "ONNX Runtime's sums of eight bits are wrong"


@pytest.mark.parametrize(
    ("fault", "highest", "is_tried"), [(None, WIDE, False), (None, NARROW, True), ("sums are off", NARROW, True)]
)
def test_onnxruntime_int8_is_a_candidate_only_without_eight_bits_in_onednn(monkeypatch, fault, highest, is_tried):
    monkeypatch.setattr(operators, "why_absent", lambda dtype: fault)
    monkeypatch.setattr(operators, "weight_highest", lambda: highest)
    candidates = candidate_precisions("resnet18", "cpu")
    assert (Precision.ONEDNN_INT8 in candidates, FORM in candidates) == (fault is None, is_tried)
