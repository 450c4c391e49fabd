"""Graphs that mean harm, or go wrong: packing ends within bounds, and the next one is packed."""

import numpy as np
import pytest

from experts.backends.onnx import sandbox
from experts.backends.onnx.backend import OnnxBackend
from experts.errors import ExpertError, WeightsRefused
from experts.expert import Precision
from tests.experts.onnx_text import ending

BACKEND = OnnxBackend()


def turning_for_ever(expert):
    body = """(int64 turn, bool going, float carried) => (bool going_on, float carried_on) {
        going_on = Identity(going)
        carried_on = Sin(carried)
    }"""
    loop = f"logits = Loop<body = turning {body}>(turns, true, raw)"
    return ending(expert, loop, turns=np.array(2**62), true=np.array(True))


def filling_the_memory(expert):
    fill, most = "much = ConstantOfShape(extents)", "most = ReduceMax<keepdims=0>(much)"
    return ending(expert, fill, most, "logits = Add(raw, most)", extents=np.array([20_000_000_000]))


def test_endless_loop_in_a_graph_is_ended_and_the_next_graph_is_packed(files, monkeypatch):
    monkeypatch.setattr(sandbox, "LIMIT_S_PER_GB", 2)
    expert = turning_for_ever(files.onnx("cls/loop"))
    with pytest.raises(WeightsRefused, match="over 2 s of the processor or 6 GB of memory, and was ended"):
        BACKEND.pack(expert, Precision.FP32)
    assert BACKEND.pack(files.onnx("cls/good"), Precision.FP32).tensors


def test_tensor_larger_than_memory_fails_its_expert_only(files):
    with pytest.raises(ExpertError) as raised:
        BACKEND.pack(filling_the_memory(files.onnx("cls/bomb")), Precision.FP32)
    assert raised.value.expert == "cls/bomb"
    assert BACKEND.pack(files.onnx("cls/good"), Precision.FP32).tensors
