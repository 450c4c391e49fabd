"""ONNX graphs: weights lifted out, one session per program, the same answers as the graph as it came."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from experts.backends.base import Prepared
from experts.backends.onnx import backend as onnx_backend
from experts.backends.onnx.backend import OnnxBackend, OnnxSkeleton, packed
from experts.backends.ort.session import SESSIONS_KEPT
from experts.errors import BackendUnavailable, OutputInvalid, WeightsCorrupt, WeightsMismatch, WeightsRefused
from experts.expert import Precision
from tests.experts.conftest import answers, bound
from tests.experts.onnx_text import add_behind, add_nodes, add_weights

BACKEND = OnnxBackend()


def edited(expert, edit):
    model = onnx.load_model(expert.weights)
    edit(model.graph)
    onnx.save_model(model, expert.weights)
    return expert


def test_equal_graphs_become_equal_programs_without_weights(files):
    first, second = (BACKEND.pack(files.onnx(f"cls/{seed}", seed), Precision.FP32) for seed in (1, 2))
    assert (first.program, first.tensors.keys()) == (second.program, second.tensors.keys())
    assert onnx.load_from_string(first.program).graph.initializer == []
    sizes = sorted(tensor.numel() for tensor in first.tensors.values())
    assert sizes == [3, 16, 16 * 3, 16 * 3 * 9]  # BatchNorm went into the convolution, which got a bias


def test_session_lives_as_long_as_it_is_held_and_few_unused_ones_stay(files):
    """However many programs a line has, none is built twice; and of what nobody holds, only the last few stay."""
    packed = []
    for count in range(20, 32):
        expert = files.onnx("cls/x", labels=[str(label) for label in range(count)])
        packed.append((expert, BACKEND.pack(expert, Precision.FP32).program))

    def sessions():
        return [BACKEND.skeleton(expert, Precision.FP32, program, "cpu")._session for expert, program in packed]

    held = sessions()
    assert sessions() == held
    alive = [weakref.ref(session) for session in held]
    del held
    gc.collect()
    assert sum(session() is not None for session in alive) == SESSIONS_KEPT


def test_packing_leaves_no_session_behind(files, monkeypatch):
    built = []
    session = onnxruntime.InferenceSession

    def recorded_session(*arguments, **options):
        built.append(session(*arguments, **options))
        return built[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", recorded_session)
    packed(files.onnx("cls/x", 77))  # as the process that packs does
    alive = [weakref.ref(each) for each in built]
    threads = [each.get_session_options().intra_op_num_threads for each in built]
    built.clear()
    gc.collect()
    assert threads == [1] * len(alive) != []
    assert [each() for each in alive] == [None] * len(alive)


@pytest.mark.parametrize("batch", [1, 2])
def test_fixed_batch_is_filled_up(files, image, batch):
    free, fixed = files.onnx("cls/free", 5), files.onnx("cls/fixed", 5, batch=batch)
    images = [image, 255 - image, image[::-1].copy()]
    expected = answers(free, *images)
    found = answers(fixed, *images)
    assert [each.label for each in found] == [each.label for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-5)


def softmax_ending(graph, op_type="Softmax", **attributes):
    graph.node[-1].output[0] = "raw"
    graph.node.append(helper.make_node(op_type, ["raw"], ["logits"], **attributes))


def spelled_out(graph):
    """A softmax as some exporters write it; nothing in its last operator says so."""
    made = "powers = Exp(raw)", "sums = ReduceSum<keepdims=1>(powers, axes)", "logits = Div(powers, sums)"
    add_behind(graph, *made, axes=[1])


def answering_means(graph):
    graph.ClearField("node")
    graph.ClearField("initializer")
    made = "p = GlobalAveragePool(image)", "f = Flatten(p)", "logits = Gemm(f, identity)"
    add_nodes(graph, *made, identity=np.eye(3))


def coloured(*means):
    return Prepared(torch.tensor(means).view(3, 1, 1).expand(3, 32, 32), 32, 32)


def test_score_does_not_depend_on_the_images_beside_it(files):
    """Logits of one image that happen to look like probabilities are logits all the same."""
    expert = edited(files.onnx("cls/x"), answering_means)
    skeleton = bound(expert)
    by_chance, other = coloured(0.2, 0.3, 0.5), coloured(-1.0, 2.0, 0.0)
    alone = skeleton.infer(expert, [by_chance])[0]
    assert skeleton.infer(expert, [by_chance, other])[0] == alone
    assert skeleton.infer(expert, [other, by_chance])[1] == alone
    assert alone.score == pytest.approx(float(torch.tensor([0.2, 0.3, 0.5]).softmax(dim=0).max()), abs=1e-5)


def one_image_inside(graph):
    graph.node[-2].CopyFrom(helper.make_node("Reshape", ["p", "shape"], ["f"]))
    add_weights(graph, shape=[1, 16])


def beside_the_largest(graph):
    add_behind(graph, "most = ReduceMax<axes=[0, 1], keepdims=1>(raw)", "logits = Mul(raw, most)")


def levelled_together(graph):
    add_behind(
        graph, "levels, scale, zero = DynamicQuantizeLinear(raw)", "logits = DequantizeLinear(levels, scale, zero)"
    )


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (one_image_inside, "it does not take several images"), (beside_the_largest, "beside other images"),
        (levelled_together, "DynamicQuantizeLinear takes its range from all images"),
    ],
)  # fmt: skip
def test_graph_whose_answers_depend_on_neighbours_gets_one_image_at_a_time(files, image, edit, why):
    expert = edited(files.onnx("cls/x"), edit)
    assert why in BACKEND.pack(expert, Precision.FP32).remark
    white, black = np.full_like(image, 255), np.zeros_like(image)
    alone = [answers(expert, each)[0] for each in (image, white, black)]
    assert list(answers(expert, image, white, black)) == alone


def test_weights_listed_as_inputs_by_an_older_file_are_no_inputs(files, image):
    def weights_first(graph):
        images = list(graph.input)
        graph.ClearField("input")
        graph.input.extend(helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in graph.initializer)
        graph.input.extend(images)

    expected = answers(files.onnx("cls/new"), image)[0]
    expert = edited(files.onnx("cls/x"), weights_first)
    assert BACKEND.pack(expert, Precision.FP32).remark is None
    assert [each.label for each in answers(expert, image, image)] == [expected.label] * 2


def test_fixed_batch_that_mixes_its_images_is_refused(files):
    with pytest.raises(WeightsMismatch, match=r"for images of one batch together .*: export it with a batch of 1"):
        BACKEND.pack(edited(files.onnx("cls/x", batch=3), beside_the_largest), Precision.FP32)


@pytest.mark.parametrize(
    ("ending", "meaning"),
    [
        (lambda graph: None, {}), (lambda graph: softmax_ending(graph, axis=1), {"coserve.answers": "probabilities"}),
        (lambda graph: softmax_ending(graph, "LogSoftmax", axis=1), {}),
        (spelled_out, {"coserve.answers": "probabilities"}),
    ],
    ids=["logits", "softmax", "log-softmax", "spelled-out"],
)  # fmt: skip
def test_kind_of_output_is_noted_in_the_program_unless_it_is_logits(files, image, ending, meaning):
    expected = answers(files.onnx("cls/logits"), image)[0]
    expert = edited(files.onnx("cls/x"), ending)
    program = onnx.load_from_string(BACKEND.pack(expert, Precision.FP32).program)
    assert {entry.key: entry.value for entry in program.metadata_props} == meaning
    found = answers(expert, image)[0]
    assert (found.label, found.score) == (expected.label, pytest.approx(expected.score, abs=1e-5))


def test_output_that_no_longer_sums_to_one_is_no_prediction(files, image):
    def mixed(graph):
        softmax_ending(graph, axis=1)
        graph.node[-2].output[0] = graph.node[-1].input[0] = "before"
        add_behind(graph, "logits = Gemm(raw, mixture)", mixture=np.eye(3))

    expert = edited(files.onnx("cls/x"), mixed)
    packed, skeleton = BACKEND.pack(expert, Precision.FP32), bound(expert)
    prepared = [BACKEND.prepare(expert, image)]
    assert skeleton.infer(expert, prepared)[0].score <= 1
    skeleton.bind(packed.tensors | {"mixture": 2 * torch.eye(3)})
    with pytest.raises(OutputInvalid, match="does not add up to 1"):
        skeleton.infer(expert, prepared)


def two_inputs(graph):
    graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", 1]))


def no_numbers(graph):
    weights = np.full((3, 16), np.nan, dtype=np.float32)
    index = [tensor.name for tensor in graph.initializer].index("fc.weight")
    graph.initializer[index].CopyFrom(numpy_helper.from_array(weights, "fc.weight"))


def in_percent(graph):
    softmax_ending(graph, axis=1)
    add_behind(graph, "logits = Mul(raw, hundred)", hundred=100.0)
    graph.node[-2].output[0], graph.node[-3].output[0], graph.node[-2].input[0] = "raw", "before", "before"


OVER_IMAGES = "Softmax that is not over the labels: export it with axis=1"
INDEPENDENT = r"ends in Sigmoid: its labels do not exclude .* write `task: multilabel`, or if only one .* without that"


@pytest.mark.parametrize(
    ("edit", "options", "error", "reason"),
    [
        (partial(softmax_ending, op_type="Sigmoid"), {}, WeightsMismatch, INDEPENDENT),
        (partial(softmax_ending, axis=0), {}, WeightsMismatch, OVER_IMAGES),
        (partial(softmax_ending, axis=0), {"batch": 1}, WeightsMismatch, OVER_IMAGES),
        (
            in_percent,
            {},
            WeightsMismatch,
            "numbers that add up to 100 for any image: export it so that they add up to 1",
        ),
        (two_inputs, {}, WeightsMismatch, "it has image, mask"),
        (no_numbers, {}, WeightsCorrupt, r"fc\.weight holds NaN or infinity"),
        (lambda graph: None, {"outputs": 4}, WeightsMismatch, "has 4 labels, the line names 3"),
    ],
)
def test_graph_that_is_no_classifier_of_these_labels_is_refused(files, edit, options, error, reason):
    with pytest.raises(error, match=reason):
        BACKEND.pack(edited(files.onnx("cls/x", **options), edit), Precision.FP32)


def test_other_input_size_or_external_weights_are_refused(files):
    expert = files.onnx("cls/x", size=32)
    with pytest.raises(WeightsMismatch, match=r"float32 \(n, 3, 48, 48\) but \(n, 3, 32, 32\): correct `input`"):
        BACKEND.pack(replace(expert, input=replace(expert.input, height=48, width=48)), Precision.FP32)
    model = onnx.load_model(expert.weights)
    onnx.save_model(model, expert.weights, save_as_external_data=True, location="x.data", size_threshold=0)
    with pytest.raises(WeightsRefused, match="save it as one file"):
        BACKEND.pack(expert, Precision.FP32)


def test_small_constants_of_shapes_stay_in_the_program(files, image):
    def resize_first(graph):
        add_weights(graph, scales=[1.0, 1.0, 2.0, 2.0])
        graph.node[0].input[0] = "resized"
        graph.node.insert(0, helper.make_node("Resize", ["image", "", "scales"], ["resized"], mode="linear"))

    expert = edited(files.onnx("cls/x"), resize_first)
    assert "scales" not in BACKEND.pack(expert, Precision.FP32).tensors
    session = onnxruntime.InferenceSession(str(expert.weights), providers=["CPUExecutionProvider"])
    logits = session.run(None, {"image": BACKEND.prepare(expert, image).tensor.unsqueeze(0).numpy()})[0]
    expected = float(torch.from_numpy(logits).softmax(dim=1).max())
    assert answers(expert, image)[0].score == pytest.approx(expected, abs=1e-5)


def test_runtime_on_another_device_than_asked_is_refused(files, monkeypatch):
    """It says nothing itself where it falls back to another provider."""
    expert = files.onnx("cls/x", size=40)  # whose session nobody has made before
    program = BACKEND.pack(expert, Precision.FP32).program
    absent = "mps" if "CUDAExecutionProvider" in onnxruntime.get_available_providers() else "cuda"
    with pytest.raises(BackendUnavailable, match=f"onnxruntime on {absent}"):
        BACKEND.skeleton(expert, Precision.FP32, program, absent)
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda _: ["AzureExecutionProvider"])
    with pytest.raises(BackendUnavailable, match="onnxruntime on cpu: it fell back to AzureExecutionProvider"):
        BACKEND.skeleton(expert, Precision.FP32, program, "cpu")


class Recorded:
    def __init__(self, session, events):
        self._session = session
        self._events = events

    def __getattr__(self, name):
        return getattr(self._session, name)

    def run_with_iobinding(self, feeds):
        self._events.append("run")
        self._session.run_with_iobinding(feeds)


def test_session_runs_only_after_torch_has_written_its_input(files, image, monkeypatch):
    """On CUDA the two have streams of their own; here, that each run waits, and for the stream that writes."""
    events = []
    expert = files.onnx("cls/x", batch=1)
    packed = BACKEND.pack(expert, Precision.FP32)
    skeleton = OnnxSkeleton(Recorded(bound(expert)._session, events), "cpu")
    skeleton.bind(packed.tensors)
    monkeypatch.setattr(onnx_backend, "await_writes", lambda device: events.append(f"wait for {device}"))
    skeleton.infer(expert, [BACKEND.prepare(expert, image)] * 2)
    assert events == ["wait for cpu", "run"] * 2


def test_estimated_workspace_follows_the_largest_layers(files):
    need_bytes = BACKEND.workspace_bytes(files.onnx("cls/x", size=32), Precision.FP32, 1)
    layer_bytes = 16 * 16 * 16 * 4  # the convolution's output at half the size; two of them are alive at once
    assert need_bytes == 2 * layer_bytes
