"""Anomaly experts: which outputs count, what a score means against a threshold, and where an image is strange."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

from experts.backends.onnx.anomaly import MAP_SIDE_PX, certainty
from experts.backends.onnx.backend import OnnxBackend
from experts.backends.onnx.layouts import require_served
from experts.errors import OutputInvalid, WeightsMismatch
from experts.expert import Expert, InputSpec, Precision, Task
from tests.experts.backends.onnx.anomaly_graphs import SIZE_PX, brightness
from tests.experts.conftest import answers
from tests.experts.onnx_text import model_of

BACKEND = OnnxBackend()
LABELS = ("ok", "anomalous")
UNIT = InputSpec(SIZE_PX, SIZE_PX, "unit")
BANK = 128  # entries of three numbers: enough to be lifted


@pytest.fixture
def expert_of(tmp_path):
    def made(model, name="anomaly/x", threshold=0.5, size=UNIT):
        path = tmp_path / f"{name.replace('/', '-')}.onnx"
        onnx.save_model(model, path)
        return Expert(name, "onnx", path, LABELS, size, task=Task.ANOMALY, threshold=threshold)

    return made


ANOMALIB_V2 = (("pred_score", "doubled"), ("pred_label", "bool"), ("anomaly_map", "map"), ("pred_mask", "mask"))


def grey(level, side=SIZE_PX, spot=None):
    image = np.full((side, side, 3), level, np.uint8)
    if spot is not None:
        top, left = spot
        image[top : top + 4, left : left + 4] = 255
    return image


@pytest.mark.parametrize(
    ("outputs", "score", "has_map"),
    [
        ((("output", "map"),), 1.0, True), ((("output", "flat map"),), 1.0, True), ((("output", "score"),), 1.0, False),
        ((("output", "column"),), 1.0, False), ((("output", "map"), ("47", "doubled")), 2.0, True),
        (ANOMALIB_V2, 2.0, True), ((("extra", "map"), ("anomaly_map", "map")), 1.0, True),
    ],
    ids=["map", "map without channel", "score", "column", "Anomalib v1 PatchCore", "Anomalib v2", "named among maps"],
)  # fmt: skip
@pytest.mark.parametrize("batch", ["n", 1, 4])
def test_counting_outputs_of_an_anomaly_model_are_found(expert_of, outputs, score, has_map, batch):
    expert = expert_of(brightness(*outputs, batch=batch))
    found = answers(expert, grey(40, spot=(8, 20)), grey(40))
    assert [prediction.label for prediction in found] == ["anomalous", "ok"]
    assert (found[0].anomaly.score, found[0].anomaly.map is not None) == (pytest.approx(score), has_map)
    if has_map:
        shown = found[0].anomaly.map
        expected = np.zeros((SIZE_PX, SIZE_PX), np.uint8)
        expected[8:12, 20:24] = 255
        assert shown.values == expected.tobytes()
        assert (shown.lowest, shown.highest) == (pytest.approx(40 / 255), 1.0)
    program = onnx.load_from_string(BACKEND.pack(expert, Precision.FP32).program)
    assert "Greater" not in {node.op_type for node in program.graph.node}  # which only other outputs need
    assert found[1].anomaly.map is None  # nothing to show


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ((("label", "bool"),), "answers with label bool (n,)"),
        ((("one", "map"), ("other", "map")), "one float32 (n, 1, 32, 32), other float32 (n, 1, 32, 32)"),
        ((("one", "score"), ("other", "column"), ("anomaly_map", "map")), "one score (n,) or (n, 1)"),
    ],
)
def test_graph_that_is_no_anomaly_model_is_refused_with_its_outputs(expert_of, outputs, said):
    expert = expert_of(brightness(*outputs))
    with pytest.raises(WeightsMismatch) as caught:
        BACKEND.pack(expert, Precision.FP32)
    assert said in str(caught.value)
    if outputs[0][1] == "bool":  # told before anything runs
        with pytest.raises(WeightsMismatch, match="neither a score"):
            require_served(expert)


def test_anomaly_score_is_compared_with_the_threshold_unrounded(expert_of):
    expert = expert_of(brightness(("output", "score")), threshold=1.0)
    with pytest.raises(OutputInvalid, match="has no threshold: run `coserve experts threshold"):
        answers(replace(expert, threshold=None), grey(40))
    exact, below = answers(expert, grey(255), grey(254))
    assert (exact.label, exact.score) == ("anomalous", 0.5)
    assert (below.label, below.anomaly.score) == ("ok", pytest.approx(254 / 255))


def test_large_anomaly_map_is_shrunk_without_losing_its_peak(expert_of):
    size = 3 * MAP_SIDE_PX + 7
    expert = expert_of(brightness(("output", "map"), size=size), size=InputSpec(size, size, "unit"))
    image = grey(51, size)
    image[200, 300] = 255
    shown = answers(expert, image)[0].anomaly.map
    values = np.frombuffer(shown.values, np.uint8).reshape(shown.height, shown.width)
    assert shown.height == shown.width == MAP_SIDE_PX
    assert shown.highest == 1.0
    row, column = np.unravel_index(values.argmax(), values.shape)
    assert abs(row * size / MAP_SIDE_PX - 200) <= size / MAP_SIDE_PX
    assert abs(column * size / MAP_SIDE_PX - 300) <= size / MAP_SIDE_PX


def test_anomaly_graph_whose_scores_depend_on_neighbours_gets_one_image_at_a_time(expert_of):
    model = brightness(("output", "score"))
    top = next(node for node in model.graph.node if node.output == ["output"])
    top.CopyFrom(helper.make_node("ReduceMax", ["heat"], ["one"], keepdims=0))
    model.graph.node.append(helper.make_node("Expand", ["one", "count"], ["output"]))
    model.graph.node.insert(0, helper.make_node("Shape", ["image"], ["count"], start=0, end=1))
    alone = brightness(("output", "score"), batch=1)  # a score without a dimension
    last = next(node for node in alone.graph.node if node.output == ["output"])
    last.CopyFrom(helper.make_node("ReduceMax", ["heat"], ["output"], keepdims=0))
    alone.graph.output[0].CopyFrom(helper.make_tensor_value_info("output", TensorProto.FLOAT, []))
    for each in (model, alone):
        assert [one.label for one in answers(expert_of(each), grey(255), grey(10))] == ["anomalous", "ok"]


def test_fixed_batch_anomaly_graph_with_dependent_scores_is_refused(expert_of):
    model = brightness(("output", "score"), batch=2)
    top = next(node for node in model.graph.node if node.output == ["output"])
    top.CopyFrom(helper.make_node("Sum", ["top", "most"], ["output"]))
    model.graph.node.insert(2, helper.make_node("ReduceMax", ["top"], ["most"], keepdims=1))
    with pytest.raises(WeightsMismatch, match="for images of one batch together"):
        BACKEND.pack(expert_of(model), Precision.FP32)


def memory_bank(seed):
    """As PatchCore: an image's features against a bank of them, which no operator reads that reads weights alone."""
    return model_of(
        f"""bank (float[n,3,{SIZE_PX},{SIZE_PX}] image) => (float[n] score) {{
            pooled = GlobalAveragePool(image)
            features = Flatten(pooled)
            turned = Transpose<perm=[1, 0]>(bank)
            products = MatMul(features, turned)
            score = ReduceMax<axes=[1], keepdims=0>(products)
        }}""",
        bank=np.random.default_rng(seed).normal(0, 1, (BANK, 3)),
    )


def test_memory_bank_is_switched_in_place_like_weights(expert_of):
    """Two experts of one program: their banks are in the packed bytes, and another one is bound by overwriting."""
    experts = [expert_of(memory_bank(seed), f"anomaly/{seed}", threshold=0.0) for seed in (1, 2)]
    packed = [BACKEND.pack(expert, Precision.FP32) for expert in experts]
    assert packed[0].program == packed[1].program
    assert [tensor.nbytes for tensor in packed[0].tensors.values()] == [BANK * 3 * 4]
    image = np.random.default_rng(0).integers(0, 256, (SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    held = {name: tensor.clone() for name, tensor in packed[0].tensors.items()}
    skeleton = BACKEND.skeleton(experts[0], Precision.FP32, packed[0].program, "cpu")
    skeleton.bind(held)
    for expert, packable in zip(experts, packed, strict=True):
        for name, tensor in packable.tensors.items():
            held[name].copy_(tensor)
        prepared = BACKEND.prepare(expert, image)
        session = InferenceSession(str(expert.weights), providers=["CPUExecutionProvider"])
        expected = session.run(None, {"image": prepared.tensor.numpy()[None]})[0].max()
        assert skeleton.infer(expert, [prepared])[0].anomaly.score == pytest.approx(float(expected), rel=1e-4)


def test_nan_anomaly_score_is_no_prediction(expert_of):
    model = brightness(("output", "map"))
    last = next(node for node in model.graph.node if node.output == ["output"])
    last.CopyFrom(helper.make_node("Log", ["heat"], ["output"]))
    with pytest.raises(OutputInvalid, match="NaN or infinity"):
        answers(expert_of(model), grey(0))


NUMBERS = st.floats(-1e6, 1e6)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_certainty_rises_with_the_anomaly_score_from_a_half_at_the_threshold(one, other, threshold):
    low, high = sorted((one, other))
    assert certainty(threshold, threshold) == 0.5
    assert 0 <= certainty(low, threshold) <= certainty(high, threshold) <= 1
    assert certainty(one, threshold) <= 0.5 or one > threshold
    assert certainty(one, threshold) >= 0.5 or one < threshold
