"""YOLO detectors: the same boxes as ultralytics finds, in the image's own pixels."""

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.backends.vision import boxes
from experts.backends.vision.detector import DetectorBackend, build_trainable
from experts.errors import OutputInvalid, WeightsMismatch
from experts.expert import NOTHING_FOUND, Precision
from experts.graph import deciding_label
from tests.experts.conftest import answers, bound
from tests.forms import needs

BACKEND = DetectorBackend()


def answered(expert, image, precision=Precision.FP32):
    return answers(expert, image, precision=precision)[0]


def ultralytics_boxes(expert, image):
    """What ultralytics' own model, suppression and scaling make of the image: rows of corners, score and label."""
    from ultralytics.utils.nms import non_max_suppression
    from ultralytics.utils.ops import scale_boxes

    model = build_trainable(expert.architecture, len(expert.labels))
    model.load_state_dict(load_file(expert.weights))
    prepared = BACKEND.prepare(expert, image)
    with torch.no_grad():
        rows = non_max_suppression(model.eval()(prepared.tensor.unsqueeze(0)))[0]
    rows[:, :4] = scale_boxes((64, 64), rows[:, :4], image.shape[:2])
    return rows


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        ("yolov5n", Precision.FP32), ("yolo11n", Precision.FP32), ("yolo26n", Precision.FP32),
        ("yolov5n", Precision.ONNXRUNTIME),
        pytest.param("yolov5n", Precision.ONEDNN_FP32, marks=needs(Precision.ONEDNN_FP32)),
    ],
)  # fmt: skip
def test_boxes_equal_those_of_ultralytics(files, image, architecture, precision):
    expert = files.detector("det/x", architecture)
    prediction = answered(expert, image, precision)
    rows = ultralytics_boxes(expert, image)
    assert len(prediction.boxes) == len(rows) > 0
    found = torch.tensor([[box.left, box.top, box.right, box.bottom, box.score] for box in prediction.boxes])
    distances = (found[:, None] - rows[None, :, :5]).abs().amax(dim=2)  # nearly equal scores may swap places
    assert max(distances.amin(dim=0).max(), distances.amin(dim=1).max()) < 0.01
    assert [box.score for box in prediction.boxes] == pytest.approx(rows[:, 4].tolist(), abs=1e-4)
    assert (prediction.label, prediction.score) == (prediction.boxes[0].label, prediction.boxes[0].score)


@pytest.mark.parametrize("shape", [(90, 140), (140, 90), (64, 64), (1, 500), (500, 1), (33, 31), (640, 480)])
def test_letterboxing_keeps_proportions_and_is_reversible(files, shape):
    from ultralytics.data.augment import LetterBox

    expert = files.expert("det/x", "yolov5n", files.folder / "none.safetensors", size=64)
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    prepared = BACKEND.prepare(expert, image)
    params = LetterBox((64, 64)).get_params({"img": image})
    assert prepared.tensor.shape == (3, 64, 64)
    width, height = params["new_unpad"]
    assert (prepared.scale_x, prepared.scale_y) == (width / shape[1], height / shape[0])
    expected = torch.from_numpy(LetterBox((64, 64))(image=image)).permute(2, 0, 1)
    assert torch.equal((prepared.tensor * 255).round(), expected.float())
    assert (prepared.pad_left, prepared.pad_top) == (params["left"], params["top"])
    assert (prepared.image_height, prepared.image_width) == shape


RUNTIME_TOO = pytest.param(Precision.ONNXRUNTIME, marks=pytest.mark.slow)
SIZE_PX = 224
NOWHERE = (0.01, 0.01, 0.01)
PASSING = (0.9, 0.01, 0.01)
FAILING = (0.01, 0.3, 0.01)


def with_fixed_answers(files, scores):
    """A detector whose boxes are points, with the same scores everywhere; ``scores`` of all labels by level.

    An image of SIZE_PX has 784 places on the finest level, 196 on the next and 49 on the coarsest.
    """
    model = build_trainable("yolov5n", 3)
    head = model.model[-1]
    with torch.no_grad():
        for boxes, labels, wanted in zip(head.cv2, head.cv3, scores, strict=True):
            boxes[-1].weight.zero_()
            boxes[-1].bias.fill_(-50.0)[:: boxes[-1].bias.numel() // 4] = 50.0  # the distance of 0, on all four sides
            labels[-1].weight.zero_()
            labels[-1].bias.copy_(torch.tensor(wanted).logit())
    return files.torch_module("det/x", model, "yolov5n", labels=("ok", "missing", "shifted"), size=SIZE_PX)


@pytest.mark.parametrize("precision", [Precision.FP32, RUNTIME_TOO])
def test_any_number_of_passing_boxes_hides_no_failing_one(files, image, precision):
    prediction = answered(with_fixed_answers(files, [PASSING, NOWHERE, FAILING]), image, precision)
    assert Counter(box.label for box in prediction.boxes) == {"ok": 784, "missing": 49}
    assert prediction.label == "ok"
    assert deciding_label(prediction, frozenset({"ok"})) == ("missing", pytest.approx(0.3, abs=1e-4))


def test_confidence_and_overlap_of_the_expert_select_its_boxes(files, image):
    expert = with_fixed_answers(files, [NOWHERE, PASSING, FAILING])
    assert {box.label for box in answered(replace(expert, confidence=0.5), image).boxes} == {"ok"}
    assert {box.label for box in answered(expert, image).boxes} == {"ok", "missing"}
    real = files.detector("det/real", size=64)
    few, many = (len(answered(replace(real, iou=iou), image).boxes) for iou in (0.05, 1.0))
    assert few < many


@pytest.mark.parametrize("precision", [Precision.FP32, RUNTIME_TOO])
def test_more_boxes_than_are_judged_are_no_prediction(files, image, precision):
    expert = with_fixed_answers(files, [PASSING, PASSING, FAILING])
    with pytest.raises(OutputInvalid, match="det/x: it found 1029 boxes in one image, more than the 1000 that are"):
        answered(expert, image, precision)


def test_boxes_beyond_those_that_are_suppressed_are_no_prediction(files, image, monkeypatch):
    expert = with_fixed_answers(files, [PASSING, NOWHERE, NOWHERE])
    monkeypatch.setattr(boxes, "CANDIDATES_MAXIMUM", 783)
    with pytest.raises(OutputInvalid, match="it found 784 boxes before suppression in one image, more than the 783"):
        answered(expert, image)
    monkeypatch.setattr(boxes, "CANDIDATES_MAXIMUM", 784)
    assert len(answered(expert, image).boxes) == 784


@pytest.mark.parametrize(
    ("precision", "part", "sign"),
    [
        *((Precision.FP32, part, sign) for part in ("cv2", "cv3") for sign in (1, -1)),
        (Precision.ONNXRUNTIME, "cv3", -1),
        pytest.param(Precision.ONNXRUNTIME, "cv2", 1, marks=pytest.mark.slow),
    ],
)
def test_infinite_output_is_no_score_and_no_box(files, image, precision, part, sign):
    """As a raw score it would become 1 or 0; as a weight of one distance, that distance or none."""
    model = build_trainable("yolov5n", 3)
    with torch.no_grad():
        last = getattr(model.model[-1], part)[0][-1]
        last.bias.zero_()[0] = sign * 3e38
        last.weight.zero_()[0] = sign * 3e38
        for before in getattr(model.model[-1], part)[0][:-1]:
            before.bn.bias.fill_(10.0)  # so that what the last convolution takes is above zero
    expert = files.torch_module("det/x", model, "yolov5n")
    with pytest.raises(OutputInvalid, match="NaN or infinity"):
        answered(expert, image, precision)


def test_infinite_distance_is_no_prediction_although_its_score_is_sound(files, image):
    """YOLO26 answers with distances themselves, which are numbers until they are put in pixels."""
    model = build_trainable("yolo26n", 3)
    with torch.no_grad():
        model.model[-1].cv2[0][-1].weight.zero_()
        model.model[-1].cv2[0][-1].bias.fill_(3e38)
    expert = files.torch_module("det/x", model, "yolo26n")
    with pytest.raises(OutputInvalid, match="NaN or infinity"):
        answered(expert, image)


def test_image_without_a_box_is_nothing_found(files, image):
    model = build_trainable("yolov5n", 3)  # untrained: far below the confidence that a box needs
    prediction = answered(files.torch_module("det/x", model, "yolov5n"), image)
    assert (prediction.label, prediction.score, prediction.boxes) == (NOTHING_FOUND, 0.0, ())


def test_one_skeleton_takes_images_of_several_sizes(files, image):
    expert = files.detector("det/x", size=64)
    larger = replace(expert, input=replace(expert.input, width=96))
    skeleton = bound(expert)
    alone = skeleton.infer(expert, [BACKEND.prepare(expert, image)])
    skeleton.infer(larger, [BACKEND.prepare(larger, image)] * 2)
    assert skeleton.infer(expert, [BACKEND.prepare(expert, image)]) == alone


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_tensor_names_with_and_without_prefix_are_equal(files, prefix):
    expert = files.detector("det/x")
    expected = BACKEND.pack(expert, Precision.FP32).tensors
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in load_file(expert.weights).items()}
    save_file(tensors, expert.weights)
    found = BACKEND.pack(expert, Precision.FP32).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("architecture", "size", "reason"),
    [
        *((name, 64, name) for name in ("yolov5z", "yolov8n-seg", "rtdetr-l")),
        ("yolov5n", 80, "multiples of 32, not 80x80"),
    ],
)
def test_other_model_or_size_is_a_mismatch(files, architecture, size, reason):
    expert = replace(files.detector("det/x", size=size), architecture=architecture)
    with pytest.raises(WeightsMismatch, match=reason):
        BACKEND.pack(expert, Precision.FP32)


def test_model_built_beside_another_keeps_its_own_activation():
    """ultralytics sets a YOLOv6's activation for the whole process while it builds one."""
    from ultralytics.nn.modules.conv import Conv

    with ThreadPoolExecutor(1) as builders:
        beside = []

        def once_it_is_set(frame, event, argument):
            if not beside and isinstance(Conv.default_act, torch.nn.ReLU):
                beside.append(builders.submit(build_trainable, "yolov5n", 7))
                wait(beside, timeout=1)  # it has to wait for this one; where it need not, a second is plenty

        sys.setprofile(once_it_is_set)
        try:
            build_trainable("yolov6n", 7)
        finally:
            sys.setprofile(None)
        assert isinstance(beside[0].result().model[0].act, torch.nn.SiLU)
    assert isinstance(Conv.default_act, torch.nn.SiLU)


def test_importing_the_detector_changes_nothing_outside(tmp_path):
    """In a fresh process: torch.save and Image.open stay, nothing is printed, no file is written into the home."""
    program = (
        "import torch; save = torch.save\n"
        "from PIL import Image; open_image = Image.open\n"
        "import experts.backends.vision.detector as detector\n"
        "from ultralytics.utils import ONLINE, SETTINGS, AUTOINSTALL\n"
        "assert torch.save is save and Image.open is open_image\n"
        "assert not ONLINE and not AUTOINSTALL and SETTINGS['sync'] is False\n"
        "detector.build_trainable('yolov5n', 2)\n"
    )
    unset = {"YOLO_CONFIG_DIR", "YOLO_OFFLINE", "YOLO_AUTOINSTALL", "YOLO_VERBOSE"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    home = tmp_path / "home"
    home.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "HOME": str(home), "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}, capture_output=True,
        text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert list(home.iterdir()) == []
    assert not list(tmp_path.glob("coserve-ultralytics-*"))
