"""What a checkpoint tells of its model beside the weights: labels, task, image size, architecture, normalisation.

Everything is taken as the file says it, with the place where it stands; nothing is guessed from the weights here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from experts.checkpoints.found import Facts
from experts.checkpoints.inert import Record
from experts.checkpoints.selection import LIGHTNING_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from experts.checkpoints.selection import Selection

ARGUMENTS = ("hyper_parameters", "hparams", "args", "config", "cfg", "opt", "train_args", "model_config", "metadata")
LABEL_KEYS = ("names", "class_names", "classes", "labels", "class_labels", "categories", "class_to_idx", "label_map")
ARCHITECTURE_KEYS = ("arch", "architecture", "model_name", "backbone", "backbone_name", "encoder", "model")
SIZE_KEYS = ("imgsz", "img_size", "image_size", "input_size", "crop_size", "val_crop_size")
FRAMEWORKS = ("ultralytics", "torchvision", "timm", "anomalib")  # by the package of the model's class
YOLOV5 = "models.yolo"  # the module of YOLOv5's own repository
TASKS = {
    "DetectionModel": "detect", "RTDETRDetectionModel": "detect", "SegmentationModel": "segment",
    "ClassificationModel": "classify", "PoseModel": "pose", "OBBModel": "obb",
}  # fmt: skip
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNIT = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
SIZE_MAXIMUM, LABELS_MAXIMUM, TEXT_MAXIMUM = 65_536, 10_000, 200
NAME = re.compile(r"[A-Za-z][\w.\-]*")
SCALED = re.compile(r"(yolov?\d+)(.*)")  # a YAML of ultralytics: the letter of the scale stands behind the number


class _Telling:
    """Facts as they are found: the first place that tells something is the one that counts."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.evidence: dict[str, str] = {}

    def tell(self, fact: str, value: object, where: str) -> None:
        if value is not None and fact not in self.values:
            self.values[fact] = value
            self.evidence[fact] = where


def tell(document: object, selection: Selection) -> Facts:
    """What the file tells of the weights that were selected."""
    telling = _Telling()
    _tell_framework(telling, document, selection)
    if isinstance(selection.owner, Record):
        _tell_of_model(telling, selection.owner, selection.where)
    for where, values in _tables(document):
        _tell_of_arguments(telling, values, where)
    if telling.values.get("framework") in {"ultralytics", "yolov5"} and telling.values.get("task") != "classify":
        telling.tell("normalize", "unit", f"{telling.values['framework']} takes values from 0 to 1")
    return Facts(**telling.values, evidence=telling.evidence)


def _tell_framework(telling: _Telling, document: object, selection: Selection) -> None:
    if isinstance(document, dict) and LIGHTNING_VERSION in document:
        telling.tell("framework", "lightning", LIGHTNING_VERSION)
    if isinstance(selection.owner, Record):
        kind = selection.owner.kind
        package = "yolov5" if kind.module == YOLOV5 else kind.module.partition(".")[0]
        told = f"{selection.where} is a {kind}"
        telling.tell("framework", package if package in (*FRAMEWORKS, "yolov5") else None, told)
        if telling.values.get("framework") in {"ultralytics", "yolov5"}:
            telling.tell("task", TASKS.get(kind.name), told)
    if isinstance(document, dict) and "train_args" in document and "train_results" in document:
        telling.tell("framework", "ultralytics", "train_args")


def _tell_of_model(telling: _Telling, model: Record, where: str) -> None:
    """A model of ultralytics carries its names, its task and its YAML; one of timm how it was configured."""
    for key in LABEL_KEYS:
        telling.tell("labels", _labels(model.attribute(key)), f"{where}.{key}")
    configured = model.attribute("pretrained_cfg")
    if isinstance(configured, dict):
        _tell_of_arguments(telling, configured, f"{where}.pretrained_cfg.")
    yaml = model.attribute("yaml")
    if isinstance(yaml, dict):
        file = model.attribute("yaml_file") or yaml.get("yaml_file")
        telling.tell("architecture", _yaml_name(file, yaml.get("scale")), f"{where}.yaml")
    arguments = model.attribute("args")
    if isinstance(arguments, Record):
        arguments = arguments.state
    if isinstance(arguments, dict):
        telling.tell("size", _size(arguments.get("imgsz")), f"{where}.args.imgsz")
        telling.tell("task", _word(arguments.get("task")), f"{where}.args.task")


def _tables(document: object) -> Iterator[tuple[str, Mapping[object, object]]]:
    """Where a trainer's arguments may stand: in a table of the file, and in the file itself."""
    if not isinstance(document, dict):
        return
    for key in ARGUMENTS:
        held = document.get(key)
        values = (held.entries or held.state) if isinstance(held, Record) else held
        if isinstance(values, dict):
            yield f"{key}.", values
    yield "", document


def _tell_of_arguments(telling: _Telling, values: Mapping[object, object], where: str) -> None:
    for key in LABEL_KEYS:
        telling.tell("labels", _labels(values.get(key)), f"{where}{key}")
    for key in SIZE_KEYS:
        telling.tell("size", _size(values.get(key)), f"{where}{key}")
    telling.tell("task", _word(values.get("task")), f"{where}task")
    for key in ARCHITECTURE_KEYS:
        telling.tell("architecture", _architecture(values.get(key)), f"{where}{key}")
    telling.tell("normalize", _normalisation(values.get("mean"), values.get("std")), f"{where}mean, {where}std")


def _labels(value: object) -> tuple[str, ...] | None:
    """Labels in the order of a model's outputs: a list, numbers with their labels, or labels with their numbers."""
    if isinstance(value, dict):
        if value and all(isinstance(key, str) and isinstance(number, int) for key, number in value.items()):
            value = {number: key for key, number in value.items()}
        value = [value[number] for number in range(len(value))] if set(value) == set(range(len(value))) else None
    if not isinstance(value, list | tuple) or not 0 < len(value) <= LABELS_MAXIMUM:
        return None
    labels = tuple(label for label in value if isinstance(label, str) and len(label) <= TEXT_MAXIMUM)
    return labels if len(labels) == len(value) else None


def _size(value: object) -> tuple[int, int] | None:
    """Height and width, from one number or from two; of three the first is the number of channels."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    if not isinstance(value, list | tuple):
        return None
    match tuple(value)[-2:]:
        case (int() as height, int() as width) if 0 < height <= SIZE_MAXIMUM and 0 < width <= SIZE_MAXIMUM:
            return height, width
        case (int() as side,) if 0 < side <= SIZE_MAXIMUM:
            return side, side
    return None


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= TEXT_MAXIMUM and NAME.fullmatch(value) else None


def _architecture(value: object) -> str | None:
    """A name; that of a weights file says nothing about its architecture."""
    word = _word(value)
    if word is None or word.endswith((".pt", ".pth", ".ckpt", ".safetensors", ".onnx")):
        return None
    return word.removesuffix(".yaml")


def _yaml_name(file: object, scale: object) -> str | None:
    """yolo11n for a YAML yolo11.yaml with scale n, and for yolo11n.yaml, which has been read as that."""
    if not isinstance(file, str):
        return None
    stem = _architecture(file.replace("\\", "/").rpartition("/")[2])
    found = SCALED.fullmatch(stem) if stem else None
    if stem is None or found is None or not isinstance(scale, str) or found[2].startswith(scale):
        return stem
    return f"{found[1]}{scale}{found[2]}"


def _normalisation(mean: object, deviation: object) -> str | None:
    given = tuple(tuple(one) if isinstance(one, list | tuple) else one for one in (mean, deviation))
    return "imagenet" if given == IMAGENET else "unit" if given == UNIT else None
