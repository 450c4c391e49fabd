"""Graphs of few bits: their weights lie beside the program as others' do, and what is no number stays none."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from agent.runtime.executor import judge
from experts.backends.base import Prepared
from experts.backends.onnx.backend import OnnxBackend
from experts.errors import OutputInvalid
from experts.expert import Precision
from experts.packed.packing import pack_line
from tests.experts.conftest import bound
from tests.experts.onnx_text import model_of

BACKEND = OnnxBackend()
CHANNELS, SIZE = 256, 32
WEIGHT_BYTES = CHANNELS * 3 * 9 + CHANNELS * CHANNELS * 9  # of eight bits each


def save_graph(path, seed, *, is_divided, batch):
    """Convolutions as a quantiser leaves them: levels in, weights of eight bits with a scale for each channel.

    ``is_divided``: by the brightest of each image, so that a black one is no number.
    """
    random = np.random.default_rng(seed)
    weights = {"scale": np.float32(0.05), "zero": np.uint8(100)}

    def levelled(name, read):
        return f"{name}_q = QuantizeLinear({read}, scale, zero) {name} = DequantizeLinear({name}_q, scale, zero)"

    def convolved(name, read, channels):
        weights[f"{name}_w"] = random.integers(-127, 127, (CHANNELS, channels, 3, 3)).astype(np.int8)
        weights[f"{name}_s"] = random.uniform(5e-5, 2e-4, CHANNELS)
        weights[f"{name}_z"] = np.zeros(CHANNELS, np.int8)
        return f"""{name}_d = DequantizeLinear<axis=0>({name}_w, {name}_s, {name}_z)
            {name}_c = Conv<pads=[1, 1, 1, 1]>({read}, {name}_d)
            {name} = Relu({name}_c)"""

    steps = [levelled("seen", "image"), convolved("first", "seen", 3)]
    if is_divided:
        steps += [convolved("light", "image", 3), "most = GlobalMaxPool(light) divided = Div(first, most)"]
    steps += [
        levelled("between", "divided" if is_divided else "first"), convolved("second", "between", CHANNELS),
        levelled("end", "second"), "pooled = GlobalAveragePool(end) flat = Flatten(pooled) logits = MatMul(flat, last)",
    ]  # fmt: skip
    weights["last"] = random.normal(0, 1, (CHANNELS, 2))
    text = f"few_bits (float[{batch},3,{SIZE},{SIZE}] image) => (float[{batch},2] logits) {{ {' '.join(steps)} }}"
    onnx.save_model(model_of(text, opset=18, **weights), path)


@pytest.fixture
def expert(files):
    def made(name="cls/x", seed=1, *, is_divided=False, batch="n"):
        found = files.onnx(name, labels=("bad", "ok"), size=SIZE)
        save_graph(found.weights, seed, is_divided=is_divided, batch=batch)
        return found

    return made


def pixels(seed):
    image = np.random.default_rng(seed).normal(0, 1, (3, SIZE, SIZE)).astype(np.float32)
    return Prepared(torch.from_numpy(image), SIZE, SIZE)


BLACK = Prepared(torch.zeros((3, SIZE, SIZE)), SIZE, SIZE)


def test_few_bit_weights_are_counted_and_answer_as_the_original_graph(expert, store):
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
def test_nan_before_the_levels_of_a_graph_is_no_answer(expert, batch):
    """Levels of it are some number: the graph as it came answers like any other, with a score of 0.5 and more."""
    found = expert(is_divided=True, batch=batch)
    skeleton = bound(found)
    with pytest.raises(OutputInvalid, match="its output has NaN or infinity"):
        skeleton.infer(found, [BLACK])
    answers = judge(skeleton, found, [pixels(1), BLACK, pixels(2)])
    assert [type(each).__name__ for each in answers] == ["Prediction", "Rejected", "Prediction"]
    assert judge(skeleton, found, [pixels(1)])[0] == answers[0]


def test_graph_that_cannot_make_nan_is_left_unchanged(expert):
    program = onnx.load_from_string(BACKEND.pack(expert(), Precision.FP32).program)
    assert {node.op_type for node in program.graph.node}.isdisjoint({"Sub", "ReduceSum", "Sum"})
