"""ONNX graphs of detectors: the boxes that ultralytics itself predicts with the very file, told apart at packing."""

import functools
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from experts.backends.onnx.backend import OnnxBackend
from experts.backends.onnx.decoders import Layout
from experts.backends.onnx.layouts import image_facts, require_served
from experts.backends.vision.detector import build_trainable
from experts.errors import OutputInvalid, WeightsMismatch
from experts.expert import Expert, Fit, InputSpec, Precision
from tests.experts.conftest import answers, spread_scores, trained_looking
from tests.experts.onnx_text import add_nodes
from tests.trainers.torchvision_models import export_ssd, ssd_of
from tests.trainers.ultralytics_models import export_rtdetr

BACKEND = OnnxBackend()
LABELS = ("ok", "missing", "shifted")
SIZE = 96
NOTE = "coserve.detections"


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The path of a file that ultralytics' own exporter writes of a detector that finds boxes."""

    @functools.cache
    def export(architecture, **options):
        from ultralytics import YOLO
        from ultralytics.cfg import get_cfg
        from ultralytics.nn.tasks import SegmentationModel

        if is_segmenting := architecture.endswith("-seg"):
            fresh = SegmentationModel(f"{architecture}.yaml", nc=len(LABELS), verbose=False)
        else:
            fresh = build_trainable(architecture, len(LABELS))
        spread = {"branch": "one2one", "mean_logit": -2.5} if options.get("nms") is False else {}
        model = trained_looking(fresh, seed=0)
        spread_scores(model, **spread)
        model.names, model.args = dict(enumerate(LABELS)), dict(vars(get_cfg()))
        model.task = "segment" if is_segmenting else "detect"
        if is_segmenting:
            fill_masks(model.model[-1])
        facade = YOLO(f"{architecture}.yaml", task=model.task)
        facade.model = model
        model.pt_path = tmp_path_factory.mktemp(architecture) / f"{architecture}.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own exporter
            return Path(facade.export(format="onnx", imgsz=SIZE, simplify=False, **options))

    return export


def fill_masks(head):
    """No mask is empty: ultralytics leaves out boxes whose masks are."""
    with torch.no_grad():
        head.proto.cv3.bn.bias.fill_(5.0)
        for branch in head.cv4:
            branch[-1].weight.zero_()
            branch[-1].bias.fill_(1.0)


def expert_of(path, labels=LABELS, size=SIZE, detector=None):
    expert = Expert("det/x", "onnx", path, labels, InputSpec(size, size, "unit"), detector=detector)
    return replace(expert, input=image_facts(expert).applied(expert.pixels))


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


def boxes_of(rows, shape):
    from ultralytics.engine.results import Boxes

    return Boxes(rows, shape)


def require_same(prediction, boxes):
    """Within 1 pixel and 0.01 of score is what is promised; here they are the same numbers."""
    assert len(prediction.boxes) == len(boxes) > 0
    found = torch.tensor([[b.left, b.top, b.right, b.bottom, LABELS.index(b.label)] for b in prediction.boxes])
    expected = torch.cat((boxes.xyxy, boxes.cls[:, None]), dim=1)
    distances = (found[:, None] - expected[None]).abs().amax(dim=2)  # nearly equal scores may swap places
    assert max(distances.amin(dim=0).max(), distances.amin(dim=1).max()) < 0.05
    assert [box.score for box in prediction.boxes] == pytest.approx(boxes.conf.tolist(), abs=1e-4)


SUPPRESSED = {"nms": True, "iou": 0.45}
EXPORTS = [
    ("yolov8n", {}, Layout.ANCHORS_LAST), ("yolov8n", SUPPRESSED, Layout.CHOSEN),
    ("yolov10n", {"nms": False}, Layout.CHOSEN),
]  # fmt: skip
EXPORTS += [  # each has a representative above
    pytest.param(*each, marks=pytest.mark.slow)
    for each in (
        *((name, {}, Layout.ANCHORS_LAST) for name in ("yolov5n", "yolo11n", "yolo12n", "yolo26n")),
        ("yolov8n", {"dynamic": True}, Layout.ANCHORS_LAST),
        ("yolov8n", {"dynamic": True, "batch": 2, **SUPPRESSED}, Layout.CHOSEN),
        *((name, SUPPRESSED, Layout.CHOSEN) for name in ("yolov5n", "yolo11n")),
        *(("yolo26n", {"nms": False, **more}, Layout.CHOSEN) for more in ({}, {"dynamic": True})),
    )
]


@pytest.mark.parametrize(("architecture", "options", "layout"), EXPORTS)
def test_boxes_equal_those_that_ultralytics_predicts_with_the_file(exported, image, architecture, options, layout):
    path = exported(architecture, **options)
    expert = expert_of(path)
    assert layout_of(expert) == layout
    for each in (image, image.transpose(1, 0, 2).copy()):
        require_same(answers(expert, each)[0], ultralytics_boxes(path, each))


def edited(path, edit, notes=None):
    """A copy of a file, changed. ``notes``: in the place of its metadata."""
    model = onnx.load_model(path)
    edit(model.graph)
    if notes is not None:
        model.ClearField("metadata_props")
        onnx.helper.set_model_props(model, notes)
    changed = path.with_stem(f"{path.stem}-{edit.__name__}-{len(notes or ())}")
    onnx.save_model(model, changed)
    return changed


def output(graph, shape):
    graph.ClearField("output")
    graph.output.append(onnx.helper.make_tensor_value_info("answers", onnx.TensorProto.FLOAT, shape))


def as_yolov5(graph):
    """As YOLOv5's own repository exports it: anchors first, and the score that anything is there before the labels'."""
    add_nodes(
        graph,
        f'anchors_first = Transpose<perm=[0, 2, 1]>("{graph.output[0].name}")',
        "places = Slice(anchors_first, at_0, at_4, at_2)",
        "scores = Slice(anchors_first, at_4, at_7, at_2)",
        "anything = ReduceMax<keepdims=1>(scores, at_2)",
        "answers = Concat<axis=2>(places, anything, scores)",
        **{f"at_{number}": [number] for number in (0, 2, 4, 7)},
    )
    output(graph, (1, None, 5 + len(LABELS)))


def expected_of_yolov5(expert, image):
    from ultralytics.utils.nms import non_max_suppression
    from ultralytics.utils.ops import scale_boxes

    session = onnxruntime.InferenceSession(expert.weights, providers=["CPUExecutionProvider"])
    answer = session.run(None, {"images": BACKEND.prepare(expert, image).tensor.unsqueeze(0).numpy()})[0]
    answer = torch.from_numpy(np.concatenate((answer[:, :, :4], answer[:, :, 5:] * answer[:, :, 4:5]), axis=2))
    rows = non_max_suppression(answer.transpose(1, 2))[0]
    rows[:, :4] = scale_boxes((SIZE, SIZE), rows[:, :4], image.shape[:2])
    return boxes_of(rows, image.shape[:2])


@pytest.mark.parametrize(
    ("notes", "detector"),
    [({"stride": "32", "names": str(list(LABELS))}, None), ({}, "yolov5")],
    ids=["notes", "named"],
)
def test_boxes_of_yolov5_exports_count_by_both_of_their_scores(exported, image, notes, detector):
    expert = expert_of(edited(exported("yolov5n"), as_yolov5, notes), detector=detector)
    assert layout_of(expert) == Layout.OBJECTNESS
    require_same(answers(expert, image)[0], expected_of_yolov5(expert, image))


@pytest.fixture(scope="session")
def rtdetr(made_once):
    """The path of an exported RT-DETR with boxes of all sizes. ``is_former``: as it was before ultralytics 8.4."""

    def exported(*, is_former):
        name = "rtdetr-former" if is_former else "rtdetr"
        make = functools.partial(export_rtdetr, labels=LABELS, is_former=is_former)
        return made_once(name, make) / "rtdetr.onnx"

    return exported


@pytest.mark.slow
def test_boxes_of_rtdetr_equal_those_of_ultralytics(rtdetr, image):
    from ultralytics import RTDETR

    path = rtdetr(is_former=False)
    expert = expert_of(path, size=160)
    assert (layout_of(expert), expert.pixels.fit) == (Layout.CHOSEN_QUERIES, Fit.FILLED)
    boxes = RTDETR(path).predict(image[..., ::-1], imgsz=160, conf=0.25, max_det=1000, verbose=False)[0].boxes
    require_same(answers(expert, image)[0], cut(boxes))


def cut(boxes):
    """At the edges of the image, which ultralytics leaves out for RT-DETR."""
    height, width = boxes.orig_shape
    rows = boxes.data.clone()
    rows[:, :4] = rows[:, :4].clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    return boxes_of(rows, boxes.orig_shape)


@pytest.mark.slow
def test_boxes_of_earlier_rtdetr_exports_are_equal(rtdetr, image):
    """One label per query, the best one: of several labels of one box the others are left out."""
    former, now = (expert_of(rtdetr(is_former=is_former), size=160) for is_former in (True, False))
    assert (layout_of(former), former.pixels.fit) == (Layout.QUERIES, Fit.FILLED)
    found, expected = answers(former, image)[0], answers(now, image)[0]
    assert {box.score for box in found.boxes} <= {box.score for box in expected.boxes}
    assert found.boxes[0].left == pytest.approx(expected.boxes[0].left, abs=1e-3)


@pytest.mark.parametrize(
    "options", [SUPPRESSED, *(pytest.param(more, marks=pytest.mark.slow) for more in ({}, {"dynamic": True}))]
)
def test_segmentation_model_is_a_detector_of_its_boxes(exported, image, options):
    path = exported("yolov8n-seg", **options)
    expert = expert_of(path)
    require_same(answers(expert, image)[0], ultralytics_boxes(path, image))
    packed = BACKEND.pack(expert, Precision.FP32)
    assert len(onnx.load_from_string(packed.program).graph.output) == 1
    assert not any("proto" in name for name in packed.tensors)  # what only the masks need is not even packed


@pytest.mark.slow
def test_detector_graph_answers_each_image_of_a_batch(exported, image):
    """One that suppresses boxes itself may say that it takes any number, and leave out those over its export's."""
    images = [image, 255 - image, image[::-1].copy()]
    for options in ({"dynamic": True}, {"batch": 2}, {"dynamic": True, "batch": 2, "nms": True, "iou": 0.45}):
        expert = expert_of(exported("yolov8n", **options))
        alone = [answers(expert, each)[0] for each in images]
        for found, expected in zip(answers(expert, *images), alone, strict=True):
            assert [box.label for box in found.boxes] == [box.label for box in expected.boxes]
            assert [box.score for box in found.boxes] == pytest.approx([box.score for box in expected.boxes], abs=1e-5)


@pytest.fixture(scope="session")
def ssd():
    return ssd_of(len(LABELS))


@pytest.mark.parametrize("is_list", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_boxes_of_torchvision_are_its_own(ssd, tmp_path, is_list):
    """Of an image that needs no scaling; its label 0 is the background."""
    image = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    pixels = torch.from_numpy(image).permute(2, 0, 1) / 255
    path = tmp_path / "ssd.onnx"
    export_ssd(ssd, pixels, path, is_list=is_list)
    with torch.no_grad():
        expected = ssd([pixels])[0]
    expert = Expert("det/x", "onnx", path, LABELS, InputSpec(96, 128, "unit"))
    expert = replace(expert, input=image_facts(expert).applied(expert.pixels))
    require_served(expert)
    assert BACKEND.workspace_bytes(expert, Precision.FP32, 1) > 0
    assert layout_of(expert) == Layout.TORCHVISION
    sure = expected["scores"] > 0.25
    rows = [expected["boxes"][sure], expected["scores"][sure, None], expected["labels"][sure, None] - 1.0]
    for prediction in answers(expert, image, image):
        require_same(prediction, boxes_of(torch.cat(rows, dim=1), (96, 128)))


def refusal(path, labels=LABELS, size=SIZE, **pixels):
    """Why a file is refused, as ``config check`` and packing tell it."""
    expert = Expert("det/x", "onnx", path, labels, InputSpec(size, size, **{"normalize": "unit", **pixels}))
    with pytest.raises(WeightsMismatch) as told:
        BACKEND.check(expert)
    with pytest.raises(WeightsMismatch):
        BACKEND.pack(expert, Precision.FP32)
    return told.value.message


def as_it_is(graph):
    """Nothing is changed."""


ORDER = "has the labels ok, missing, shifted, and the line missing, ok, shifted: write them in the order of"
NO_LAYOUT = "answers output0 (1, 7, 189): for the 2 labels that the line names, that is not anchors last of YOLOv8"


@pytest.mark.parametrize(
    ("notes", "changes", "said"),
    [
        (None, {"labels": ("ok", "missing")}, "has 3 labels, ok, missing, shifted; the line names 2"),
        (None, {"labels": ("missing", "ok", "shifted")}, ORDER),
        ({"producer": "x"}, {"labels": ("ok", "missing")}, NO_LAYOUT),
        *(({"task": task}, {}, f"is exported for the task {task}, which is not served") for task in ("pose", "depth")),
        (None, {"normalize": "imagenet"}, "is a detector: set `input.normalize` to unit"),
        (None, {"size": 64}, "does not take float32 (n, 3, 64, 64) but (1, 3, 96, 96)"),
    ],
)
def test_file_that_does_not_fit_the_line_is_refused_before_packing(exported, notes, changes, said):
    path = exported("yolov8n")
    assert said in refusal(path if notes is None else edited(path, as_it_is, notes), **changes)
    assert expert_of(path, ("ok", "missing", "verschoben")).pixels.fit is Fit.LETTERBOXED  # another word for one


def test_fault_that_only_answers_show_is_refused_when_packing(exported):
    stretched = replace(expert_of(exported("yolov8n")), input=InputSpec(SIZE, SIZE, "unit"))
    with pytest.raises(WeightsMismatch, match=r"wants its images letterboxed; the line sends them stretched"):
        BACKEND.pack(stretched, Precision.FP32)
    with pytest.raises(WeightsMismatch, match=r"\(1, 7, 189\), and not as YOLOv8 .* last activation"):
        BACKEND.pack(expert_of(edited(exported("yolov8n"), without_sigmoid)), Precision.FP32)


def without_sigmoid(graph):
    next(node for node in reversed(graph.node) if node.op_type == "Sigmoid").op_type = "Identity"


def anonymous(graph):
    """Nothing in it tells of its exporter, as after another tool has rewritten it."""
    for number, node in enumerate(graph.node):
        node.name = f"node {number}"
    names = {tensor.name: f"weight {number}" for number, tensor in enumerate(graph.initializer)}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for dimension in graph.output[0].type.tensor_type.shape.dim:
        dimension.dim_param = "any"


def test_graph_without_a_trace_of_its_exporter_is_asked_for_and_not_guessed(exported):
    raw, chosen = (edited(exported("yolov8n", **o), anonymous, {"x": "y"}) for o in ({}, {"nms": True, "iou": 0.45}))
    assert "nothing in it shows what made it" in refusal(raw)
    assert "yolov8 (YOLOv8 to v12" in refusal(raw)
    assert layout_of(expert_of(raw, detector="yolov8")) == Layout.ANCHORS_LAST
    assert layout_of(expert_of(chosen, detector="yolo-end2end")) == Layout.CHOSEN
    with pytest.raises(WeightsMismatch, match="not as YOLOv5"):
        BACKEND.pack(expert_of(raw, detector="yolov5"), Precision.FP32)


def with_two_bad_values(graph):
    add_nodes(graph, f'answers = Mul("{graph.output[0].name}", no_number)', no_number=np.inf)
    output(graph, (1, 4 + len(LABELS), None))


def test_nan_boxes_are_no_prediction(exported, image):
    expert = expert_of(edited(exported("yolov8n"), with_two_bad_values))
    with pytest.raises(OutputInvalid, match="NaN or infinity"):
        answers(expert, image)


def test_more_boxes_than_a_graph_keeps_are_no_prediction(exported, image):
    """Those that it left out might be the ones that do not pass."""
    expert = expert_of(exported("yolov8n", nms=True, iou=0.45, max_det=5))
    with pytest.raises(OutputInvalid, match="it found 5 boxes in one image, all that its graph has room for"):
        answers(expert, image)
