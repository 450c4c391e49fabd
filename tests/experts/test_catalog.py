"""The catalog: what a line may say about experts and routes, and how it is told what is wrong."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torchvision
from onnx import TensorProto, helper, save_model

from experts.architectures import CLASSIFIERS, DETECTORS
from experts.catalog import build_catalog
from experts.document import read_document
from experts.errors import ConfigError
from experts.expert import Expert, Fit, InputSpec, Normalization, Orientation, Padding, Precision, Task
from experts.sections.experts import CatalogSections
from experts.sections.problems import catalog_problems

GOOD = """\
experts:
  cls/r:
    architecture: resnet18
    weights: weights/r.safetensors
    labels: [ok, missing]
    input: {size: [64, 48]}
    stem: 3x3
  cls/c: {architecture: resnet50, weights: c.safetensors, labels: [ok, bad], input: {size: [224, 224]}, pin: true}
  det/a: {architecture: yolov5m, weights: /w/a.safetensors, labels: [aligned, shifted], input: {size: [640, 640]}}
routes:
  resistor-0402:
    - {expert: cls/r, pass: [ok], min_score: 0.5}
    - {expert: det/a, pass: [aligned]}
  "0402":
    - {expert: cls/c, pass: [ok]}
"""


def catalog_of(folder, text):
    file = folder / "line.yaml"
    file.write_text(text)
    document = read_document(file)
    sections = document.validate(CatalogSections)
    if problems := list(catalog_problems(sections, document)):
        raise ConfigError.of(problems)
    return build_catalog(sections, document)


def problems_of(folder, text):
    with pytest.raises(ConfigError) as caught:
        catalog_of(folder, text)
    return [str(problem).removeprefix(f"{folder}/") for problem in caught.value.problems]


def test_valid_file_becomes_experts_and_a_graph(tmp_path):
    catalog = catalog_of(tmp_path, GOOD)
    assert catalog.experts["cls/r"] == Expert(
        id="cls/r", architecture="resnet18", weights=tmp_path / "weights/r.safetensors", labels=("ok", "missing"),
        input=InputSpec(height=64, width=48, normalize="imagenet"), stem="3x3",
    )  # fmt: skip
    assert catalog.experts["cls/c"].pin
    assert catalog.experts["det/a"].weights == Path("/w/a.safetensors")
    assert (catalog.experts["det/a"].input.normalize, catalog.graph.first_expert("0402")) == ("unit", "cls/c")
    assert catalog.graph.subsequents("cls/r") == ("det/a",)
    assert (catalog.graph.routes["resistor-0402"][0].min_score, len(catalog.sha256)) == (0.5, 64)


ANOMALY = GOOD.replace(
    "routes:",
    "  anomaly/s: {architecture: onnx, weights: s.onnx, task: anomaly, threshold: 2, input: {size: [64, 64]}}\nroutes:",
)


def test_anomaly_expert_has_two_labels_and_a_threshold(tmp_path):
    expert = catalog_of(tmp_path, ANOMALY).experts["anomaly/s"]
    assert (expert.task, expert.threshold, expert.labels) == (Task.ANOMALY, 2.0, ("ok", "anomalous"))
    named = ANOMALY.replace("threshold: 2", "labels: [good, odd]")
    expert = catalog_of(tmp_path, named).experts["anomaly/s"]
    assert (expert.threshold, expert.labels) == (None, ("good", "odd"))


def test_all_wrong_keys_are_reported_at_once(tmp_path):
    text = GOOD.replace("resnet18", "resnet81").replace("pin: true", "pni: true").replace("[64, 48]", "64")
    assert len(problems_of(tmp_path, text)) == 3


def test_cycle_over_two_routes_names_both_and_their_lines(tmp_path):
    text = GOOD + "  back:\n    - {expert: det/a, pass: [aligned]}\n    - {expert: cls/r, pass: [ok]}\n"
    (problem,) = problems_of(tmp_path, text)
    assert "experts depend on one another in a circle" in problem
    assert "resistor-0402 (line 11)" in problem
    assert "back (line 16)" in problem


LLM = """\
experts:
  llm/code: {architecture: llm, weights: models/code-1.5, precision: bf16, moe_cache: 2GiB, pin: true}
  llm/router: {architecture: llm, weights: /m/router, labels: [code, maths]}
"""


def test_language_models_need_no_labels_input_or_routes(tmp_path):
    catalog = catalog_of(tmp_path, LLM)
    code = Expert(
        "llm/code", "llm", tmp_path / "models/code-1.5", (), None, pin=True,
        precision=Precision.BF16, moe_cache_bytes=2 * 2**30,
    )  # fmt: skip
    assert catalog.experts["llm/code"] == code
    assert catalog.experts["llm/code"].takes_texts
    assert catalog.experts["llm/router"].labels == ("code", "maths")
    assert catalog.graph.routes == {}


def test_image_experts_need_routes(tmp_path):
    text = GOOD.partition("routes:")[0]
    assert "routes: is missing - component type" in problems_of(tmp_path, text)[0]
    assert "routes: is missing - component type" in problems_of(tmp_path, text + "routes: {}\n")[0]


def test_known_classifiers_are_torchvisions_own():
    assert sorted(CLASSIFIERS) == sorted(torchvision.models.list_models(module=torchvision.models))


def test_every_detection_yaml_of_ultralytics_is_a_known_detector():
    package = find_spec("ultralytics")
    assert package.origin is not None
    models = Path(package.origin).parent / "cfg" / "models"
    other_tasks = ("-cls", "-seg", "-pose", "-obb", "-sem", "-depth", "-world", "yoloe", "rtdetr")
    names = [file.stem for file in models.rglob("*.yaml") if not any(task in file.stem for task in other_tasks)]
    assert len(names) > 20
    assert [name for name in names if not DETECTORS.fullmatch(name)] == []


@pytest.mark.parametrize("name", ["yolov5q", "yolov8m-seg", "yolo", "rtdetr", "rtdetr-l"])
def test_other_models_of_ultralytics_are_no_detectors(name):
    assert not DETECTORS.fullmatch(name)


MULTILABEL = GOOD.replace(
    "routes:",
    "  cls/bce: {architecture: onnx, weights: b.onnx, task: multilabel, labels: [bent, gone], otherwise: fine,"
    " thresholds: {gone: 0.3}, input: {size: [64, 64]}}\nroutes:\n"
    "  bce: [{expert: cls/bce, pass: [fine, bent]}]",
)

WRONG = {  # of a line: what is replaced, with what, and what is told of it
    GOOD: [
        ("resnet18", "resnet81", "line.yaml:3:5: experts.cls/r.architecture: no architecture 'resnet81' - did you mea"),
        ("resnet18", "moe-llm", "line.yaml:3:5: experts.cls/r.architecture: no architecture 'moe-llm' - write llm"),
        ("[ok, missing]", "[]", "line.yaml:5:5: experts.cls/r.labels: List should have at least 1 item"),
        ("[ok, missing]", "[ok, ok]", "line.yaml:5:5: experts.cls/r.labels: 'ok' is there twice"),
        ("[ok, missing]", "[ok, '']", "line.yaml:5:5: experts.cls/r.labels: a label is neither empty"),
        ("[ok, missing]", "[ok, 1]", "line.yaml:5:18: experts.cls/r.labels[1]: Input should be a valid string, not 1"),
        ("[64, 48]", "[64]", "line.yaml:6:13: experts.cls/r.input.size[1]: is missing"),
        ("[64, 48]", "[64, 0]", "line.yaml:6:24: experts.cls/r.input.size[1]: Input should be greater than or equal"),
        ("stem: 3x3", "stem: 5x5", "line.yaml:7:5: experts.cls/r.stem: Input should be '3x3', not '5x5'"),
        ("[640, 640]}", "[640, 640]}, stem: 3x3", "experts.det/a: stem is for classifiers, not for yolov5m"),
        ("pin: true", "pin: NO", "line.yaml:8:"),
        ("  cls/c:", "  c:", "line.yaml:8:3: experts.c: 'c' is not an expert id - write kind/name"),
        ("  cls/c:", "  ../c:", "line.yaml:8:3: experts.../c: '../c' is not an expert id"),
        ("c.safetensors", "c.pt", "line.yaml:8:3: experts.cls/c: weights .pt are a pickle - convert them once with `c"),
        ("c.safetensors", "c.onnx", "line.yaml:8:3: experts.cls/c: weights of resnet50 must be a .safetensors file"),
        ("c.safetensors", "''", "line.yaml:8:35: experts.cls/c.weights: an empty path"),
        ("[640, 640]", "[640, 650]", "line.yaml:9:3: experts.det/a: a detector's input size must be multiples of 32"),
        ("det/a, pass", "det/b, pass", "line.yaml:13:8: routes.resistor-0402[1].expert: no expert 'det/b' - did you m"),
        ("pass: [aligned]", "pass: [alinged]", "routes.resistor-0402[1].pass: det/a has no label 'alinged' - did you"),
        ("pass: [aligned]", "pass: []", "routes.resistor-0402[1].pass: List should have at least 1 item"),
        ("pass: [aligned]", "min_score: 0.5", "line.yaml:13:7: routes.resistor-0402[1].pass: is missing - labels that"),
        ("min_score: 0.5", "min_score: 1.5", "routes.resistor-0402[0].min_score: Input should be less than or equal"),
        ("min_score: 0.5", "min_score: true", "routes.resistor-0402[0].min_score: Input should be a valid number"),
        ("{expert: det/a, pass: [aligned]}", "{expert: cls/r, pass: [ok]}", "cls/r is already step 1 of this route"),
        ('  "0402":', "  a/b:", "line.yaml:14:3: routes.a/b: 'a/b' is not a component type"),
        ("    stem: 3x3", "    stm: 3x3", "line.yaml:7:5: experts.cls/r.stm: unknown key - did you mean 'stem'?"),
        ("[ok, missing]", "{good: ok, bad: 1}", "experts.cls/r.labels[1]: Input should be a valid string, not 1"),
        ("[ok, missing]", "{OK: missing, ng: ok}", "experts.cls/r.labels: 'ok' is the word for another label"),
        ("routes:", "route:", "line.yaml:10:1: route: unknown key - did you mean 'routes'?"),
    ],
    ANOMALY: [
        ("threshold: 2", "labels: {a: ok, b: ng}", "experts.anomaly/s.labels: words for the labels of a file are for"),
        ("threshold: 2", "labels: [ok]", "line.yaml:10:3: experts.anomaly/s: labels of task anomaly are two"),
        ("threshold: 2", "threshold: .inf", "experts.anomaly/s.threshold: Input should be a valid number, not '.inf'"),
        ("threshold: 2", "threshold: high", "experts.anomaly/s.threshold: Input should be a valid number"),
        ("task: anomaly, ", "labels: [ok, odd], ", "experts.anomaly/s: threshold is for task anomaly - write `task:"),
        ("task: anomaly", "task: anomalies", "experts.anomaly/s.task: Input should be 'anomaly' or 'multilabel', not"),
        ("    stem: 3x3", "    task: anomaly", "experts.cls/r: task anomaly is for onnx, not for resnet18 - remove it"),
    ],
    GOOD.replace("experts:\n", LLM): [
        (
            "models/code-1.5",
            "code.safetensors",
            "experts.llm/code: weights of llm are a Hugging Face directory or a .gguf ",
        ),
        ("precision: bf16", "input: {size: [8, 8]}", "experts.llm/code: input is for images, and llm takes texts - re"),
        ("pin: true", "stem: 3x3", "experts.llm/code: stem is for images, and llm takes texts - remove it"),
        ("precision: bf16", "precision: fp8", "experts.llm/code.precision: Input should be 'auto', 'fp32', 'bf16', 'f"),
        ("moe_cache: 2GiB", "moe_cache: 2", "experts.llm/code.moe_cache: '2' is not a size"),
        ("stem: 3x3", "precision: bf16", "experts.cls/r: precision is for llm, not for resnet18 - remove it"),
        ("moe_cache: 2GiB", "adapter: a, parallel: {expert: 2}", "experts.llm/code: parallel takes no adapter - rem"),
        ("stem: 3x3", "adapter: a", "experts.cls/r: adapter is for llm, not for resnet18 - remove it"),
        ("stem: 3x3", "moe_cache: 1GiB", "experts.cls/r: moe_cache is for llm, not for resnet18 - remove it"),
        ("    labels: [ok, missing]\n", "", "line.yaml:4:3: experts.cls/r.labels: is missing - what the outputs mean"),
        ("    input: {size: [64, 48]}\n", "", "line.yaml:4:3: experts.cls/r.input: is missing - the pixels it wants"),
        ("expert: det/a, pass: [aligned]", "expert: llm/code, pass: [x]", "llm/code takes texts, not images - name it"),
        ("size: [64, 48]", "sise: [64, 48]", "experts.cls/r.input.sise: unknown key - did you mean 'size'?"),
    ],
    MULTILABEL: [
        ("    labels: [ok, missing]", "    labels: [ok]", "experts.cls/r: one label leaves a softmax nothing to choos"),
        ("    stem: 3x3", "    otherwise: ok", "experts.cls/r: otherwise is for task multilabel - write `task: multil"),
        ("    stem: 3x3", "    thresholds: {ok: 0.5}", "experts.cls/r: thresholds is for task multilabel"),
        ("    stem: 3x3", "    iou: 0.5", "experts.cls/r: iou is for detectors - remove it"),
        ("otherwise: fine", "otherwise: gone", "experts.cls/bce: otherwise is 'gone', which is a label already"),
        ("otherwise: fine", "otherwise: nothing-found", "otherwise is 'nothing-found', which is a label already"),
        ("{gone: 0.3}", "{gnoe: 0.3}", "experts.cls/bce: thresholds: there is no label 'gnoe' - did you mean 'gone'?"),
        ("{gone: 0.3}", "{gone: 1}", "experts.cls/bce.thresholds.gone: Input should be less than 1, not 1"),
        ("{gone: 0.3}", "{gone: 0}", "experts.cls/bce.thresholds.gone: Input should be greater than 0, not 0"),
        ("[fine, bent]", "[ok]", "routes.bce[0].pass: cls/bce has no label 'ok'"),
        ("[fine, bent]", "[nothing-found]", "routes.bce[0].pass: cls/bce has no label 'nothing-found'"),
        ("task: multilabel, ", "task: anomaly, ", "experts.cls/bce: otherwise is for task multilabel"),
        ("onnx, weights: b.onnx", "yolov8n, weights: b.safetensors", "is for classifiers, not"),
        ("onnx, weights: b.onnx", "rtdetr-l, weights: b.safetensors", "export it to ONNX, and"),
    ],
}


@pytest.mark.parametrize(("text", "good", "bad", "expected"), [(text, *row) for text in WRONG for row in WRONG[text]])
def test_wrong_key_is_reported_with_file_line_and_remedy(tmp_path, text, good, bad, expected):
    """Where the weights are a pickle."""
    assert good in text
    assert any(expected in problem for problem in problems_of(tmp_path, text.replace(good, bad)))


def test_multilabel_expert_has_a_threshold_per_label_and_a_word_for_no_label(tmp_path):
    expert = catalog_of(tmp_path, MULTILABEL).experts["cls/bce"]
    assert (expert.task, expert.labels, expert.otherwise) == (Task.MULTILABEL, ("bent", "gone"), "fine")
    assert (expert.thresholds, expert.answers) == ((("gone", 0.3),), ("bent", "gone", "fine"))
    torch_one = MULTILABEL.replace(
        "architecture: onnx, weights: b.onnx", "architecture: resnet18, weights: b.safetensors"
    )
    assert catalog_of(tmp_path, torch_one).experts["cls/bce"].task is Task.MULTILABEL


def test_detector_has_its_own_confidence_and_overlap(tmp_path):
    text = GOOD.replace("labels: [aligned,", "confidence: 0.4, iou: 0.7, labels: [aligned,")
    assert text != GOOD
    expert = catalog_of(tmp_path, text).experts["det/a"]
    assert (expert.confidence, expert.iou) == (0.4, 0.7)


NEW = "  cls/new: {architecture: resnet34, weights: n.safetensors, labels: [missing, ok], input: {size: [64, 64]}%s}\n"


def shadowed(shadow, new=""):
    """GOOD, with a shadow of cls/r, and another expert, on no route."""
    text = GOOD.replace("    stem: 3x3\n", f"    stem: 3x3\n    shadow: {shadow}\n")
    return text.replace("routes:\n", NEW % new + "routes:\n")


def test_shadow_is_in_the_graph_and_not_part_of_the_expert(tmp_path):
    """So an expert that is given one is the same, and a reload does not replace it."""
    catalog = catalog_of(tmp_path, shadowed("cls/new"))
    assert (catalog.graph.shadows, catalog.graph.in_shadow) == ({"cls/r": "cls/new"}, {"cls/new"})
    assert catalog.experts["cls/r"] == catalog_of(tmp_path, GOOD).experts["cls/r"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (shadowed("cls/nwe"), "no expert 'cls/nwe' - did you mean 'cls/new'?"),
        (shadowed("new"), "'new' is not an expert id"),
        (shadowed("cls/r"), "an expert is not its own shadow"),
        (shadowed("cls/c").replace("[ok, bad]", "[ok, missing]").replace(", pin: true", ""), "cls/c is on route 0402"),
        (
            shadowed("cls/new", ", task: anomaly").replace("resnet34, weights: n.safetensors", "onnx, weights: n.onnx"),
            "only the same task can be compared",
        ),
        (shadowed("cls/new", ", shadow: cls/c"), "cls/new has a shadow itself"),
        (shadowed("cls/new", ", pin: true"), "cls/new is pinned"),
        (shadowed("cls/new").replace("[missing, ok]", "[ok, lost]"), "only the same can be compared"),
        (
            shadowed("cls/new").replace("pin: true", "shadow: cls/new").replace("[ok, bad]", "[ok, missing]"),
            "is the shadow of cls/r already",
        ),
        (shadowed("llm/x").replace("routes:", "  llm/x: {architecture: llm, weights: w}\nroutes:"), "llm takes texts"),
    ],
)
def test_invalid_shadow_is_reported_with_its_place(tmp_path, text, reason):
    assert any("shadow: " in problem and reason in problem for problem in problems_of(tmp_path, text))


@pytest.mark.parametrize(("normalize", "expected"), [("", "unit"), (", normalize: imagenet", "imagenet")])
def test_onnx_detectors_get_images_in_their_files_form(tmp_path, normalize, expected):
    """One that is not there, or is broken, is described as the line file has it: it is told of when it is packed."""
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 64, 64])
    for name, shape in (("a", [1, 6, 84]), ("c", [1, 2])):
        answers = helper.make_tensor_value_info("answers", TensorProto.FLOAT, shape)
        save_model(helper.make_model(helper.make_graph([], "graph", [images], [answers])), tmp_path / f"{name}.onnx")
    (tmp_path / "b.onnx").write_bytes(b"broken")
    text = "experts:\n" + "".join(
        f"  det/{name}: {{architecture: onnx, weights: {name}.onnx, labels: [ok, bad], "
        f"{'detector: yolov8, ' * (name == 'a')}input: {{size: [64, 64]{normalize}}}}}\n"
        for name in "abcd"
    )
    experts = catalog_of(tmp_path, text + "routes:\n  r: [{expert: det/a, pass: [ok]}]\n").experts
    assert experts["det/a"].input == InputSpec(64, 64, expected, Fit.LETTERBOXED, orientation=Orientation.EXIF)
    for other in "bcd":
        assert experts[f"det/{other}"].input == InputSpec(64, 64, "imagenet", Fit.STRETCHED)


def test_nothing_found_passes_only_if_its_detector_allows_it(tmp_path):
    asked = GOOD.replace("pass: [aligned]", "pass: [nothing-found]", 1)
    with pytest.raises(ConfigError, match="nothing-found passes only by `nothing_found: pass` of det/a"):
        catalog_of(tmp_path, asked)
    granted = asked.replace("det/a: {", "det/a: {nothing_found: pass, ")
    (*_, step) = catalog_of(tmp_path, granted).components["resistor-0402"]
    assert step.passing == {"nothing-found"}
    with pytest.raises(ConfigError, match="nothing_found is for detectors"):
        catalog_of(tmp_path, GOOD.replace("cls/c: {", "cls/c: {nothing_found: pass, "))
    with pytest.raises(ConfigError, match="passes what has no box, and so no score - remove min_score"):
        catalog_of(tmp_path, granted.replace("pass: [nothing-found]", "pass: [nothing-found], min_score: 0.5", 1))


def with_input(told):
    return GOOD.replace("input: {size: [64, 48]}", f"input: {{size: [64, 48], {told}}}")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("normalize: {mean: [0.5, 0.5, 0.5], std: [0.5, 0.25, 1]}", Normalization((0.5, 0.5, 0.5), (0.5, 0.25, 1.0))),
        ("normalize: {mean: [123.675, 116.28, 103.53], std: [58.395, 57.12, 57.375], scale: 255, channels: bgr}",
         Normalization((123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 255, "bgr")),
        ("normalize: {mean: [0, 0, 0], std: [1, 1, 1]}", "unit"),
        ("normalize: unit", "unit"),
    ],
)  # fmt: skip
def test_mean_and_deviation_may_be_single_numbers(tmp_path, told, expected):
    assert catalog_of(tmp_path, with_input(told)).experts["cls/r"].pixels.normalize == expected


def test_expert_may_see_only_the_middle_of_an_image(tmp_path):
    told = "fit: {resize: 72, crop: [64, 48], interpolation: bicubic}"
    expected = InputSpec(64, 48, "imagenet", Fit.CROPPED, 72, "bicubic")
    assert catalog_of(tmp_path, with_input(told)).experts["cls/r"].pixels == expected
    assert catalog_of(tmp_path, with_input("fit: stretched")).experts["cls/r"].pixels == InputSpec(64, 48)


def test_image_may_be_padded_or_stretched_as_by_a_named_library(tmp_path):
    told = "fit: {pad: top-left, color: [1, 2, 3], rounding: down, interpolation: opencv-linear}"
    expected = InputSpec(
        64, 48, fit=Fit.PADDED, interpolation="opencv-linear", padding=Padding("top-left", (1, 2, 3)), rounding="down"
    )
    assert catalog_of(tmp_path, with_input(told)).experts["cls/r"].pixels == expected
    stretched = catalog_of(tmp_path, with_input("fit: {interpolation: torch-bilinear}")).experts["cls/r"].pixels
    assert stretched == InputSpec(64, 48, interpolation="torch-bilinear")
    assert expected.text != stretched.text != InputSpec(64, 48).text


@pytest.mark.parametrize(
    ("told", "key", "reason"),
    [
        ("normalize: caffe", "normalize", "'caffe' is no name - write imagenet, unit, or {mean: [...], std: [...]}"),
        ("normalize: {mean: [0.5, 0.5, 0.5]}", "normalize.std", "is missing"),
        ("normalize: {mean: [0.5, 0.5, 0.5], std: [0.5, 0, 0.5]}", "normalize.std[1]", "greater than 0"),
        ("normalize: {mean: [0.5, .nan, 0.5], std: [1, 1, 1]}", "normalize.mean[1]", "valid number"),
        ("normalize: {mean: [0.5, 0.5], std: [1, 1, 1]}", "normalize.mean[2]", "is missing"),
        ("normalize: {mean: [124, 116, 104], std: [58, 57, 57]}", "normalize", "not of pixels from 0 to 1 - write `sc"),
        ("normalize: {mean: [0, 0, 0], std: [1, 1, 1], scael: 255}", "normalize.scael", "did you mean 'scale'?"),
        ("fit: {crop: [64, 48]}", "fit", "crop is cut from a scaled image - write `resize:` beside it, or remove it"),
        ("fit: {pad: center, resize: 72}", "fit", "an image is either cut or padded - remove `pad`, or `resize` and"),
        ("fit: {color: 114}", "fit", "color is of the padding - write `pad:` beside it, or remove it"),
        ("fit: {pad: left}", "fit.pad", "'center', 'top-left' or 'right'"),
        ("fit: {resize: 72, crop: 64}", "input", "fit.crop 64 is not the size [64, 48] - make them the same"),
        ("fit: {resize: [72, 40]}", "input", "fit.resize (72, 40) is less than the size [64, 48] - raise it"),
        ("fit: {resize: 0}", "fit.resize", "0 is neither pixels nor [height, width] - write 1 to 8192"),
        ("fit: {resize: 72, interpolation: cubic}", "fit.interpolation", "'opencv-cubic'"),
        ("orientation: up", "orientation", "'stored' or 'exif'"),
        ("bits: 8", "bits", "greater than or equal to 9"),
        ("window: [4095, 0]", "input", "window [4095, 0] is empty - write [low, high], the lower value first"),
        ("window: [0, 65536]", "window[1]", "less than or equal to 65535"),
        ("bits: 12, window: [0, 4095]", "input", "bits and window both say what becomes 0 to 255 - remove one"),
    ],
)
def test_wrong_input_is_reported_at_its_key(tmp_path, told, key, reason):
    (problem,) = problems_of(tmp_path, with_input(told))
    assert problem.startswith("line.yaml:6:") or "line.yaml" in problem
    assert f"{key}: " in problem
    assert reason in problem


@pytest.mark.parametrize("told", ["fit: {resize: 640}", "normalize: {mean: [0.5, 0.5, 0.5], std: [1, 1, 1]}"])
def test_detector_takes_no_fit_or_normalisation(tmp_path, told):
    (problem,) = problems_of(tmp_path, GOOD.replace("{size: [640, 640]}", f"{{size: [640, 640], {told}}}"))
    assert "images of yolov5m are letterboxed, and pixels 0 to 1 - remove `fit` and `normalize`" in problem


def test_images_are_turned_for_ultralytics_unless_the_line_overrides_it(tmp_path):
    found = catalog_of(tmp_path, GOOD).experts
    assert [found[each].pixels.orientation for each in ("cls/r", "det/a")] == [Orientation.STORED, Orientation.EXIF]
    text = with_input("orientation: exif").replace("[640, 640]", "[640, 640], orientation: stored")
    found = catalog_of(tmp_path, text).experts
    assert [found[each].pixels.orientation for each in ("cls/r", "det/a")] == [Orientation.EXIF, Orientation.STORED]


def test_unstated_bit_depth_keeps_digests_of_older_thresholds_and_calibrations(tmp_path):
    plain, deep = (
        catalog_of(tmp_path, with_input(told)).experts["cls/r"].pixels for told in ("fit: stretched", "bits: 12")
    )
    assert "bits" not in plain.text
    assert "window" not in plain.text
    assert '"bits": 12' in deep.text


def test_fit_that_crops_is_refused_for_an_anomaly_expert(tmp_path):
    text = GOOD.replace("resnet18", "onnx, task: anomaly").replace(
        "    architecture: onnx, task: anomaly\n", "    architecture: onnx\n    task: anomaly\n"
    )
    text = text.replace("r.safetensors", "r.onnx").replace("    stem: 3x3\n", "")
    text = text.replace("size: [64, 48]", "size: [64, 48], fit: {resize: 72}")
    (problem,) = problems_of(tmp_path, text)
    assert "fit is not for task anomaly, whose map lies over the whole image" in problem
    catalog_of(tmp_path, text.replace("72", "[64, 48], interpolation: bicubic"))
