"""Graphs that mean harm, or go wrong: packing ends within bounds, and the next one is packed."""

import os
import signal
import subprocess

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from experts.backends.onnx import sandbox
from experts.backends.onnx.backend import OnnxBackend
from experts.errors import ExpertError, WeightsRefused
from experts.expert import Precision

BACKEND = OnnxBackend()


def with_nodes(expert, *nodes, **constants):
    """The same graph, with these behind its logits."""
    model = onnx.load_model(expert.weights)
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.save_model(model, expert.weights)
    return expert


def turning_for_ever(expert):
    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["going_on"]), helper.make_node("Sin", ["carried"], ["carried_on"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("going_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried_on", TensorProto.FLOAT, None),
        ],
    )
    loop = helper.make_node("Loop", ["turns", "true", "raw"], ["logits"], body=body)
    return with_nodes(expert, loop, turns=np.array(2**62), true=np.array(True))


def filling_the_memory(expert):
    fill = helper.make_node("ConstantOfShape", ["extents"], ["much"])
    most = helper.make_node("ReduceMax", ["much"], ["most"], keepdims=0)
    return with_nodes(
        expert, fill, most, helper.make_node("Add", ["raw", "most"], ["logits"]), extents=np.array([20_000_000_000])
    )


def test_a_loop_without_end_is_ended_and_the_next_graph_is_packed(files, monkeypatch):
    monkeypatch.setattr(sandbox, "LIMIT_S_PER_GB", 2)
    expert = turning_for_ever(files.onnx("cls/loop"))
    with pytest.raises(WeightsRefused, match="over 2 s of the processor or 6 GB of memory, and was ended"):
        BACKEND.pack(expert, Precision.FP32)
    assert BACKEND.pack(files.onnx("cls/good"), Precision.FP32).tensors


def test_a_tensor_larger_than_memory_is_that_expert_s_failure(files):
    with pytest.raises(ExpertError) as raised:
        BACKEND.pack(filling_the_memory(files.onnx("cls/bomb")), Precision.FP32)
    assert raised.value.expert == "cls/bomb"
    assert BACKEND.pack(files.onnx("cls/good"), Precision.FP32).tensors


def test_a_process_that_was_ended_is_begun_again(files):
    BACKEND.pack(files.onnx("cls/x"), Precision.FP32)
    process = sandbox._packer._process
    assert isinstance(process, subprocess.Popen)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert BACKEND.pack(files.onnx("cls/x"), Precision.FP32).tensors
