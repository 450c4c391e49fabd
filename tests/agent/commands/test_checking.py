"""A model is added only if it answers as its trainer's own pipeline did; answers decide what its file leaves open."""

import getpass
import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession
from PIL import Image

from agent.commands.adding.adding import add_model
from agent.commands.adding.facts import Wishes
from agent.config import read_line
from agent.faults.errors import WeightsUnclear
from agent.line_file.proofs import kept_proofs
from experts.errors import ConfigError, OutputInvalid, WeightsRefused
from experts.expert import NAMED
from experts.proving.answers import read_answers
from experts.proving.search import Patience
from tests.commands import coserve
from tests.experts.conftest import onnx_classifier
from tests.experts.onnx_text import add_behind, model_of

BEGUN = "line: mine\nstate: ./state\n"
LABELS = ("ok", "bent", "gone")
WISHES = Wishes(
    components=("coil",), task="multiclass", labels=LABELS, normalize="imagenet", fit={"interpolation": "bilinear"}
)


def seen(image):
    """As the trainer sees an image: bicubic, RGB, ImageNet's numbers."""
    pixels = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC), np.float32) / 255
    pixels = (pixels - np.float32(NAMED["imagenet"].mean)) / np.float32(NAMED["imagenet"].std)
    return pixels.transpose(2, 0, 1)[None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A graph, photographs, and its trainer's answers by ONNX Runtime itself, of every label."""
    folder, random = tmp_path_factory.mktemp("trained"), np.random.default_rng(0)
    images = []
    for number in range(10):
        pixels = random.integers(0, 256, (20, 30, 3)) * random.random(3) * (0.3 + number / 15)
        images.append(Image.fromarray(pixels.astype(np.uint8)))
        images[-1].save(folder / f"{number}.png")
    graph = onnx_classifier(3, 3, 16, "n")
    raw = InferenceSession(graph.SerializeToString())
    middle = np.mean([raw.run(None, {"image": seen(image)})[0][0] for image in images], axis=0)
    add_behind(graph.graph, "logits = Sub(raw, middle)", middle=middle.astype(np.float32))
    onnx.save(graph, folder / "graph.onnx")
    session, rows = InferenceSession(folder / "graph.onnx"), []
    for number, image in enumerate(images):
        odds = np.exp(session.run(None, {"image": seen(image)})[0][0])
        rows.append({"file": f"{number}.png", "scores": dict(zip(LABELS, (odds / odds.sum()).tolist(), strict=True))})
    (folder / "answers.json").write_text(json.dumps(rows))
    return folder


RIGHT = replace(WISHES, fit={"interpolation": "bicubic"})


@pytest.fixture
def line(tmp_path):
    file = tmp_path / "line.yaml"
    file.write_text(BEGUN)
    return file


def files_of(line):
    return {str(file.relative_to(line.parent)) for file in line.parent.rglob("*") if file.is_file()}


def adding(line, trained, wishes, answers="answers.json"):
    return add_model(line, trained / "graph.onnx", replace(wishes, check=trained / answers))


def test_model_with_its_trainers_answers_is_added_and_they_are_kept(line, trained):
    added = adding(line, trained, RIGHT)
    assert (added.checked.comparison.agreed, added.checked.comparison.images) == (10, 10)
    assert added.checked.comparison.largest_difference < 1e-4
    expert = read_line(line, {}).catalog.experts["cls/graph"]
    assert expert.check == line.parent / "checks" / "cls" / "graph"
    assert len(read_answers(expert.check)) == 10
    assert "# check: 10 of 10 answers agree" in line.read_text()
    (proof,) = kept_proofs(line.parent / "state")
    assert (proof.expert, proof.form, proof.holds) == ("cls/graph", "fp32", True)
    assert added.as_json()["checked"]["agreed"] == 10


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fit": {"interpolation": "bilinear"}}, "give --fit '{interpolation: bicubic}': 10 of 10"),
        ({"labels": ("gone", "ok", "bent")}, "give --labels ok,bent,gone: 10 of 10"),
    ],
)
def test_model_that_disagrees_is_refused_with_the_key_that_would_agree(line, trained, changes, sentence):
    with pytest.raises(WeightsRefused, match=r"answers.json: . of 10 answers agree") as caught:
        adding(line, trained, replace(RIGHT, **changes))
    assert sentence in str(caught.value)
    assert "worst.png" in str(caught.value)
    assert (line.read_text(), files_of(line)) == (BEGUN, {"line.yaml"})


def test_forced_addition_is_recorded_with_person_and_reason(line, trained):
    wishes = replace(RIGHT, labels=("gone", "ok", "bent"), anyway="the labels are from an older set")
    added = adding(line, trained, wishes)
    assert added.checked.trusted == (getpass.getuser(), "the labels are from an older set")
    assert f"trusted by {getpass.getuser()}: the labels are from" in line.read_text()
    (proof,) = kept_proofs(line.parent / "state")
    assert (proof.by, proof.why, proof.holds) == (getpass.getuser(), "the labels are from an older set", True)


def test_open_input_is_found_and_written_with_its_evidence(line, trained):
    added = adding(line, trained, replace(RIGHT, normalize=None, labels=None, passing=("ok",)))
    assert added.entry["labels"] == list(LABELS)
    assert added.entry["input"]["normalize"] == "imagenet"
    assert re.match(r"found by --check: 10 of 10 answers agree, within \S+; next best ", added.evidence["normalize"])
    assert "# normalize: found by --check: 10 of 10" in line.read_text()


def test_scaling_function_is_found_for_a_given_fit(line, trained):
    added = adding(line, trained, replace(RIGHT, fit="stretched"))
    assert added.entry["input"]["fit"] == {"interpolation": "bicubic"}
    assert added.evidence["resample"].startswith("found by --check: 10 of 10 answers agree")


def test_stopped_search_refuses_the_model_and_reports_its_progress(line, trained):
    seconds = iter(range(10_000))
    with pytest.raises(WeightsUnclear, match=r"check: the search stopped after \d+ s with \d+ of at least \d+ tried"):
        add_model(
            line, trained / "graph.onnx", replace(RIGHT, normalize=None, fit=None, check=trained / "answers.json"),
            patience=Patience(lambda: float(next(seconds)), 5.0),
        )  # fmt: skip
    assert files_of(line) == {"line.yaml"}


def test_score_of_each_label_is_compared_as_its_graph_computes_it(line, trained):
    rows = json.loads((trained / "answers.json").read_text())
    for row in rows:
        best = max(row["scores"], key=row["scores"].get)
        one, other = (label for label in LABELS if label != best)
        row["scores"] |= {one: row["scores"][other], other: row["scores"][one]}
    (trained / "others.json").write_text(json.dumps(rows))
    with pytest.raises(WeightsRefused, match=r"others.json: \d of 10 answers agree"):
        adding(line, trained, RIGHT, "others.json")


def test_rounding_that_no_answer_decides_is_noted_as_assumed(line, trained, tmp_path):
    Image.open(trained / "0.png").resize((34, 20)).save(tmp_path / "odd.png")
    words = Wishes(
        components=("coil",),
        task="multiclass",
        labels=LABELS,
        normalize="imagenet",
        fit={"resize": 16, "interpolation": "bicubic"},
    )
    tried = add_model(line, trained / "graph.onnx", replace(words, image=tmp_path / "odd.png", prints=True))
    (tmp_path / "x.csv").write_text(f"file,label\nodd.png,{tried.tried.prediction.label}\n")
    added = add_model(line, trained / "graph.onnx", replace(words, check=tmp_path / "x.csv"))
    assert added.evidence["rounding"].startswith("assumed: no answer tells it from down")


def test_tie_of_labels_names_its_image(line, trained, tmp_path):
    text = "even (float[n,3,16,16] image) => (float[n,2] logits) { p = GlobalAveragePool(image)\n f = Flatten(p)\n"
    onnx.save(model_of(text + 'logits = MatMul(f, "w")}', w=[[0.0, 0.0]] * 3), tmp_path / "even.onnx")
    (tmp_path / "x.csv").write_text(f"file,label\n{trained}/3.png,ok\n{trained}/4.png,bent\n")
    with pytest.raises(OutputInvalid, match=r"3.png: its scores for ok and bent are equal, 0.5"):
        add_model(line, tmp_path / "even.onnx", replace(WISHES, labels=LABELS[:2], check=tmp_path / "x.csv"))


def test_undecided_input_asks_for_more_answers(line, trained, tmp_path):
    folder = tmp_path / "grey"
    folder.mkdir()
    Image.new("RGB", (30, 20), (124, 116, 104)).save(folder / "0.png")
    (folder / "answers.json").write_text(json.dumps([{"file": "0.png", "label": "ok"}]))
    with pytest.raises(WeightsUnclear, match=r"1 of 1 answers? agrees? .*and as well with .*tell them apart"):
        add_model(line, trained / "graph.onnx", replace(RIGHT, normalize=None, check=folder))
    assert files_of(line) == {"line.yaml", "grey/0.png", "grey/answers.json"}


def test_labels_that_no_answer_has_are_asked_for(line, trained):
    rows = json.loads((trained / "answers.json").read_text())
    best = [max(row["scores"], key=row["scores"].get) for row in rows]
    kept = [row for row, label in zip(rows, best, strict=True) if label == "ok"]
    (trained / "one.json").write_text(json.dumps(kept))
    with pytest.raises(
        WeightsUnclear, match=r"labels: no answer of one.json is \w+ or \w+, so their order is not shown"
    ):
        adding(line, trained, replace(RIGHT, labels=None, passing=("ok",)), "one.json")


def test_unexplained_answers_refuse_the_model(line, trained):
    rows = json.loads((trained / "answers.json").read_text())
    moved = [{**row, "scores": other["scores"]} for row, other in zip(rows, rows[5:] + rows[:5], strict=True)]
    (trained / "moved.json").write_text(json.dumps(moved))
    with pytest.raises(WeightsRefused, match=r"every value of labels, normalize, fit, .* that is served was tried"):
        adding(line, trained, RIGHT, "moved.json")


def test_scores_of_another_temperature_name_the_code_after_the_graph(line, trained):
    rows = json.loads((trained / "answers.json").read_text())
    for row in rows:
        odds = {label: score**0.5 for label, score in row["scores"].items()}
        row["scores"] = {label: each / sum(odds.values()) for label, each in odds.items()}
    (trained / "softened.json").write_text(json.dumps(rows))
    with pytest.raises(WeightsRefused, match="all labels agree, and scores do not: if code behind the model"):
        adding(line, trained, RIGHT, "softened.json")


def test_model_of_three_channels_that_saw_grey_images_is_found(line, trained, tmp_path):
    session, rows = InferenceSession(trained / "graph.onnx"), []
    for file in sorted(trained.glob("*.png")):
        grey = Image.open(file).convert("L").convert("RGB")
        odds = np.exp(session.run(None, {"image": seen(grey)})[0][0])
        rows.append({"file": str(file), "scores": dict(zip(LABELS, (odds / odds.sum()).tolist(), strict=True))})
    (tmp_path / "grey.json").write_text(json.dumps(rows))
    wishes = replace(RIGHT, normalize=None, passing=("ok",), check=tmp_path / "grey.json")
    numbers = NAMED["imagenet"]
    expected = {"mean": [*numbers.mean], "std": [*numbers.std], "channels": "grey"}
    assert add_model(line, trained / "graph.onnx", wishes).entry["input"]["normalize"] == expected


def test_blind_model_is_refused(line, trained, tmp_path):
    text = "blind (float[n,3,16,16] image) => (float[n,3] logits) { p = GlobalAveragePool(image)\n f = Flatten(p)\n"
    onnx.save(
        model_of(text + 'z = Mul(f, "zero")\n logits = Add(z, "bias")}', zero=[0.0], bias=[2.0, 0, 1]),
        tmp_path / "b.onnx",
    )
    (tmp_path / "x.csv").write_text("file,label\n" + "".join(f"{trained}/{number}.png,ok\n" for number in range(4)))
    with pytest.raises(WeightsRefused, match=r"the model is blind: its answer is the same on all of 4 images: ok 0.66"):
        add_model(line, tmp_path / "b.onnx", replace(WISHES, check=tmp_path / "x.csv"))


def test_labels_of_other_components_are_left_out_and_unknown_ones_refused(line, trained, tmp_path):
    (tmp_path / "x.csv").write_text(f"file,label,component\n{trained}/0.png,ok,plate\n")
    with pytest.raises(ConfigError, match="answers of other components alone"):
        add_model(line, trained / "graph.onnx", replace(RIGHT, check=tmp_path / "x.csv"))
    (tmp_path / "x.csv").write_text(f"file,label\n{trained}/0.png,fine\n")
    with pytest.raises(ConfigError, match=r"0.png has the label fine, and cls/graph has ok, bent, gone"):
        add_model(line, trained / "graph.onnx", replace(RIGHT, check=tmp_path / "x.csv"))


def test_trial_without_answers_is_called_a_trial_and_anyway_is_a_usage_error(line, trained):
    words = ["experts", "add", str(line), str(trained / "graph.onnx"), "--component", "coil", "--task", "multiclass"]
    words += ["--labels", ",".join(LABELS), "--normalize", "imagenet", "--fit", "{interpolation: bilinear}"]
    done = coserve(*words, "--print")
    assert "s: that shows only that it runs\n" in done.stderr
    assert coserve(*words, "--anyway", "because").exit_code == 2
    done = coserve(*words[:-1], "{interpolation: bicubic}", "--check", trained / "answers.json")
    assert "compared with answers.json: 10 of 10 answers agree\n  bent " in done.stdout


BLUE, GREEN = 2, 1
CELLS = """cells (float[1, 3, 64, 64] image) => (float[1, 64, 6] rows) {
    means = AveragePool <kernel_shape = [8, 8], strides = [8, 8]> (image)
    flat = Reshape (means, extents)
    turned = Transpose <perm = [0, 2, 1]> (flat)
    scaled = Div (turned, most)
    scores = Gather <axis = 2> (scaled, first)
    rows = Concat <axis = 2> (places, scores)
}"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """A detector as YOLOX answers with decoded boxes, which nothing in its file shows; and what it finds."""
    folder, random = tmp_path_factory.mktemp("cells"), np.random.default_rng(0)
    down, right = np.divmod(np.arange(64), 8)
    places = np.stack((right * 8.0 + 4, down * 8.0 + 4, np.full(64, 8.0), np.full(64, 8.0)), axis=1)[None]
    graph = model_of(CELLS, extents=np.array([1, 3, 64]), most=np.array(255.0), first=np.array([0, 1]), places=places)
    onnx.save(graph, folder / "graph.onnx")
    rows = []
    for number in range(6):
        shades = random.integers(0, 60, (8, 8, 3))
        shades[(random.random((8, 8)) < 0.1) & (number != 0)] = (10, 220, 200)
        Image.fromarray(shades.repeat(8, 0).repeat(8, 1).astype(np.uint8)).save(folder / f"{number}.png")
        scores = (shades[..., BLUE] / 255 * shades[..., GREEN] / 255).flatten()
        found = [(scores[at], right[at] * 8, down[at] * 8) for at in np.flatnonzero(scores > 0.25)]
        boxes = [
            {"label": "bent", "score": score, "left": int(x), "top": int(y), "right": int(x) + 8, "bottom": int(y) + 8}
            for score, x, y in found
        ]
        rows.append({"file": f"{number}.png", "boxes": boxes})
    (folder / "answers.json").write_text(json.dumps(rows))
    return folder


ONE = Wishes(components=("coil",), kind="detector", passing=("bent",))


def test_meaning_of_boxes_is_found_by_the_labelled_answers(line, cells):
    added = adding(line, cells, ONE)
    assert (added.entry["detector"], added.entry["labels"]) == ("yolox-decoded", ["bent"])
    assert added.evidence["detector"].startswith("found by --check: 6 of 6 answers agree; not with")
    assert read_line(line, {}).catalog.experts["det/graph"].detector == "yolox-decoded"


def test_boxes_of_unknown_meaning_are_asked_for_with_the_differences(line, cells):
    rows = json.loads((cells / "answers.json").read_text())
    for box in (box for row in rows for box in row["boxes"]):
        box["score"] *= 0.5
    (cells / "other.json").write_text(json.dumps(rows))
    with pytest.raises(WeightsUnclear) as refused:
        adding(line, cells, ONE, "other.json")
    with pytest.raises(WeightsRefused, match=r"normalize, fit, .* was tried"):
        adding(line, cells, replace(ONE, detector="yolov5", labels=("bent",)), "other.json")
    assert "--detector" in refused.value.missing["detector"]
    assert "yolox-decoded: no value that is served explains other.json" in refused.value.missing["check"]


def test_pixels_of_a_one_channel_graph_are_found(line, tmp_path):
    text = """mono (float[n, 1, 8, 8] image) => (float[n, 2] logits) {
        mean = GlobalAveragePool(image)
        flat = Flatten(mean)
        logits = Mul(flat, sides)
    }"""
    onnx.save(model_of(text, sides=np.array([[2.0, -2.0]])), tmp_path / "graph.onnx")
    rows = []
    for shade in (0, 40, 90, 120, 180, 250):
        Image.new("L", (8, 8), shade).save(tmp_path / f"{shade}.png")
        bright = 1 / (1 + np.exp(-4 * (shade / 255 - 0.5) / 0.5))
        rows.append({"file": f"{shade}.png", "scores": {"bright": bright, "dark": 1 - bright}})
    (tmp_path / "answers.json").write_text(json.dumps(rows))
    wishes = Wishes(
        components=("coil",), task="multiclass", labels=("bright", "dark"), passing=("dark",), fit="stretched",
        resample="bilinear",
    )  # fmt: skip
    added = adding(line, tmp_path, wishes)
    assert added.entry["input"]["normalize"] == {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": 1, "channels": "grey"}
