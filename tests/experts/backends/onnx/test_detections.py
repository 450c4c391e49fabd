"""ONNX graphs of detectors: the boxes that ultralytics itself predicts with the very file, told apart at packing."""

import functools
import warnings
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from experts.backends.detector import build_trainable
from experts.backends.onnx.backend import OnnxBackend
from experts.backends.onnx.layouts import Layout, input_of
from experts.expert import Expert, InputSpec, Precision

BACKEND = OnnxBackend()
LABELS = ("ok", "missing", "shifted")
SIZE = 96
NOTE = "coserve.detections"


@pytest.fixture(scope="session")
def exported(tmp_path_factory, finding_boxes):
    """The path of a file that ultralytics' own exporter writes of a detector that finds boxes."""

    @functools.cache
    def export(architecture, **options):
        from ultralytics import YOLO

        spread = {"branch": "one2one", "mean_logit": -2.5} if options.get("nms") is False else {}
        model = finding_boxes(build_trainable(architecture, len(LABELS)), **spread)
        model.names, model.args, model.task = dict(enumerate(LABELS)), dict(vars(model.args)), "detect"
        facade = YOLO(f"{architecture}.yaml", task="detect")
        facade.model = model
        model.pt_path = tmp_path_factory.mktemp(architecture) / f"{architecture}.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own exporter
            return Path(facade.export(format="onnx", imgsz=SIZE, simplify=False, **options))

    return export


def expert_of(path, labels=LABELS, size=SIZE):
    expert = Expert("det/x", "onnx", path, labels, InputSpec(size, size, "unit"))
    return replace(expert, input=input_of(expert))


def answered(expert, *images):
    packed = BACKEND.pack(expert, Precision.FP32)
    skeleton = BACKEND.skeleton(expert, Precision.FP32, packed.program, "cpu")
    skeleton.bind(packed.tensors)
    return skeleton.infer(expert, [BACKEND.prepare(expert, image) for image in images])


def layout_of(expert):
    program = onnx.load_from_string(BACKEND.pack(expert, Precision.FP32).program)
    return {entry.key: entry.value for entry in program.metadata_props}[NOTE]


def ultralytics_boxes(path, image):
    """Rows of corners, score and label: its own letterboxing, suppression and scaling, with ONNX Runtime.

    With grey up to the size that was exported, as for a fixed size: of a graph for any size it would leave that out.
    """
    from ultralytics import YOLO

    return (
        YOLO(path)
        .predict(image[..., ::-1], imgsz=SIZE, conf=0.25, iou=0.45, max_det=1000, rect=False, verbose=False)[0]
        .boxes
    )


def require_same(prediction, boxes):
    """Within 1 pixel and 0.01 of score is what is promised; here they are the same numbers."""
    assert len(prediction.boxes) == len(boxes) > 0
    found = torch.tensor([[b.left, b.top, b.right, b.bottom, LABELS.index(b.label)] for b in prediction.boxes])
    expected = torch.cat((boxes.xyxy, boxes.cls[:, None]), dim=1)
    distances = (found[:, None] - expected[None]).abs().amax(dim=2)  # nearly equal scores may swap places
    assert max(distances.amin(dim=0).max(), distances.amin(dim=1).max()) < 0.05
    assert [box.score for box in prediction.boxes] == pytest.approx(boxes.conf.tolist(), abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["as-is", "dynamic"])
@pytest.mark.parametrize("architecture", ["yolov5n", "yolov8n", "yolo11n", "yolo12n", "yolo26n"])
def test_boxes_are_those_that_ultralytics_predicts_with_the_file(exported, image, architecture, options):
    path = exported(architecture, **options)
    expert = expert_of(path)
    assert layout_of(expert) == Layout.ANCHORS_LAST
    for each in (image, image.transpose(1, 0, 2).copy()):
        require_same(answered(expert, each)[0], ultralytics_boxes(path, each))


@pytest.mark.parametrize("options", [{}, {"dynamic": True, "batch": 2}], ids=["as-is", "dynamic"])
@pytest.mark.parametrize("architecture", ["yolov5n", "yolov8n", "yolo11n"])
def test_boxes_that_the_graph_suppresses_itself_are_those_that_ultralytics_predicts(
    exported, image, architecture, options
):
    path = exported(architecture, nms=True, iou=0.45, **options)
    expert = expert_of(path)
    assert layout_of(expert) == Layout.CHOSEN
    require_same(answered(expert, image)[0], ultralytics_boxes(path, image))


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["as-is", "dynamic"])
@pytest.mark.parametrize("architecture", ["yolov10n", "yolo26n"])
def test_boxes_from_end_to_end_are_those_that_ultralytics_predicts(exported, image, architecture, options):
    path = exported(architecture, nms=False, **options)
    expert = expert_of(path)
    assert layout_of(expert) == Layout.CHOSEN
    require_same(answered(expert, image)[0], ultralytics_boxes(path, image))
