"""Labels that do not exclude one another: a sigmoid for each, in every form that executes it, and never a softmax."""

from dataclasses import replace

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from safetensors.torch import load_file

from experts.backends import backend_for
from experts.backends.forms import form_of
from experts.backends.onnx.layouts import require_served
from experts.backends.vision.classifier import build_trainable
from experts.errors import OutputInvalid, WeightsMismatch
from experts.expert import NOTHING_FOUND, Precision, Task
from tests.experts.conftest import answers, bound, calibrated
from tests.experts.onnx_text import ending
from tests.forms import needs

TOLERANCES = {
    Precision.FP32: 1e-4, Precision.BF16: 0.05, Precision.FP16: 0.01, Precision.ONNXRUNTIME: 1e-4,
    Precision.ONEDNN_FP32: 1e-4, Precision.ONEDNN_BF16: 0.05, Precision.ONEDNN_INT8: 0.1,
}  # fmt: skip


def independent(expert, **keys):
    return replace(expert, task=Task.MULTILABEL, **keys)


@pytest.mark.parametrize(
    ("precision", "labels"),
    [
        *(pytest.param(form, ("ng",), marks=needs(form), id=form) for form in TOLERANCES),
        (Precision.FP32, ("scratch", "dent", "gone")),
    ],
)
def test_every_form_answers_with_the_sigmoids_of_torch(files, image, precision, labels, tmp_path):
    expert = independent(files.classifier("cls/x", "resnet18", labels=labels, size=32), otherwise="ok")
    backend = backend_for("resnet18")
    module = build_trainable("resnet18", len(labels))
    module.load_state_dict(load_file(expert.weights))
    images = (image, image[::-1].copy(), 255 - image)
    batch = torch.stack([backend.prepare(expert, each).tensor for each in images])
    if form_of(precision).needs_calibration:
        expert = calibrated(expert, precision, tmp_path, *images)
    with torch.inference_mode():
        expected = module.eval()(batch).sigmoid()
    found = answers(expert, *images, precision=precision)
    for prediction, row in zip(found, expected.tolist(), strict=True):
        assert [output.label for output in prediction.outputs] == list(labels)
        assert [output.score for output in prediction.outputs] == pytest.approx(row, abs=TOLERANCES[precision])
        assert prediction.label in {*(output.label for output in prediction.outputs if output.holds), "ok"}


@pytest.mark.parametrize("architecture", ["resnet18", "onnx"])
def test_single_label_is_refused_for_a_softmax(files, architecture):
    expert = (files.onnx if architecture == "onnx" else files.classifier)("cls/x", labels=("ok",))
    with pytest.raises(WeightsMismatch, match=r"nothing to choose from: every image would be it - write `task: multil"):
        backend_for(architecture).pack(expert, Precision.FP32)


def test_single_label_softmax_is_refused_by_the_graphs_heading_before_packing(files):
    expert = files.onnx("cls/x", labels=("ok",))
    with pytest.raises(WeightsMismatch, match="nothing to choose from"):
        require_served(expert)
    require_served(independent(expert))


def sigmoids(expert, image):
    session = onnx.reference.ReferenceEvaluator(onnx.load_model(expert.weights))
    pixels = backend_for("onnx").prepare(expert, image).tensor.unsqueeze(0).numpy()
    return 1 / (1 + np.exp(-session.run(None, {"image": pixels})[0][0]))


ENDINGS = {
    "logits": (),
    "sigmoid": ("logits = Sigmoid(raw)",),
    "joined": (
        "raw0, raw1, raw2 = Split<axis=1>(raw)", *(f"own{n} = Sigmoid(raw{n})" for n in range(3)),
        "logits = Concat<axis=1>(own0, own1, own2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("nodes", ENDINGS.values(), ids=ENDINGS)
def test_graph_is_given_a_sigmoid_once(files, image, nodes):
    expected = sigmoids(files.onnx("cls/logits"), image)
    expert = independent(files.onnx("cls/x"))
    expert = ending(expert, *nodes) if nodes else expert
    (found,) = answers(expert, image)
    assert [output.score for output in found.outputs] == pytest.approx(expected.tolist(), abs=1e-5)


def test_graph_of_one_logit_may_answer_one_number_per_image(files, image):
    expected = sigmoids(files.onnx("cls/logits", labels=("ng",)), image)
    expert = independent(files.onnx("cls/x", labels=("ng",)))
    ending(expert, "flat = Flatten<axis=0>(raw)", "logits = Squeeze(flat)")
    model = onnx.load_model(expert.weights)
    del model.graph.output[0].type.tensor_type.shape.dim[1]
    onnx.save_model(model, expert.weights)
    first, second = answers(expert, image, image)
    assert first.outputs[0].score == second.outputs[0].score == pytest.approx(float(expected[0]), abs=1e-5)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (["logits = Softmax<axis=1>(raw)"], "ends in Softmax: its labels exclude one another"),
        (["s = Sigmoid(raw)", "logits = Mul(s, s)"], "answers from 0 to 1, which may be probabilities or not"),
    ],
    ids=["softmax", "unclear"],
)
def test_multilabel_graph_with_another_ending_is_refused(files, nodes, reason):
    expert = ending(independent(files.onnx("cls/x")), *nodes)
    with pytest.raises(WeightsMismatch, match=reason):
        backend_for("onnx").pack(expert, Precision.FP32)


def test_each_label_has_its_threshold_and_nan_is_no_prediction(files, image):
    expert = independent(files.classifier("cls/x", labels=("scratch", "dent"), size=32))
    (plain,) = answers(expert, image)
    low, high = (min(max(each.score, 1e-6), 1 - 1e-6) for each in plain.outputs)
    strict = replace(expert, thresholds=(("dent", min(high + 1e-4, 1 - 1e-9)), ("scratch", low / 2)))
    (found,) = answers(strict, image)
    assert [output.holds for output in found.outputs] == [True, False]
    assert (found.label, found.otherwise) == ("scratch", NOTHING_FOUND)
    backend, skeleton = backend_for("resnet18"), bound(expert)
    skeleton.bind(backend.pack(expert, Precision.FP32).tensors | {"fc.bias": torch.full((2,), float("nan"))})
    with pytest.raises(OutputInvalid, match="NaN or infinity"):
        skeleton.infer(expert, [backend.prepare(expert, image)])
