"""Detectors of other exporters: told by what they left in the graph, and their boxes where a mark is in the image."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from experts import catalog
from experts.backends.onnx.backend import OnnxBackend
from experts.backends.onnx.decoders import DETECTORS
from experts.backends.onnx.layouts import image_facts, read_detections
from experts.errors import OutputInvalid, WeightsMismatch
from experts.expert import Expert, Fit, InputSpec, Normalization, Precision
from experts.model_files.formats import describe_file
from experts.sections.experts import DetectorName
from experts.sections.inputs import FitSection
from tests.experts.conftest import answers, bound
from tests.experts.onnx_text import add_nodes, add_weights, model_of

SIDE = 32  # levels of 4x4, 2x2 and 1 cells
BOX = (8.0, 4.0, 24.0, 12.0)  # corners in a graph that knows its answer
CENTRE = (16.0, 8.0, 16.0, 8.0)
PARTS = tuple(each / SIDE for each in CENTRE)
YES, NO = 4.0, -4.0  # logits
PROBABLE = 1 / (1 + np.exp(-YES))


def knowing(path, outputs, *, second=None, parameter="w"):
    """A graph that answers with these arrays whatever it sees. ``second``: the name of a second input."""
    model = model_of(
        f"""test (float[n,3,{SIDE},{SIDE}] image) => (float[n] none) {{
            dark = Mul(image, {parameter})
            nothing = ReduceSum<keepdims=0>(dark)
        }}""",
        **{parameter: np.array(0.0, np.float32)},
    )
    graph = model.graph
    graph.ClearField("output")
    if second is not None:
        graph.input.append(helper.make_tensor_value_info(second, TensorProto.INT64, ["n", 2]))
    for name, values in outputs.items():
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        add_nodes(
            graph, f"{name}_zero = Cast<to={kind}>(nothing)", f"{name} = Add({name}_known, {name}_zero)",
            **{f"{name}_known": values},
        )  # fmt: skip
        graph.output.append(helper.make_tensor_value_info(name, kind, values.shape))
    onnx.save(model, path)
    return path


def rows(*values, kind=np.float32):
    return np.array([values], kind)


def expert_of(path, labels=("ok", "bad"), **changes):
    expert = Expert("det/x", "onnx", path, labels, InputSpec(SIDE, SIDE, "unit"), **changes)
    facts = image_facts(expert)
    pixels = facts.applied(expert.pixels)
    if facts.prepared:
        pixels = FitSection.model_validate(dict(facts.prepared)).applied(pixels)
    return replace(expert, input=replace(pixels, normalize=facts.normalize or "unit"))


KNOWN = {
    "mmdeploy": {"dets": rows((*BOX, 0.9), (0, 0, 0, 0, 0)), "labels": rows(1, 0, kind=np.int64)},
    "rfdetr": {"dets": rows(PARTS, PARTS), "labels": rows((NO, YES), (NO, NO))},
    "rtdetr": {
        "labels": rows(1, 0, kind=np.int64), "boxes": rows(BOX, BOX), "scores": rows(0.9, 0.1),
    },
    "yolo-batched": {"output": np.array([(0, *BOX, 1, 0.9)], np.float32)},
    "yolov5": {"output": rows((*CENTRE, 1, 0.1, 0.9), (*CENTRE, 0.1, 0.9, 0.1))},
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_boxes_equal_those_of_the_exporters_own_code(tmp_path, name):
    second = "orig_target_sizes" if name == "rtdetr" else None
    path = knowing(tmp_path / "x.onnx", KNOWN[name], second=second)
    named = name in {"yolo-batched", "yolov5"}  # nothing else in these small graphs tells of their exporter
    expert = expert_of(path, detector=name if named else None)
    assert read_detections(expert).detector == name
    wide = np.zeros((SIDE, 2 * SIDE, 3), np.uint8)
    found = answers(expert, wide)[0]
    assert found.label == "bad"
    box = found.boxes[0]
    assert box.score == pytest.approx(PROBABLE if name == "rfdetr" else 0.9)
    stretched = (16, 4, 48, 12) if expert.pixels.fit is Fit.STRETCHED else None  # twice as wide as the input
    boxed = (16, 0, 48, 8)  # in half its size, below 8 rows of grey
    assert (box.left, box.top, box.right, box.bottom) == pytest.approx(stretched or boxed, abs=0.01)


@pytest.mark.parametrize(
    ("fit", "box"),
    [
        ({"pad": "top-left", "interpolation": "opencv-linear"}, (16, 8, 48, 24)), (None, (16, 0, 48, 8)),
        ({"interpolation": "opencv-linear"}, (16, 4, 48, 12)),
    ],
)  # fmt: skip
def test_line_file_may_override_padding_and_channel_order_of_an_exporter(tmp_path, fit, box):
    path = knowing(tmp_path / "x.onnx", {"output": rows((*CENTRE, 1, 0.1, 0.9), (*CENTRE, 1, 0.8, 0.1))})
    entry = {"architecture": "onnx", "weights": str(path), "labels": ["ok", "bad"], "detector": "yolov5"}
    normalize = {"mean": [0, 0, 0], "std": [1, 1, 1], "channels": "bgr"}
    given = {"size": [SIDE, SIDE], "normalize": normalize, **({} if fit is None else {"fit": fit})}
    expert = expert_from({**entry, "input": given})
    OnnxBackend().check(expert)
    image = np.zeros((SIDE, 2 * SIDE, 3), np.uint8)
    image[..., 0] = 255
    pixels = OnnxBackend().prepare(expert, image).tensor
    assert (float(pixels[2].max()), float(pixels[0, 14, 4])) == (1.0, 0.0)
    found = answers(expert, image)[0].boxes
    assert {each.label for each in found} == {"ok", "bad"}
    corners = (found[0].left, found[0].top, found[0].right, found[0].bottom)
    assert corners == pytest.approx(box, abs=0.01)
    (best,) = answers(expert_from({**entry, "input": given, "suppression": "all"}), image)[0].boxes
    assert best.label == "bad"
    for other in ({"normalize": "imagenet"}, {"fit": {"resize": SIDE}}, {"fit": {"interpolation": "opencv-area"}}):
        with pytest.raises(WeightsMismatch):
            OnnxBackend().check(expert_from({**entry, "input": given | other}))


def expert_from(entry):
    return catalog.expert_of("det/x", entry, Path())


def yolox(path, label_count=1, *, decoded=False):
    """YOLOX's heads, as tools/export_onnx.py leaves them: a blue cell is found, as its input is BGR."""
    model = model_of(f"test (float[n,3,{SIDE},{SIDE}] images) => (float[n,21,{5 + label_count}] output) {{}}")
    blue = np.zeros((1, 3, 1, 1), np.float32)
    blue[0, 0] = 8.0
    levels = []
    for stride in (8, 16, 32):
        weights = np.broadcast_to(blue / 255 / stride**2, (1, 3, stride, stride)).copy()
        place = np.zeros((4, 3, stride, stride), np.float32)
        strides, named = f"strides=[{stride}, {stride}]", f"_{stride}"
        add_nodes(
            model.graph,
            f"place{named} = Conv<{strides}>(images, place_w{named}, place_b)",
            f"seen{named} = Conv<{strides}>(images, seen_w{named}, seen_b)",
            f"object{named} = Sigmoid(seen{named})", f"label{named} = Sigmoid(seen{named})",
            f"joined{named} = Concat<axis=1>(place{named}, object{named}, label{named})",
            f"level{named} = Reshape(joined{named}, extents)",
            **{f"place_w{named}": place, f"seen_w{named}": weights},
        )  # fmt: skip
        levels.append(f"level{named}")
    add_weights(
        model.graph, place_b=[0.5, 0.5, 0.0, 0.0], seen_b=[-4.0], extents=np.array([0, 5 + label_count, -1], np.int64)
    )
    add_nodes(model.graph, f"all = Concat<axis=2>({', '.join(levels)})", "output = Transpose<perm=[0, 2, 1]>(all)")
    if decoded:
        model.graph.node[-1].output[0] = "raw"
        add_nodes(model.graph, "powers = Exp(raw)", "none = Mul(powers, zero)", "output = Add(raw, none)", zero=[0.0])
    onnx.save(model, path)
    return path


def test_yolox_is_recognised_by_its_heads_and_its_boxes_are_decoded(tmp_path):
    expert = expert_of(yolox(tmp_path / "x.onnx"), ("mark",))
    assert read_detections(expert).detector == "yolox"
    assert (expert.pixels.fit, expert.pixels.padding.at, expert.pixels.padding.color) == (Fit.PADDED, "top-left", 114)
    blue, red = (np.zeros((2 * SIDE, 2 * SIDE, 3), np.uint8) for _ in range(2))
    blue[16:32, 32:48, 2] = 255  # the second cell of eight pixels from above, the third from the left
    red[16:32, 32:48, 0] = 255
    found, other = answers(expert, blue, red)
    (box,) = found.boxes
    assert (box.left, box.top, box.right, box.bottom) == pytest.approx((32, 16, 48, 32), abs=0.1)
    assert other.boxes == ()
    decoded = yolox(tmp_path / "decoded.onnx", decoded=True)
    assert (
        read_detections(Expert("det/x", "onnx", decoded, ("mark",), InputSpec(SIDE, SIDE))).detector == "yolox-decoded"
    )


def test_description_has_the_exporters_input_or_asks_for_it(tmp_path):
    found = describe_file(yolox(tmp_path / "x.onnx"))
    assert (found.kind, found.detector, found.normalize["channels"], found.normalize["scale"]) == (
        "detector", "yolox", "bgr", 255,
    )  # fmt: skip
    assert (found.fit["pad"], set(found.missing)) == ("top-left", {"labels"})
    found = describe_file(knowing(tmp_path / "m.onnx", KNOWN["mmdeploy"]))
    assert set(found.missing) == {"labels", "normalize", "fit"}
    found = describe_file(knowing(tmp_path / "r.onnx", KNOWN["rtdetr"], second="orig_target_sizes"))
    assert (found.detector, set(found.missing)) == ("rtdetr", {"labels", "normalize"})


def test_boxes_of_an_unknown_exporter_are_asked_for_with_the_options(tmp_path):
    path = knowing(tmp_path / "x.onnx", KNOWN["yolov5"])
    found = describe_file(path)
    assert (found.kind, found.detector) == (None, None)
    assert "--detector" in found.missing["kind"]
    assert set(found.detectors) == {"yolov5", "yolox", "yolox-decoded", "yolov8", "rtdetr-ultralytics"}
    assert describe_file(path, detector="yolov5").missing.keys() == {"labels"}
    with pytest.raises(WeightsMismatch, match="nothing in it shows what made it"):
        OnnxBackend().pack(Expert("det/x", "onnx", path, ("ok", "bad"), InputSpec(SIDE, SIDE)), Precision.FP32)
    with pytest.raises(WeightsMismatch, match="that is not chosen of YOLOs with nms=True"):
        OnnxBackend().pack(
            Expert("det/x", "onnx", path, ("ok", "bad"), InputSpec(SIDE, SIDE), detector="yolo-end2end"), Precision.FP32
        )


def test_line_file_knows_every_kind_of_detector():
    assert set(DETECTORS) == set(DetectorName.__args__)


def leaving_out(path):
    """An end2end.onnx that leaves out boxes below 0.4: the second one has 0.3."""
    model = model_of(
        f"""test (float[1,3,{SIDE},{SIDE}] image) => (float[1,2,5] dets, int64[1,2] labels) {{
            nothing = ReduceSum<keepdims=0>(image)
            none = Mul(nothing, zero)
            seen = Add(logits, none)
            scores = Sigmoid(seen)
            counts = Greater(scores, limit)
            kept = Cast<to=1>(counts)
            rest = Mul(scores, kept)
            dets = Concat<axis=2>(boxes, rest)
            labels = Cast<to=7>(places)
        }}""",
        zero=np.array(0.0, np.float32), limit=np.array(0.4, np.float32), boxes=rows(BOX, BOX), places=rows(1, 0),
        logits=np.log(rows((0.9,), (0.3,)) / (1 - rows((0.9,), (0.3,)))).astype(np.float32),
    )  # fmt: skip
    onnx.save(model, path)
    return path


def test_confidence_below_the_graphs_own_limit_is_refused_with_both_numbers(tmp_path):
    expert = expert_of(leaving_out(tmp_path / "x.onnx"), confidence=0.4)
    said = r"leaves out boxes that score below 0\.4 by itself, and `confidence` is 0\.2: write `confidence: 0\.4`"
    low = replace(expert, confidence=0.2)
    for refuses in (OnnxBackend().check, lambda expert: OnnxBackend().pack(expert, Precision.FP32)):
        with pytest.raises(WeightsMismatch, match=said):
            refuses(low)
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    (found,) = answers(expert, image)[0].boxes
    assert found.score == pytest.approx(0.9)
    skeleton = bound(expert)
    with pytest.raises(OutputInvalid, match=said):  # the line changed after packing
        skeleton.infer(low, [OnnxBackend().prepare(low, image)])


def test_graph_limit_above_the_default_confidence_is_written_into_the_entry(tmp_path):
    assert describe_file(leaving_out(tmp_path / "x.onnx")).confidence == 0.4
    model = model_of(
        f"""test (float[1,3,{SIDE},{SIDE}] image) => (float[k,7] output) {{
            chosen = NonMaxSuppression(boxes, scores, most, overlap, limit)
            columns = Cast<to=1>(chosen)
            one = Slice(columns, at_0, at_1, at_1)
            output = Concat<axis=1>(columns, columns, one)
        }}""",
        boxes=rows(BOX), scores=rows((0.9,)), most=np.array([9]), overlap=[0.5], limit=[0.6],
        at_0=np.array([0]), at_1=np.array([1]),
    )  # fmt: skip
    onnx.save(model, tmp_path / "y.onnx")
    found = describe_file(tmp_path / "y.onnx", detector="yolo-batched")
    assert (found.confidence, found.evidence["confidence"]) == (0.6, "its graph leaves out boxes of lower scores")


GREY = Normalization((0.5,) * 3, (0.25,) * 3, channels="grey")
AS_PIXELS = Normalization((0.0,) * 3, (1.0,) * 3, 255)
BRIGHT = Normalization((0.4, 0.5, 0.6), (0.25,) * 3, channels="grey")
FORMS = {
    "grey in three channels": ("float[n,3,8,8]", "x = Identity(image)", BRIGHT),
    "mono": ("float[n,1,8,8]", "no = Sub(image, image)\nx = Concat<axis=1>(image, no, no)", GREY),
    "channels-last": ("float[n,8,8,3]", "x = Transpose<perm=[0, 3, 1, 2]>(image)", "imagenet"),
    "one-grey-image": ("float[8,8,1]", "x = Reshape(image, extents)", GREY),
    "float16": ("float16[n,3,8,8]", "x = Cast<to=1>(image)", "imagenet"),
    "uint8": ("uint8[n,3,8,8]", "x = Cast<to=1>(image)", AS_PIXELS),
}


class TestFormsOfInputs:
    @staticmethod
    def graph(path, form, node):
        model = model_of(
            f"""test ({form} image) => (float[n,3] logits) {{
                {node}
                mean = GlobalAveragePool(x)
                logits = Flatten(mean)
            }}""",
        )
        if "extents" in node:
            model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
            add_weights(model.graph, extents=np.array([1, 1, 8, 8], np.int64))
            model.graph.node[1].input[0] = "wide"
            for number, text in enumerate(("no = Sub(x, x)", "wide = Concat<axis=1>(x, no, no)"), start=1):
                model.graph.node.insert(number, onnx.parser.parse_node(text))
        onnx.save(model, path)
        return path

    @pytest.mark.parametrize("form", FORMS)
    def test_input_forms_are_served_unchanged(self, tmp_path, form):
        shape, node, normalize = FORMS[form]
        path = self.graph(tmp_path / "x.onnx", shape, node)
        expert = Expert("cls/x", "onnx", path, ("red", "green", "blue"), InputSpec(8, 8, normalize))
        OnnxBackend().check(expert)
        assert OnnxBackend().workspace_bytes(expert, Precision.FP32, 1) > 0
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[:, :, 1] = 250
        pixels[:, :, 0] = 249 if form == "uint8" else 0
        found = answers(expert, pixels, pixels)[1]
        assert found.label == ("red" if normalize in {GREY, BRIGHT} else "green")
        if form == "uint8":
            assert found.score == pytest.approx(1 / (1 + np.exp(-1)))

    @pytest.mark.parametrize(("form", "said"), [("mono", "takes one channel: write"), ("uint8", "pixels as they are")])
    def test_input_form_needs_its_own_normalisation(self, tmp_path, form, said):
        path = self.graph(tmp_path / "x.onnx", *FORMS[form][:2])
        expert = Expert("cls/x", "onnx", path, ("red", "green", "blue"), InputSpec(8, 8))
        with pytest.raises(WeightsMismatch, match=said):
            OnnxBackend().check(expert)
        assert "normalize" in describe_file(path).missing


def test_nodes_out_of_order_are_sorted(tmp_path):
    """As float16 exports of ultralytics and of ONNX Runtime have their casts."""
    path = TestFormsOfInputs.graph(tmp_path / "x.onnx", "float16[n,3,8,8]", "x = Cast<to=1>(image)")
    model = onnx.load(path)
    nodes = list(model.graph.node)
    model.graph.ClearField("node")
    model.graph.node.extend(reversed(nodes))
    onnx.save(model, path)
    assert describe_file(path).label_count == 3
    expert = Expert("cls/x", "onnx", path, ("red", "green", "blue"), InputSpec(8, 8))
    assert answers(expert, np.full((8, 8, 3), (0, 0, 250), np.uint8))[0].label == "blue"
