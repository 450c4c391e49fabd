"""Graphs of few bits: their weights lie beside the program as others' do, and what is no number stays none."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from agent.runtime.executor import judge
from experts.backends.base import Prepared
from experts.backends.onnx.backend import OnnxBackend
from experts.errors import OutputInvalid
from experts.expert import Precision
from experts.packed.packing import pack_line
from tests.experts.conftest import bound

BACKEND = OnnxBackend()
CHANNELS, SIZE = 256, 32
WEIGHT_BYTES = CHANNELS * 3 * 9 + CHANNELS * CHANNELS * 9  # of eight bits each


class Graph:
    """Convolutions as a quantiser leaves them: levels in, weights of eight bits with a scale for each channel."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.constants, self.nodes = [], []

    def constant(self, name, values):
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, operator, *read, **attributes):
        name = f"{operator}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(read), [name], **attributes))
        return name

    def levelled(self, read):
        levels = self.constant(f"{read}.scale", np.float32(0.05)), self.constant(f"{read}.zero", np.uint8(100))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", read, *levels), *levels)

    def convolved(self, read, name, channels):
        values = self.random.integers(-127, 127, (CHANNELS, channels, 3, 3)).astype(np.int8)
        scales = self.random.uniform(5e-5, 2e-4, CHANNELS).astype(np.float32)
        weight = self.node(
            "DequantizeLinear", self.constant(name, values), self.constant(f"{name}.scales", scales),
            self.constant(f"{name}.zeros", np.zeros(CHANNELS, np.int8)), axis=0,
        )  # fmt: skip
        return self.node("Relu", self.node("Conv", read, weight, pads=[1, 1, 1, 1]))

    def saved(self, path, *, is_divided, batch="n"):
        """``is_divided``: by the brightest of each image, so that a black one is no number."""
        found = self.convolved(self.levelled("image"), "first", 3)
        if is_divided:
            found = self.node("Div", found, self.node("GlobalMaxPool", self.convolved("image", "light", 3)))
        found = self.levelled(self.convolved(self.levelled(found), "second", CHANNELS))
        flat = self.node("Flatten", self.node("GlobalAveragePool", found))
        last = self.constant("last", self.random.normal(0, 1, (CHANNELS, 2)).astype(np.float32))
        self.nodes.append(helper.make_node("MatMul", [flat, last], ["logits"]))
        graph = helper.make_graph(
            self.nodes, "few bits",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, SIZE, SIZE])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 2])], self.constants,
        )  # fmt: skip
        onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


@pytest.fixture
def expert(files):
    def made(name="cls/x", seed=1, *, is_divided=False, batch="n"):
        found = files.onnx(name, labels=("bad", "ok"), size=SIZE)
        Graph(seed).saved(found.weights, is_divided=is_divided, batch=batch)
        return found

    return made


def pixels(seed):
    image = np.random.default_rng(seed).normal(0, 1, (3, SIZE, SIZE)).astype(np.float32)
    return Prepared(torch.from_numpy(image), SIZE, SIZE)


BLACK = Prepared(torch.zeros((3, SIZE, SIZE)), SIZE, SIZE)


def test_their_weights_are_counted_and_answers_are_those_of_the_graph_as_it_came(expert, store):
    found = expert()
    packed = pack_line([found], lambda _: {Precision.FP32}, store).packed[found.id][Precision.FP32]
    assert sum(segment.slot_bytes for segment in packed.segments) >= WEIGHT_BYTES
    assert store.program_path(packed.program_sha256).stat().st_size < 0.05 * WEIGHT_BYTES
    session = onnxruntime.InferenceSession(str(found.weights), providers=["CPUExecutionProvider"])
    images = [pixels(seed) for seed in range(4)]
    logits = session.run(None, {"image": torch.stack([each.tensor for each in images]).numpy()})[0]
    expected = torch.from_numpy(logits).softmax(dim=1)
    answers = bound(found).infer(found, images)
    assert [each.label for each in answers] == [found.labels[int(row.argmax())] for row in expected]
    assert [each.score for each in answers] == pytest.approx([float(row.max()) for row in expected], abs=1e-4)


@pytest.mark.parametrize("batch", ["n", 2])
def test_what_is_no_number_before_levels_is_no_answer(expert, batch):
    """Levels of it are some number: the graph as it came answers like any other, with a score of 0.5 and more."""
    found = expert(is_divided=True, batch=batch)
    skeleton = bound(found)
    with pytest.raises(OutputInvalid, match="its output is not a number"):
        skeleton.infer(found, [BLACK])
    answers = judge(skeleton, found, [pixels(1), BLACK, pixels(2)])
    assert [type(each).__name__ for each in answers] == ["Prediction", "Rejected", "Prediction"]
    assert judge(skeleton, found, [pixels(1)])[0] == answers[0]


def test_a_graph_of_which_none_may_be_is_left_as_it_is(expert):
    program = onnx.load_from_string(BACKEND.pack(expert(), Precision.FP32).program)
    assert {node.op_type for node in program.graph.node}.isdisjoint({"Sub", "ReduceSum", "Sum"})
