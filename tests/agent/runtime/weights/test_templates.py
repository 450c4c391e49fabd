"""Templates: once they are made, every skeleton of the line is a copy, and nothing is constructed for it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import onnxruntime
import pytest
from torchvision import models

from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.threads import use_threads
from agent.runtime.weights.slots import SkeletonShelf
from agent.runtime.weights.templates import make_templates
from experts.backends import detector
from experts.expert import Precision
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from tests.experts.conftest import ExpertFiles

THREADS = 1


@pytest.fixture
def experts(tmp_path):
    files = ExpertFiles(tmp_path)
    return {
        "classifier": files.classifier("cls/torch", "squeezenet1_1"), "detector": files.detector("det/torch"),
        "onnx": files.onnx("cls/onnx"), "fake": files.fake("cls/fake"),
    }  # fmt: skip


@pytest.fixture
def segments(tmp_path):
    with closing(SegmentStore(tmp_path / "packed")) as segments:
        yield segments


def copies_of(experts, segments, in_all_forms=()):
    all_forms = {Precision.FP32, Precision.ONNXRUNTIME, Precision.ONEDNN_FP32}
    forms = {each.id: {Precision.FP32} for each in experts} | {each.id: all_forms for each in in_all_forms}
    report = pack_line(experts, forms, segments)
    named = {each.id: each for each in experts}
    return [
        ExpertCopy(f"{name}@{precision}", named[name], packed)
        for name, forms in report.packed.items()
        for precision, packed in forms.items()
    ]


def refuse(*_, **__):
    raise AssertionError("constructed after all templates were made")


@pytest.mark.slow
def test_no_skeleton_is_constructed_once_they_are_made(experts, segments, monkeypatch):
    copies = copies_of(experts.values(), segments, in_all_forms=(experts["classifier"],))
    steps = []
    templates = make_templates({"cpu": copies}, segments, THREADS, lambda *step: steps.append(step))
    assert (templates.failed, steps) == ({}, [(number, len(copies)) for number in range(1, len(copies) + 1)])
    monkeypatch.setattr(models, "get_model", refuse)
    monkeypatch.setattr(detector, "DetectionModel", refuse)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    shelf = SkeletonShelf(segments)
    with ThreadPoolExecutor(1, "transfer", use_threads, (THREADS,)) as transfer:
        for copy in copies * 2:
            assert transfer.submit(shelf.take, copy, "cpu").result() is not None
    assert len(templates.held) == len(copies)


def test_an_expert_that_runs_on_some_processor_has_not_failed(experts, segments, caplog):
    copies = copies_of([experts["onnx"], experts["fake"]], segments)
    templates = make_templates({"mps": copies, "cpu": copies}, segments, THREADS, lambda *_: None)
    assert templates.failed == {}
    assert "template_failed copy=cls/onnx@fp32 device=mps" in caplog.text
    templates = make_templates({"mps": copies}, segments, THREADS, lambda *_: None)
    assert templates.failed.keys() == {"cls/onnx"}
    assert "no provider" in templates.failed["cls/onnx"]
