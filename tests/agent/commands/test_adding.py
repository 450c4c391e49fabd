"""A model comes to a line: questions, written files, and nothing left after a failure."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from agent.commands.adding.adding import add_model
from agent.commands.adding.facts import Wishes
from agent.commands.inspection import inspect_images
from agent.config import read_line
from agent.deployment.packed_copies import doubts_of
from agent.faults.errors import WeightsUnclear
from agent.line_file.proofs import Lack
from experts.backends.vision.classifier import build_trainable
from experts.backends.vision.detector import build_trainable as build_detector
from experts.errors import ConfigError, ImageError, WeightsMismatch
from experts.expert import NOTHING_FOUND, Prediction, Task, Verdict
from experts.images import TAG
from experts.thresholds.binding import threshold_of
from tests.commands import coserve
from tests.experts.backends.onnx.anomaly_graphs import brightness
from tests.experts.conftest import onnx_classifier
from tests.pictures import saved

BEGUN = "# my line\nline: mine  # its name\nstate: ./state\n"
RESNET = Wishes(
    components=("coil",), task="multiclass", labels=("ok", "bent"), size=(32, 32), normalize="imagenet", variant="plain"
)
UNIT = ("--normalize", "unit", "--fit", "stretched", "--resample", "bilinear")
RESNET = replace(RESNET, fit="stretched", resample="bilinear")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A classifier and a detector as weights, and a classifier as a graph."""
    folder = tmp_path_factory.mktemp("models")
    save_file(build_trainable("resnet18", 2, stem="3x3").state_dict(), folder / "net 1.safetensors")
    save_file(build_detector("yolov8n", 2).state_dict(), folder / "yolo.safetensors")
    onnx.save(onnx_classifier(0, 2, 16, "n"), folder / "graph.onnx")
    return folder


@pytest.fixture
def line(tmp_path):
    file = tmp_path / "line.yaml"
    file.write_text(BEGUN)
    return file


def files_of(line):
    return {str(file.relative_to(line.parent)) for file in line.parent.rglob("*") if file.is_file()}


def test_classifier_is_added_and_judges(line, models):
    added = add_model(line, models / "net 1.safetensors", RESNET)
    config = read_line(line, {})
    expert = config.catalog.experts["cls/net-1"]
    assert (expert.architecture, expert.labels, expert.stem) == ("resnet18", ("ok", "bent"), "3x3")
    assert expert.weights == added.weights == line.parent / "weights" / "cls" / "net-1.safetensors"
    assert expert.weights.read_bytes() == (models / "net 1.safetensors").read_bytes()
    assert [(step.expert, step.passing) for step in config.catalog.components["coil"]] == [
        ("cls/net-1", frozenset({"ok"}))
    ]
    assert added.tried.prediction.label in expert.labels
    assert added.evidence["size"] == "given by --size"
    text = line.read_text()
    assert text.startswith(BEGUN)
    assert "    # Added from net 1.safetensors.\n    # architecture: names and shapes of 102 weights are" in text
    assert "    weights: weights/cls/net-1.safetensors\n" in text


def test_added_detector_is_the_last_step_of_its_route(line, models):
    served = "{architecture: fake, weights: a.yaml, labels: [ok], input: {size: [8, 8]}}"
    line.write_text(f"{BEGUN}experts: {{cls/a: {served}}}\nroutes: {{coil: [{{expert: cls/a, pass: [ok]}}]}}\n")
    wishes = Wishes(
        id="det/all",
        components=("coil",),
        labels=("there", "shifted"),
        size=(64, 64),
        passing=("there",),
        variant="plain",
    )
    added = add_model(line, models / "yolo.safetensors", wishes)
    steps = read_line(line, {}).catalog.components["coil"]
    assert [step.expert for step in steps] == ["cls/a", "det/all"]
    assert (added.kind, added.entry["architecture"]) == ("detector", "yolov8n")


def test_detector_of_defects_passes_images_without_a_box_once_it_is_proven(line, models):
    wishes = Wishes(
        id="det/pcb", components=("board",), labels=("short", "spur"), size=(64, 64), passing=(NOTHING_FOUND,),
        variant="plain",
    )  # fmt: skip
    with pytest.raises(WeightsUnclear, match="or --pass nothing-found if all labels are defects"):
        add_model(line, models / "yolo.safetensors", replace(wishes, passing=None))
    with pytest.raises(ConfigError, match="--pass nothing-found is for detectors"):
        add_model(line, models / "graph.onnx", replace(wishes, labels=None, size=None))
    added = add_model(line, models / "yolo.safetensors", wishes)
    assert added.entry["nothing_found"] == "pass"
    assert "every verdict is UNKNOWN until it is proven on images with and without defects" in added.remarks[-1]
    config = read_line(line, {})
    assert config.catalog.graph.judge("board", 0, Prediction(NOTHING_FOUND, 0.0)).verdict is Verdict.OK
    assert config.catalog.graph.judge("board", 0, Prediction("spur", 0.9)).verdict is Verdict.NG
    doubts = doubts_of(config, {"det/pcb": Lack("its trainer's answers are not known")})
    assert "det/pcb is unproven" in doubts.any["det/pcb"]  # though the line does not require proofs


def test_graph_beside_the_line_file_is_served_in_place(line, models):
    own = line.parent / "graph.onnx"
    own.write_bytes((models / "graph.onnx").read_bytes())
    added = add_model(
        line,
        own,
        replace(RESNET, size=None, normalize="unit", min_score=0.5, variant=None),
    )
    assert added.weights == own
    assert files_of(line) == {"line.yaml", "graph.onnx"}
    assert read_line(line, {}).catalog.components["coil"][0].min_score == 0.5


def test_facts_missing_in_a_file_are_all_asked_for_at_once(line, models):
    with pytest.raises(WeightsUnclear) as caught:
        add_model(line, models / "net 1.safetensors", Wishes())
    assert caught.value.missing.keys() == {"task", "labels", "size", "normalize", "fit", "variant", "component"}
    assert "--labels" in str(caught.value)
    assert (line.read_text(), files_of(line)) == (BEGUN, {"line.yaml"})


@pytest.mark.parametrize(
    ("model", "changes", "error", "match"),
    [
        ("net 1.safetensors", {"labels": ("a", "b")}, WeightsUnclear, "--pass"),
        ("net 1.safetensors", {"labels": ("a", "b", "c")}, ConfigError, "has 2 labels, and --labels names 3"),
        ("graph.onnx", {}, WeightsMismatch, "does not take float32"),
        ("graph.onnx", {"size": None, "image": Path(__file__)}, ImageError, "test_adding.py"),
    ],
)
def test_unfit_model_is_not_added(line, models, model, changes, error, match):
    with pytest.raises(error, match=match):
        add_model(line, models / model, replace(RESNET, **changes))
    assert (line.read_text(), files_of(line)) == (BEGUN, {"line.yaml"})


class TestLabelsOfTheFile:
    WISHES = replace(RESNET, labels=None, normalize="unit", passing=("gut",))

    @pytest.fixture
    def named(self, tmp_path):
        network = build_trainable("mobilenet_v3_small", 3)
        network.classifier[3].bias.data += torch.arange(3)  # no tie
        torch.save(
            {"model": network.state_dict(), "classes": ["good", "bent", "gone"], "img_size": 32}, tmp_path / "x.pt"
        )
        return tmp_path / "x.pt"

    def test_labels_of_a_file_may_be_renamed_which_is_noted(self, line, named):
        words = {"names": ("gone", "good"), "labels": ("fehlt", "gut")}
        added = add_model(line, named, replace(self.WISHES, size=(48, 48), **words))
        expert = read_line(line, {}).catalog.experts["cls/x"]
        assert (expert.labels, expert.names) == (("gut", "bent", "fehlt"), ("good", "bent", "gone"))
        assert "good: gut" in line.read_text()
        assert "labels are renamed by --labels: good is gut, gone is fehlt" in added.remarks
        told = "given by --labels; the file has good, bent, gone (classes)"
        assert added.evidence["labels"] == told
        assert added.evidence["size"] == "given by --size; the file has 32x32 (img_size)"
        assert f"# labels: {told}" in line.read_text()

    def test_labels_of_a_file_keep_their_order(self, line, named):
        with pytest.raises(ConfigError, match="has good, bent, gone in this order, and --labels has bent in another"):
            add_model(line, named, replace(self.WISHES, labels=("bent", "good", "gone")))
        with pytest.raises(ConfigError, match="in this order, and --labels has Bent in another"):
            add_model(line, named, replace(self.WISHES, labels=("Bent", "GOOD", "gone")))

    def test_labels_of_a_file_are_renamed_by_an_option_of_the_command(self, line, named):
        words = ["--task", "multiclass", *UNIT, "--component", "c", "--labels", "good=ok,gone = away"]
        words += ["--variant", "plain"]
        assert coserve("experts", "add", line, named, *words).exit_code == 0
        assert read_line(line, {}).catalog.experts["cls/x"].labels == ("ok", "bent", "away")

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"labels": ("ok", "ng", "away")}, "say which is which, --labels good=...,bent=...,gone=..."),
            ({"labels": ("ok", "ng"), "names": ("good", "torn")}, "has good, bent, gone, no torn: correct --labels"),
        ],
    )
    def test_ambiguous_renaming_of_labels_asks_for_each_label(self, line, named, changes, match):
        with pytest.raises(ConfigError, match=match):
            add_model(line, named, replace(self.WISHES, **changes))
        assert files_of(line) == {"line.yaml", "x.pt"}


def test_repeated_addition_is_refused_and_existing_weights_are_not_overwritten(line, models):
    other = line.parent / "weights" / "cls" / "net-1.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of another")
    with pytest.raises(ConfigError, match="exists already, and is another file"):
        add_model(line, models / "net 1.safetensors", RESNET)
    assert (line.read_text(), other.read_bytes()) == (BEGUN, b"of another")
    other.unlink()
    add_model(line, models / "net 1.safetensors", RESNET)
    before = line.read_text(), files_of(line)
    with pytest.raises(ConfigError, match="cls/net-1: exists already"):
        add_model(line, models / "net 1.safetensors", RESNET)
    assert (line.read_text(), files_of(line)) == before


class TestAnomalies:
    @pytest.fixture
    def graph(self, tmp_path):
        """An anomaly model: the brightest pixel is its score."""
        onnx.save(brightness(("anomaly_map", "map")), tmp_path / "bright.onnx")
        return tmp_path / "bright.onnx"

    def test_anomaly_expert_without_a_threshold_is_added_and_does_not_judge(self, line, graph):
        added = add_model(line, graph, Wishes(components=("plate",), normalize="unit", trainer="anomalib"))
        expert = read_line(line, {}).catalog.experts["ano/bright"]
        assert (expert.task, expert.threshold, expert.labels) == ("anomaly", None, ("ok", "anomalous"))
        assert "coserve experts threshold" in added.remarks[-1]
        assert added.as_json()["tried"]["label"] is None

    def test_anomaly_expert_with_a_threshold_judges(self, line, graph):
        added = add_model(
            line, graph, Wishes(components=("plate",), normalize="unit", trainer="anomalib", threshold=0.1)
        )
        assert added.as_json()["tried"]["label"] == "anomalous"
        expert = read_line(line, {}).catalog.experts["ano/bright"]
        assert (expert.threshold, expert.threshold_of) == (0.1, threshold_of(expert, added.sha256))
        line.write_text(line.read_text().replace("normalize: unit", "normalize: imagenet"))
        (row,) = inspect_images(
            read_line(line, {}), [saved(line.parent / "one.png", (200, 200, 200), (32, 32))], "plate", lambda *_: None
        )
        assert row["verdict"] == "UNKNOWN"
        assert "its threshold was learned with other weights, or another input" in row["reason"]


class TestCommand:
    words = (
        "--component", "coil", "--task", "multiclass", "--labels", "ok, bent", "--size", "16", *UNIT,
    )  # fmt: skip

    def run(self, *words):
        return coserve("experts", "add", *words)

    def test_print_option_prints_the_entry_and_writes_nothing(self, line, models):
        done = self.run(line, models / "graph.onnx", *self.words, "--print")
        assert done.exit_code == 0
        assert done.stdout.startswith("experts:\n  cls/graph:\n    # Added from graph.onnx.\n")
        assert done.stdout.endswith("routes:\n  coil:\n    - {expert: cls/graph, pass: [ok]}\n")
        assert "nothing was written" in done.stderr
        assert (line.read_text(), files_of(line)) == (BEGUN, {"line.yaml"})

    def test_added_expert_is_reported_in_text_and_json(self, line, models):
        done = self.run(line, models / "graph.onnx", *self.words)
        assert done.exit_code == 0
        assert "graph.onnx: onnx, a classifier of 2 labels\n" in done.stdout
        assert "tried on a synthetic image of 16x16: " in done.stdout
        assert done.stdout.endswith(f"{line}: experts.cls/graph, routes.coil\n")
        line.write_text(BEGUN)
        row = json.loads(self.run(line, models / "graph.onnx", *self.words, "--json").stdout)
        assert (row["expert"], row["routes"], row["entry"]["labels"]) == ("cls/graph", ["coil"], ["ok", "bent"])
        assert row["tried"]["label"] in row["entry"]["labels"]

    def test_window_or_bits_are_written_with_their_evidence_and_served(self, line, models):
        deep = line.with_name("deep.png")
        Image.fromarray(np.full((16, 16), 4000, np.uint16)).save(deep)
        words = (*self.words, "--image", deep)
        refused = self.run(line, models / "graph.onnx", *words)
        assert "write `bits: 12` (if so), or `window: [low, high]`" in " ".join(refused.output.split())
        done = self.run(line, models / "graph.onnx", *words, "--window", "200,4000")
        assert "  window       200 to 4000              given by --window\n" in done.stdout
        assert read_line(line, {}).catalog.experts["cls/graph"].pixels.window == (200, 4000)

    @pytest.mark.parametrize(
        "words",
        [
            ("--window", "4000"),
            ("--bits", "8"),
            ("--size", "big"),
            ("--size", "1x2x3"),
            ("--normalize", "none"),
            ("--kind", "model"),
        ],
    )
    def test_meaningless_options_are_a_usage_error(self, line, models, words):
        assert self.run(line, models / "graph.onnx", *words).exit_code == 2


class TestPixels:
    """Preprocessing keys in a model's file."""

    OWN = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}  # noqa: RUF012  # of a test

    def saved(self, folder):
        network = build_trainable("resnet18", 2, stem="3x3")
        said = {"val_resize_size": 40, "val_crop_size": 32, "interpolation": "bicubic", "loss": "ce", **self.OWN}
        torch.save({"model": network.state_dict(), "classes": ["ok", "bent"], "args": said}, folder / "net.pth")
        return folder / "net.pth"

    def test_pixel_facts_of_a_trainers_file_are_written_as_keys_and_served(self, line, tmp_path):
        added = add_model(line, self.saved(tmp_path), Wishes(components=("coil",), variant="plain"))
        fit = {"resize": 40, "crop": 32, "interpolation": "bicubic"}
        assert added.entry["input"] == {"size": [32, 32], "normalize": self.OWN, "fit": fit}
        assert added.evidence["size"] == "args.val_crop_size"
        assert added.evidence["normalize"] == "args.mean, std"
        assert added.evidence["fit"] == "args.val_resize_size, val_crop_size, interpolation"
        pixels = read_line(line, {}).catalog.experts["cls/net"].pixels
        assert (pixels.resize, pixels.interpolation, pixels.normalize.mean) == (40, "bicubic", (0.5, 0.5, 0.5))

    def test_crop_of_another_size_is_not_adopted(self, line, tmp_path):
        file, wishes = self.saved(tmp_path), Wishes(components=("coil",), size=(48, 48), variant="plain")
        with pytest.raises(WeightsUnclear, match=r"fit: the file has {resize: 40, .* another size: --fit"):
            add_model(line, file, wishes)
        own = {"mean": [124, 116, 104], "std": [58, 57, 57], "scale": 255}
        added = add_model(line, file, replace(wishes, fit="stretched", normalize=own))
        assert added.entry["input"] == {"size": [48, 48], "normalize": own, "fit": {"interpolation": "bicubic"}}
        assert "given by --normalize; the file has {mean: [0.5" in added.evidence["normalize"]

    @pytest.mark.parametrize(
        ("wishes", "fit"),
        [
            ({"fit": "stretched", "resample": "opencv-linear"}, {"interpolation": "opencv-linear"}),
            ({"fit": "stretched", "resample": "bilinear"}, "stretched"),
            ({"fit": {"pad": "center", "color": 114}, "trainer": "mmcv"},
             {"pad": "center", "color": 114, "interpolation": "opencv-linear"}),
            ({"fit": {"resize": 40, "interpolation": "box"}}, {"resize": 40, "interpolation": "box"}),
            ({"fit": {"resize": 40}, "trainer": "albumentations"},
             {"resize": 40, "rounding": "longer-nearest", "interpolation": "opencv-linear"}),
            ({"trainer": "keras"}, {"interpolation": "keras-bilinear"}),
            ({"trainer": "ultralytics"}, {"resize": 32, "crop": 32, "interpolation": "bilinear"}),
        ],
    )  # fmt: skip
    def test_scaling_function_of_the_trainer_is_written_with_the_fit(self, line, models, wishes, fit):
        added = add_model(
            line, models / "net 1.safetensors", replace(RESNET, **{"fit": None, "resample": None, **wishes})
        )
        assert added.entry["input"]["fit"] == fit
        assert ("--trainer" in added.evidence["fit"]) == ("trainer" in wishes)
        assert "nothing states it" in added.evidence["orientation"] or "trainer" in wishes

    @pytest.mark.parametrize("fit", [None, "stretched", {"resize": 40, "crop": 32}])
    def test_unknown_scaling_function_is_asked_for(self, line, models, fit):
        with pytest.raises(WeightsUnclear) as caught:
            add_model(line, models / "net 1.safetensors", replace(RESNET, fit=fit, resample=None))
        assert caught.value.missing.keys() == {"fit" if fit is None else "resample"}
        assert "--resample" in next(iter(caught.value.missing.values()))

    def test_orientation_of_a_turned_image_is_asked_for(self, line, models, tmp_path):
        exif = Image.Exif()
        exif[TAG] = 6
        Image.new("RGB", (40, 30)).save(tmp_path / "turned.jpg", exif=exif)
        wishes = replace(RESNET, image=tmp_path / "turned.jpg")
        with pytest.raises(WeightsUnclear, match="--orientation exif"):
            add_model(line, models / "net 1.safetensors", wishes)
        added = add_model(line, models / "net 1.safetensors", replace(wishes, orientation="exif"))
        assert added.entry["input"]["orientation"] == "exif"
        assert read_line(line, {}).catalog.experts["cls/net-1"].pixels.orientation == "exif"

    @pytest.mark.parametrize(
        ("wish", "sentence"),
        [
            ({"fit": "stretched", "normalize": None}, "--fit, --resample and --trainer are not for detectors"),
            ({"fit": None, "resample": "opencv-linear"}, "--resample and --trainer are not for detectors"),
            ({"fit": None, "normalize": "imagenet"}, "--normalize is not for ultralytics' weights"),
        ],
    )
    def test_options_that_ultralytics_weights_ignore_are_refused(self, line, models, wish, sentence):
        with pytest.raises(ConfigError, match=sentence):
            add_model(line, models / "yolo.safetensors", replace(RESNET, **{"resample": None, "trainer": None, **wish}))


def test_missing_line_file_is_begun(models, tmp_path):
    line = tmp_path / "top side" / "line.yaml"
    line.parent.mkdir()
    with pytest.raises(WeightsUnclear):
        add_model(line, models / "net 1.safetensors", Wishes())
    assert not line.exists()
    add_model(line, models / "net 1.safetensors", RESNET)
    assert read_line(line, {}).line == "top-side"
    assert line.read_text().startswith("line: top-side\nstate: ./state\n")


class TestMultilabelExperts:
    WISHES = replace(RESNET, labels=None, task=None)

    @pytest.fixture
    def one_output(self, tmp_path):
        save_file(build_trainable("resnet18", 1, stem="3x3").state_dict(), tmp_path / "one.safetensors")
        return tmp_path / "one.safetensors"

    def test_single_output_is_asked_for_its_label_and_the_opposite(self, line, one_output):
        with pytest.raises(WeightsUnclear) as caught:
            add_model(line, one_output, self.WISHES)
        assert caught.value.missing.keys() == {"labels", "otherwise"}
        with pytest.raises(ConfigError, match="has one output, and --labels names 2: give --labels LABEL for a high"):
            add_model(line, one_output, replace(self.WISHES, labels=("ok", "ng")))
        with pytest.raises(ConfigError, match="one label leaves a softmax nothing to choose from"):
            add_model(line, one_output, replace(self.WISHES, labels=("ok",), task="multiclass"))
        assert line.read_text() == BEGUN

    @pytest.mark.parametrize(("label", "otherwise"), [("ng", "ok"), ("ok", "ng")])
    def test_single_output_is_a_sigmoid(self, line, one_output, label, otherwise):
        added = add_model(line, one_output, replace(self.WISHES, labels=(label,), otherwise=otherwise, threshold=0.4))
        expert = read_line(line, {}).catalog.experts["cls/one"]
        assert (expert.task, expert.labels, expert.otherwise) == (Task.MULTILABEL, (label,), otherwise)
        assert expert.thresholds == ((label, 0.4),)
        assert read_line(line, {}).catalog.components["coil"][0].passing == {"ok"}
        assert added.evidence["task"] == "one output, which leaves a softmax nothing to choose from"
        assert 0 < added.tried.prediction.outputs[0].score < 1
        assert added.judges
