"""The table of docs/models.md: for each of its cells a trainer's file, added to a line or refused.

A cell says yes or no, and that is what happens; each row has files.
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from torch import nn

from experts.backends.vision.classifier import build_trainable
from tests.experts.backends.onnx.test_detections import as_yolov5, edited
from tests.experts.onnx_text import model_of
from tests.trainers import torchvision_models, ultralytics_models
from tests.trainers.test_torch import FITTED
from tests.trainers.torchvision_models import ssd_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CLASSES = ("--labels", "ok,missing,tombstone")
NORMALIZED = ("--normalize", "imagenet", *FITTED)
IMAGENET = (*NORMALIZED, "--task", "multiclass")
SIZED = ("--size", "64x64", *IMAGENET)
PASSING = ("--pass", "aligned")
PLAIN = ("--variant", "plain")
FIRST = ("--pass", "0")  # of models that nothing was trained with: their labels are numbers


def cells():
    """Each row of the table by its name: its cells on weights and on an ONNX export."""
    table = PAGE.read_text("utf-8").partition("## What is served")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {name: {"weights": weights, "export": export} for name, weights, export in rows[2:]}


# functions that make a file, from the tools below and a path


def file_of(suffix, write):
    """``write``: writes the file that it is given."""

    def make(tools, file):
        file = file.with_suffix(suffix)
        write(file)
        return file

    return make


def graph_of(network):
    return file_of(
        ".onnx",
        lambda file: torch.onnx.export(network.eval(), (torch.zeros(1, 3, 64, 64),), file, verbose=False),
    )


class Map(nn.Module):
    """Answers with a map alone, as exports of Anomalib before version 2."""

    def forward(self, image):
        return image.mean(dim=1, keepdim=True)


class Score(nn.Module):
    def forward(self, image):
        return image.mean(dim=(1, 2, 3))


def weights_of(build, *words, **options):
    return file_of(".pt", lambda file: torch.save(build(*words, **options).state_dict(), file))


SIGMOIDS = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Sigmoid())
one_output = weights_of(build_trainable, "resnet18", 1)


def by_ultralytics(name):
    return file_of(".pt", partial(ultralytics_models.save, name))


def made_by(trainer, name, group="more"):
    return lambda tools, file: tools.made_by(trainer, group) / name


def exported_resnet(tools, file):
    network = torchvision_models.trained("resnet18", tools.images)
    make = lambda folder: torchvision_models.export(network, folder / "graph.onnx")  # noqa: E731
    return tools.made_once("resnet18-exported", make) / "graph.onnx"


def trained_yolo(tools, file):
    return tools.made_once("yolov8n", partial(ultralytics_models.train, "yolov8n")) / "best.pt"


def exported_yolo(tools, file):
    best = trained_yolo(tools, file)
    make = lambda folder: ultralytics_models.export(best, folder / "best.onnx", nms=False)  # noqa: E731
    return tools.made_once("yolov8n-exported", make) / "best.onnx"


def exported_yolov5(tools, file):
    """Answers as its exports have them, made from ultralytics'."""
    graph = file.with_suffix(".onnx")
    graph.write_bytes(exported_yolo(tools, file).read_bytes())
    return edited(graph, as_yolov5, {"stride": "32", "names": str(list(ultralytics_models.LABELS))})


def exported_by_ultralytics(name):
    def make(tools, file):
        best = ultralytics_models.save(name, file.with_suffix(".pt"))
        ultralytics_models.export(best, file.with_suffix(".onnx"), nms=False)
        return file.with_suffix(".onnx")

    return make


def exported_rtdetr(tools, file):
    labels = ("ok", "missing", "shifted")
    return tools.made_once("rtdetr", partial(ultralytics_models.export_rtdetr, labels=labels)) / "rtdetr.onnx"


class Anchored(nn.Module):
    """As YOLOv5's own repository has it, whose code cannot be installed beside ultralytics': a head with anchors."""

    def __init__(self):
        super().__init__()
        stem = nn.ModuleDict({"conv": nn.Conv2d(3, 16, 3)})
        head = nn.ModuleDict({"m": nn.ModuleList([nn.Conv2d(16, 24, 1)])})
        self.model, self.names = nn.Sequential(stem, head), list(ultralytics_models.LABELS)


def save_yolov5(file):
    """best.pt, as its train.py strips it at its end."""
    torch.save({"epoch": -1, "model": Anchored().half(), "ema": None, "optimizer": None, "opt": {"imgsz": 640}}, file)


def save_ssd(file):
    torchvision_models.export_ssd(ssd_of(2), torch.rand(3, 64, 64), file)


def save_language_model(file):
    text = "test (int64[n,length] input_ids) => (float[n,length] logits) { logits = Cast<to=1>(input_ids) }"
    onnx.save(model_of(text), file)


def case(make, *words, told=None):
    """``told``: what the refusal says of the file, where it is refused."""
    return SimpleNamespace(make=make, words=words, told=told)


CASES = {
    "torchvision's classifiers": {
        "weights": [case(weights_of(build_trainable, "resnet18", 3, stem="3x3"), *CLASSES, *SIZED, *PLAIN)],
        "export": [case(exported_resnet, *CLASSES, *IMAGENET)],
    },
    "timm's ResNets, DenseNets and Inception v3 in torchvision's layout": {
        "weights": [case(made_by("timm", "resnet18/last.pth.tar", "quick"), *CLASSES, *IMAGENET)],
        "export": [case(made_by("timm", "mobilenetv3.onnx"), *CLASSES, *IMAGENET)],
    },
    "other classifiers, timm's and your own": {
        "weights": [
            case(made_by("timm", "mobilenetv3_small_050/last.pth.tar"), *CLASSES, *SIZED, told="MobileNet of timm"),
            case(made_by("timm", "resnetblur18/last.pth.tar"), *CLASSES, *SIZED, told="resnetblur18"),
        ],
        "export": [case(made_by("timm", "mobilenetv3.onnx"), *CLASSES, *IMAGENET)],
    },
    "classifiers whose labels do not exclude one another, and those of one output": {
        "weights": [
            case(one_output, "--labels", "missing", "--otherwise", "ok", "--size", "64x64", *NORMALIZED, *PLAIN)
        ],
        "export": [case(graph_of(SIGMOIDS), *CLASSES, *NORMALIZED)],
    },
    "YOLO detectors by ultralytics (v3, v5u, v6, v8 to v12, 26)": {
        "weights": [case(trained_yolo, *PASSING)],
        "export": [case(exported_yolo, *PASSING)],
    },
    "YOLOv5 by its own repository": {
        "weights": [case(file_of(".pt", save_yolov5), *PASSING, told="is a yolov5 with anchors")],
        "export": [case(exported_yolov5, *PASSING)],
    },
    "segmentation by ultralytics": {
        "weights": [case(by_ultralytics("yolov8n-seg"), *PASSING, told="is a yolo segmentation")],
        "export": [case(exported_by_ultralytics("yolov8n-seg"), *FIRST)],
    },
    "RT-DETR by ultralytics": {
        "weights": [case(by_ultralytics("yolov8n-rtdetr"), *PASSING, told="is a rtdetr")],
        "export": [case(exported_rtdetr)],
    },
    "classifiers by ultralytics": {
        "weights": [case(by_ultralytics("yolov8n-cls"), *PASSING, told="is a yolo classifier")],
        "export": [case(exported_by_ultralytics("yolov8n-cls"), *FIRST)],
    },
    "poses and turned boxes by ultralytics": {
        "weights": [
            case(by_ultralytics("yolov8n-pose"), *PASSING, told="poses and turned boxes are not served"),
            case(by_ultralytics("yolov8n-obb"), *PASSING, told="poses and turned boxes are not served"),
        ],
        "export": [case(exported_by_ultralytics("yolov8n-pose"), *PASSING, told="for the task pose")],
    },
    "torchvision's detectors": {
        "weights": [case(weights_of(ssd_of, 2), *CLASSES, *SIZED, told="is a detector of torchvision")],
        "export": [case(file_of(".onnx", save_ssd), "--labels", "ok,missing")],
    },
    "anomaly models, Anomalib's and others": {
        "weights": [case(made_by("anomalib", "padim/weights/torch/model.pt"), told="is an anomaly model")],
        "export": [
            case(made_by("anomalib", "padim/weights/onnx/model.onnx"), "--normalize", "unit", "--trainer", "anomalib"),
            case(graph_of(Map()), "--normalize", "unit", *FITTED),
            case(graph_of(Score()), "--normalize", "unit", "--kind", "anomaly", *FITTED),
        ],
    },
    "language models": {
        "weights": [case(file_of("", Path.mkdir), told="is a folder: language models")],
        "export": [case(file_of(".onnx", save_language_model), told="takes input_ids")],
    },
}  # fmt: skip


@pytest.fixture
def tools(made_once, images, request):
    """Tools that make files; made_by skips where the trainers' environment is not installed."""
    return SimpleNamespace(
        made_once=made_once, images=images, made_by=lambda *which: request.getfixturevalue("made_by")(*which)
    )


def test_every_row_has_its_files_and_every_cell_is_yes_or_no():
    rows = cells()
    assert rows.keys() == CASES.keys()
    assert all(re.match(r"(yes|no)\b", cell) for row in rows.values() for cell in row.values())


REPRESENTATIVE = "YOLO detectors by ultralytics (v3, v5u, v6, v8 to v12, 26)"


@pytest.mark.parametrize(
    ("row", "column", "number"),
    [
        pytest.param(row, column, n, marks=[] if row == REPRESENTATIVE else pytest.mark.slow)
        for row, columns in CASES.items()
        for column, all_ in columns.items()
        for n in range(len(all_))
    ],
)
def test_each_cell_of_the_table_is_true(line, tools, tmp_path, row, column, number):
    one, is_served = CASES[row][column][number], cells()[row][column].startswith("yes")
    file = one.make(tools, tmp_path / "model")
    if is_served:
        added = line.add(file, *one.words)
        assert one.told is None
        assert Path(added["weights"]).is_file()
    else:
        assert one.told in line.refused(file, *one.words)
