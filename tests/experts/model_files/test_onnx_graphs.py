"""What ONNX graphs tell of themselves, told without running them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from experts.errors import WeightsCorrupt, WeightsMissing, WeightsRefused
from experts.model_files.formats import describe_file, write_weights
from tests.experts.onnx_text import model_of

ULTRALYTICS = {"task": "detect", "stride": "32", "imgsz": "[64, 96]", "names": "{0: 'chip', 1: 'coil'}"}


@pytest.fixture
def graph(tmp_path):
    """Writes a graph with these outputs; what it computes does not matter, as it is not run."""

    def write(*outputs, images=("n", 3, 64, 96), element=TensorProto.FLOAT, **metadata):
        nodes, infos = [], []
        for name, *shape in outputs:
            nodes.append(helper.make_node("RandomNormal", [], [name], shape=[2]))
            infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        given = [helper.make_tensor_value_info("images", element, list(images))] if images else []
        model = helper.make_model(
            helper.make_graph(nodes, "test", given, infos), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
        )
        helper.set_model_props(model, metadata)
        onnx.save(model, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    return write


def test_ultralytics_detector_graph_states_every_fact(graph):
    found = describe_file(graph(("output0", "n", 6, 84), **ULTRALYTICS))
    assert (found.kind, found.architecture, found.labels, found.size, found.normalize) == (
        "detector", "onnx", ("chip", "coil"), (64, 96), "unit",
    )  # fmt: skip
    assert (found.missing, found.evidence["architecture"]) == ({}, "an ONNX graph, its metadata says task detect")
    assert (found.evidence["labels"], found.tensors) == ("names in its metadata", None)


def test_ultralytics_graph_of_another_size_or_task_is_described_or_refused(graph):
    found = describe_file(graph(("output0", "n", 6, "a"), images=("n", 3, "h", "w"), **ULTRALYTICS))
    assert (found.size, found.evidence["size"]) == ((64, 96), "imgsz in its metadata")
    outputs = ("output0", "n", 38, 84), ("protos", "n", 32, 16, 24)
    found = describe_file(graph(*outputs, **ULTRALYTICS | {"task": "segment"}))
    assert (found.kind, "without their masks" in found.remarks[0]) == ("detector", True)
    for task in ("pose", "obb"):
        with pytest.raises(WeightsRefused, match=f"for the task {task}: served are detect, segment, classify"):
            describe_file(graph(("output0", "n", 6, 84), **ULTRALYTICS | {"task": task}))


def test_classifier_graph_states_the_number_of_labels_but_not_their_names(graph):
    found = describe_file(graph(("logits", "n", 4)))
    assert (found.kind, found.labels, found.label_count, found.size) == ("classifier", None, 4, (64, 96))
    assert set(found.missing) == {"labels", "normalize", "fit", "task"}
    assert "--labels" in found.missing["labels"]
    assert "--normalize imagenet" in found.missing["normalize"]
    found = describe_file(graph(("logits", "n", 4), images=("n", 3, "h", "w")))
    assert found.missing["size"] == "its input images (n, 3, n, n) takes any: --size HEIGHTxWIDTH, as it was trained"


@pytest.mark.parametrize(
    ("outputs", "kind", "said"),
    [
        ("int64[n] best", None, "whole numbers, which are no scores"),
        ("int64[n] best", "classifier", "whole numbers, which are no scores"),
        ("float[n,3,1,1] logits", None, "export it with a Flatten"),
        ("float[n,1,1,3] scores", None, "export it with a Flatten"),
        ("float[n,3] part, float[n,3] defect", "classifier", "part and defect may both be of the labels"),
    ],
)
def test_outputs_that_are_no_scores_are_refused_with_the_right_export(tmp_path, outputs, kind, said):
    names = [each.split()[1] for each in outputs.split(", ")]
    nodes = "\n".join(f"{name} = Identity(image)" for name in names)  # not run
    onnx.save(onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g (float[n,3,8,8] image) => ({outputs}) {{ {nodes} }}'
    ), tmp_path / "g.onnx")  # fmt: skip
    with pytest.raises(WeightsRefused, match=said):
        describe_file(tmp_path / "g.onnx", kind=kind)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("class_names", '["chip", "coil"]'), ("class_to_idx", '{"coil": 1, "chip": 0}'),
        ("id2label", '{"0": "chip", "1": "coil"}'), ("names", '{"0": "chip", "1": "coil"}'),
    ],
)  # fmt: skip
def test_labels_are_read_under_each_key_of_trainers(graph, key, text):
    found = describe_file(graph(("logits", "n", 2), **{key: text}))
    assert (found.labels, found.evidence["labels"]) == (("chip", "coil"), f"{key} in its metadata")


@pytest.mark.parametrize(
    "outputs",
    [
        [("anomaly_map", "n", 1, 64, 96)], [("output", "n", 1, 64, 96)], [("output", "n", 64, 96)],
        [("pred_score", "n"), ("pred_label", "n"), ("anomaly_map", "n", 1, 64, 96), ("pred_mask", "n", 1, 64, 96)],
    ],
)  # fmt: skip
def test_anomaly_graph_is_recognised_by_its_outputs_but_boxes_need_a_detector_named(graph, outputs):
    found = describe_file(graph(*outputs))
    assert (found.kind, found.labels) == ("anomaly", ("ok", "anomalous"))
    for boxes in ([("boxes", "b", 4), ("labels", "b"), ("scores", "b")], [("output0", "n", 84, 6)]):
        found = describe_file(graph(*boxes))
        assert (found.kind, "--detector" in found.missing["kind"]) == (None, True)
        assert describe_file(graph(*boxes), kind="detector").missing["detector"].startswith("nothing in it shows")


@pytest.mark.parametrize(
    ("outputs", "last", "metadata", "told"),
    [
        ([("y", "n", "t", 40)], "Softmax", {"character": "a\nb\nc"}, "list 3 characters: that is text"),
        ([("y", "n", "t", 40)], "Softmax", {}, "a Softmax ranks 40 characters at each place: that is text"),
        (
            [("y", 1, "t")],
            "LSTM",
            {},
            r"a recurrent layer \(LSTM\) reads it column by column: that is text",
        ),
        ([("y", "n", 21, 64, 96)], None, {}, "a map for each of 21 channels: that is a segmentation, heatmaps"),
        ([("y", "n", 512)], "LpNormalization", {}, "of length 1: that is an embedding"),
        ([("image_embeds", "n", 512)], None, {}, "its exporter calls that image_embeds: that is an embedding"),
        ([("simcc_x", "n", 17, 384), ("simcc_y", "n", 17, 512)], None, {}, "simcc_x and simcc_y: that is keypoints"),
        ([("y", "n", 56, 84)], "model.22.cv4.0.0", {}, r"\(cv4\) are in it: that is keypoints .* or rotated boxes"),
        ([("logits", "n", 9, 4), ("pred_boxes", "n", 9, 4)], None, {}, "that is a detector of Hugging Face's DETR"),
        ([("predicted_depth", "n", 64, 96)], None, {}, "that is depth of each pixel"),
    ],
)
def test_unsupported_outputs_are_named_with_their_evidence(graph, outputs, last, metadata, told):
    file = graph(*outputs, **metadata)
    model = onnx.load_model(file)
    if last is not None:
        model.graph.node[0].output[0] = "raw"
        kind, given = "Identity" if "." in last else last, ["raw"] * (3 if last == "LSTM" else 1)
        attributes = {"hidden_size": 2} if last == "LSTM" else {}
        name = f"/{last}/conv/Conv"
        model.graph.node.append(helper.make_node(kind, given, [outputs[0][0]], name=name, **attributes))
        onnx.save(model, file)
    with pytest.raises(WeightsRefused, match=rf"answers with .*{told}.*, which is not served; served are"):
        describe_file(file)


def test_labels_of_paddles_exporters_are_read_and_a_probability_map_is_asked_about(graph):
    found = describe_file(graph(("y", "n", 4), character="0\n90\n180\n270"))
    assert (found.labels, found.evidence["labels"]) == (("0", "90", "180", "270"), "character in its metadata")
    assert "labels" in describe_file(graph(("y", "n", 3), character="0\n90\n180\n270")).missing
    file = graph(("y", "n", 1, 64, 96))
    model = onnx.load_model(file)
    model.graph.node[0].output[0] = "raw"
    model.graph.node.append(helper.make_node("Sigmoid", ["raw"], ["y"]))
    onnx.save(model, file)
    assert "text detection among them, which is not served" in describe_file(file).missing["kind"]
    assert describe_file(file, kind="anomaly").kind == "anomaly"


def test_ambiguous_output_asks_for_the_kind(graph):
    file = graph(("a", "n", 1))
    assert "--kind" in describe_file(file).missing["kind"]
    assert describe_file(file, kind="anomaly").missing.keys() == {"normalize", "fit"}


@pytest.mark.parametrize(
    ("last", "kind", "outputs", "task"),
    [
        ("Sigmoid", None, 3, "multilabel"), ("Softmax", None, 3, "multiclass"), ("Identity", None, 3, None),
        ("Identity", "classifier", 1, "multilabel"), ("Sigmoid", "classifier", 1, "multilabel"),
    ],
)  # fmt: skip
def test_last_operator_or_single_output_decides_whether_labels_are_exclusive(graph, last, kind, outputs, task):
    file = graph(("logits", "n", outputs))
    model = onnx.load_model(file)
    model.graph.node[0].output[0] = "raw"
    model.graph.node.append(helper.make_node(last, ["raw"], ["logits"]))
    onnx.save(model, file)
    found = describe_file(file, kind=kind)
    assert (found.task, "task" in found.missing) == (task, task is None)


@pytest.mark.parametrize("names", ["{0: 'a', 2: 'b'}", "['a', 'a']", "{0: 1}", "open('x')", "[" * 5000, "'x'" * 9])
def test_invalid_names_are_asked_for(graph, names):
    found = describe_file(graph(("output0", "n", 6, 84), **ULTRALYTICS | {"names": names}))
    assert "labels" in found.missing


@pytest.mark.parametrize(
    ("images", "element", "reason"),
    [
        (None, TensorProto.FLOAT, "takes nothing"), (("n", 2, 64, 64), TensorProto.FLOAT, "one input of images"),
        (("n", 64), TensorProto.FLOAT, "one input of images"),
        (("n", 3, 64, 64), TensorProto.DOUBLE, "in float32, float16 or uint8"),
    ],
)  # fmt: skip
def test_graph_without_an_image_input_is_refused(graph, images, element, reason):
    with pytest.raises(WeightsRefused, match=reason):
        describe_file(graph(("logits", "n", 4), images=images, element=element))


def test_file_that_is_no_graph_is_refused_with_the_reason(tmp_path):
    file = tmp_path / "model.onnx"
    with pytest.raises(WeightsMissing):
        describe_file(file)
    file.write_bytes(b"\x00rubbish")
    with pytest.raises(WeightsCorrupt):
        describe_file(file)
    (tmp_path / "model.h5").write_bytes(b"")
    with pytest.raises(WeightsRefused, match="unknown format"):
        describe_file(tmp_path / "model.h5")


class TestExternalWeights:
    @pytest.fixture
    def scattered(self, tmp_path):
        model = model_of(
            """test (float[n,3,8,8] x) => (float[n,4] logits) {
                mean = GlobalAveragePool(x)
                flat = Flatten(mean)
                logits = Gemm<transB=1>(flat, w)
            }""",
            w=np.ones((4, 3)),
        )
        file = tmp_path / "model.onnx"
        onnx.save(model, file, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
        return file

    def test_external_weights_are_taken_in(self, scattered, tmp_path):
        found = describe_file(scattered)
        assert found.is_scattered
        assert found.remarks == ("its weights are in other files: it is written as one",)
        write_weights(found, tmp_path / "one.onnx")
        one = describe_file(tmp_path / "one.onnx")
        assert (one.is_scattered, one.label_count) == (False, 4)

    def test_external_weights_absent_or_outside_the_folder_are_not_read(self, scattered):
        (scattered.parent / "model.onnx.data").unlink()
        with pytest.raises(WeightsRefused, match=r"in other files, which cannot be read: .*put them beside it"):
            describe_file(scattered)
        (scattered.parent.parent / "secret").write_bytes(bytes(100))
        model = onnx.load_model(scattered, load_external_data=False)
        for entry in model.graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = "../secret"
        scattered.write_bytes(model.SerializeToString())
        with pytest.raises(WeightsRefused, match="in other files, which cannot be read"):
            describe_file(scattered)
