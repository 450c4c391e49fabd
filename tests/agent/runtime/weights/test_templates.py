"""Templates: once they are made, every skeleton of the line is a copy, and nothing is constructed for it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torchvision import models

from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.threads import use_threads
from agent.runtime.weights.slots import SkeletonShelf
from agent.runtime.weights.templates import make_templates
from experts.backends import classifier, detector
from experts.expert import Expert, InputSpec, Precision
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore

LABELS = ("ok", "bad")
SIZE = InputSpec(64, 64)
THREADS = 1


def expert(folder, name, architecture, suffix):
    return Expert(name, architecture, folder / f"{name.replace('/', '-')}{suffix}", LABELS, SIZE)


def write_graph(path):
    weight = numpy_helper.from_array(np.ones((2, 3), dtype=np.float32), "weight")
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight"], ["logits"], transB=1),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("image", ["n", 3, 64, 64]), ("logits", ["n", 2]))
    ]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], [weight])
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def experts(tmp_path):
    """One of each backend."""
    found = {
        "classifier": expert(tmp_path, "cls/torch", "squeezenet1_1", ".safetensors"),
        "detector": expert(tmp_path, "det/torch", "yolov5n", ".safetensors"),
        "onnx": expert(tmp_path, "cls/onnx", "onnx", ".onnx"),
        "fake": expert(tmp_path, "cls/fake", "fake", ".yaml"),
    }
    classifier.write_random_weights(found["classifier"].weights, "squeezenet1_1", 2, seed=0)
    save_file(detector.build_trainable("yolov5n", 2).state_dict(), found["detector"].weights)
    write_graph(found["onnx"].weights)
    found["fake"].weights.write_text("weight_bytes: 1000\n")
    return found


@pytest.fixture
def segments(tmp_path):
    with closing(SegmentStore(tmp_path / "packed")) as segments:
        yield segments


def copies_of(experts, segments, in_all_forms=()):
    all_forms = {Precision.FP32, Precision.ONNXRUNTIME, Precision.ONEDNN_FP32}
    forms = {each.id: {Precision.FP32} for each in experts} | {each.id: all_forms for each in in_all_forms}
    report = pack_line(experts, forms, segments)
    assert report.failed == {}
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
    assert templates.failed == {}
    assert steps == [(number, len(copies)) for number in range(1, len(copies) + 1)]
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
