"""Facts that a checkpoint states beside its weights: labels, task, architecture, preprocessing of images.

Each fact is taken literally, with its place in the file. This module infers nothing from the weights.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from experts.checkpoints.facts import Facts
from experts.checkpoints.modules import recorded_layers
from experts.checkpoints.names import POSITIVE_WEIGHT
from experts.checkpoints.preprocessing import fit_of, normalization_of, openmmlab_preprocessor
from experts.checkpoints.selection import LIGHTNING_VERSION
from experts.checkpoints.unpickler import PickledObject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from experts.checkpoints.selection import Selection

OPENMMLAB = "data_preprocessor"  # whose models take BGR by default
PREPROCESSING = ("pretrained_cfg", "default_cfg", "data_config", OPENMMLAB)  # tables nested in tables of arguments
ARGUMENTS = (
    "hyper_parameters", "datamodule_hyper_parameters", "hparams", "args", "config", "cfg", "opt", "train_args",
    "model_config", "metadata",
)  # fmt: skip
LABEL_KEYS = (
    "names", "class_names", "classes", "labels", "class_labels", "categories", "class_to_idx", "label_map", "id2label",
)  # fmt: skip
ARCHITECTURE_KEYS = ("arch", "architecture", "model_name", "backbone", "backbone_name", "encoder", "model")
SIZE_KEYS = ("imgsz", "img_size", "image_size", "input_size", "crop_size", "val_crop_size")
LOSS_KEYS = ("loss", "criterion", "loss_fn", "loss_func", "loss_function", "loss_name", "loss_type")
ACTIVATION_KEYS = ("activation", "final_activation", "head_activation", "output_activation", "last_activation")
ACTIVATIONS = {"sigmoid": "multilabel", "softmax": "multiclass"}
PROBLEM_KEYS = ("problem_type", "task")  # Hugging Face's, and torchmetrics'
PROBLEMS = {
    "multi_label_classification": "multilabel", "single_label_classification": "multiclass",
    "multilabel": "multilabel", "multiclass": "multiclass",
}  # fmt: skip
MULTILABEL_FLAGS = ("multilabel", "multi_label", "is_multilabel")
BINARY_LOSSES = re.compile(r"(?<!su)bce|binarycrossentropy|multilabelsoftmargin|sigmoidfocal|asymmetriclossmultilabel")
EXCLUSIVE_LOSSES = re.compile(r"crossentropy|^ce(loss)?$|^nll(loss)?$|softmax|labelsmoothing")
FRAMEWORKS = ("ultralytics", "torchvision", "timm", "anomalib")  # by the package of the model's class
YOLOV5 = "models.yolo"  # the module of YOLOv5's own repository
TASKS = {
    "DetectionModel": "detect", "RTDETRDetectionModel": "detect", "SegmentationModel": "segment",
    "ClassificationModel": "classify", "PoseModel": "pose", "OBBModel": "obb",
}  # fmt: skip
SIZE_MAXIMUM, LABELS_MAXIMUM, TEXT_MAXIMUM = 65_536, 10_000, 200
NAME = re.compile(r"[A-Za-z][\w.\-]*")
SCALED = re.compile(r"(yolov?\d+)(.*)")  # YAML name of ultralytics: a number, then the letter of the scale


class FactCollector:
    """Facts in order of their places: the first place that states a fact wins."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.evidence: dict[str, str] = {}

    def add(self, fact: str, value: object, where: str) -> None:
        if value is not None and fact not in self.values:
            self.values[fact] = value
            self.evidence[fact] = where

    def add_found(self, fact: str, found: tuple[Any, str] | None, where: str) -> None:
        """Record a value (None: not served) with its keys in the table ``where``."""
        if found is not None and fact not in self.evidence:
            value, keys = found
            self.evidence[fact] = f"{where}{keys}"
            self.values |= {} if value is None else {fact: value}

    def lacks(self, fact: str) -> bool:
        """True for a fact that the file states in an unserved form."""
        return fact in self.evidence and fact not in self.values


def collected_facts(document: object, selection: Selection) -> Facts:
    collector = FactCollector()
    _add_framework(collector, document, selection)
    if isinstance(selection.owner, PickledObject):
        _add_model_facts(collector, selection.owner, selection.where)
        layers, wrapper = recorded_layers(selection.owner, selection.prefix)
        if len(layers) > 1:
            collector.values |= {"layers": layers, "wrapper": wrapper}
        for key in LOSS_KEYS:
            collector.add("problem", _problem_of_loss(_part(selection.owner, key)), f"{selection.where}.{key}")
    collector.add("builder", _builder(document), "args")
    if selection.of_loss:
        collector.add("problem", "multilabel", f"{selection.of_loss[0]} is of a binary cross entropy")
    for where, values in _tables(document):
        add_arguments(collector, values, where)
        _add_problem(collector, values, where)
    if collector.values.get("framework") in {"ultralytics", "yolov5"} and collector.values.get("task") != "classify":
        collector.add("normalize", "unit", f"{collector.values['framework']} takes values from 0 to 1")
    return Facts(**collector.values, evidence=collector.evidence)


def _add_framework(collector: FactCollector, document: object, selection: Selection) -> None:
    if isinstance(document, dict) and LIGHTNING_VERSION in document:
        collector.add("framework", "lightning", LIGHTNING_VERSION)
    if isinstance(selection.owner, PickledObject):
        kind = selection.owner.kind
        package = "yolov5" if kind.module == YOLOV5 else kind.module.partition(".")[0]
        place = f"{selection.where} is a {kind}"
        collector.add("framework", package if package in (*FRAMEWORKS, "yolov5") else None, place)
        if collector.values.get("framework") in {"ultralytics", "yolov5"}:
            collector.add("task", TASKS.get(kind.name), place)
    if isinstance(document, dict) and "train_args" in document and "train_results" in document:
        collector.add("framework", "ultralytics", "train_args")


def _builder(document: object) -> str | None:
    """timm, by what its train.py saves; torchvision, by the arguments of its references."""
    if not isinstance(document, dict) or not isinstance(held := document.get("args"), PickledObject | dict):
        return None
    arguments = held.state if isinstance(held, PickledObject) else held
    if not isinstance(arguments, dict):
        return None
    if "version" in document and isinstance(document.get("arch"), str):
        return None if arguments.get("model_kwargs") else "timm"
    return "torchvision" if {"model", "val_resize_size", "val_crop_size"} <= arguments.keys() else None


def _add_model_facts(collector: FactCollector, model: PickledObject, where: str) -> None:
    """ultralytics' models carry names, task and YAML; timm's their configuration."""
    for key in LABEL_KEYS:
        collector.add("labels", labels_of(model.attribute(key)), f"{where}.{key}")
    configured = {key: model.attribute(key) for key in PREPROCESSING}
    for place, values in _preprocessing(configured, f"{where}."):
        add_arguments(collector, values, place)
    yaml = model.attribute("yaml")
    if isinstance(yaml, dict):
        file = model.attribute("yaml_file") or yaml.get("yaml_file")
        collector.add("architecture", _yaml_name(file, yaml.get("scale")), f"{where}.yaml")
    arguments = model.attribute("args")
    if isinstance(arguments, PickledObject):
        arguments = arguments.state
    if isinstance(arguments, dict):
        collector.add("size", size_of(arguments.get("imgsz")), f"{where}.args.imgsz")
        collector.add("task", _word(arguments.get("task")), f"{where}.args.task")


def _tables(document: object) -> Iterator[tuple[str, Mapping[object, object]]]:
    """Tables that may contain a trainer's arguments, the file's top level included."""
    if not isinstance(document, dict):
        return
    for key in ARGUMENTS:
        held = document.get(key)
        values = (held.entries or held.state) if isinstance(held, PickledObject) else held
        if isinstance(values, dict):
            yield f"{key}.", values
            yield from _preprocessing(values, f"{key}.")
    if isinstance(meta := document.get("meta"), dict):
        yield "meta.cfg.data_preprocessor.", openmmlab_preprocessor(meta.get("cfg"))
    yield from _preprocessing(document, "")
    yield "", document


def _preprocessing(values: Mapping[Any, object], where: str) -> Iterator[tuple[str, Mapping[object, object]]]:
    for key in PREPROCESSING:
        if isinstance(inner := values.get(key), dict):
            yield f"{where}{key}.", {"to_rgb": False, **inner} if key == OPENMMLAB else inner


def add_arguments(collector: FactCollector, values: Mapping[object, object], where: str) -> None:
    """Collect the facts of one table; ``where``: path of the table in the file."""
    for key in LABEL_KEYS:
        collector.add("labels", labels_of(values.get(key)), f"{where}{key}")
    for key in SIZE_KEYS:
        collector.add("size", size_of(values.get(key)), f"{where}{key}")
    collector.add("task", _word(values.get("task")), f"{where}task")
    for key in ARCHITECTURE_KEYS:
        collector.add("architecture", _architecture(values.get(key)), f"{where}{key}")
    add_pixels(collector, values, where)


def add_pixels(collector: FactCollector, values: Mapping[Any, object], where: str) -> None:
    """Collect ``normalize`` and ``fit``, once the size is known."""
    collector.add_found("normalize", normalization_of(values), where)
    collector.add_found("fit", fit_of(values, collector.values.get("size")), where)


def _add_problem(collector: FactCollector, values: Mapping[object, object], where: str) -> None:
    for key in PROBLEM_KEYS:
        collector.add("problem", PROBLEMS.get(_lower(values.get(key))), f"{where}{key}")
    for key in MULTILABEL_FLAGS:
        collector.add("problem", "multilabel" if values.get(key) is True else None, f"{where}{key}")
    for key in LOSS_KEYS:
        collector.add("problem", _problem_of_loss(values.get(key)), f"{where}{key}")
    for key in ACTIVATION_KEYS:
        collector.add("problem", ACTIVATIONS.get(_lower(values.get(key))), f"{where}{key}")
    if values.get(POSITIVE_WEIGHT) is not None:
        collector.add("problem", "multilabel", f"{where}{POSITIVE_WEIGHT}, of a binary cross entropy")


def _problem_of_loss(loss: object) -> str | None:
    """Problem by the loss's name or class; None for an ambiguous loss such as a focal one."""
    plain = re.sub(
        r"[^a-z]", "", _lower(loss.kind.name if isinstance(loss, PickledObject) else loss).rpartition(".")[2]
    )
    if BINARY_LOSSES.search(plain):
        return "multilabel"
    return "multiclass" if EXCLUSIVE_LOSSES.search(plain) else None


def _lower(value: object) -> str:
    return value.lower() if isinstance(value, str) and len(value) <= TEXT_MAXIMUM else ""


def _part(record: PickledObject, name: str) -> object:
    modules = record.attribute("_modules")
    return record.attribute(name) or (modules.get(name) if isinstance(modules, dict) else None)


def labels_of(value: object) -> tuple[str, ...] | None:
    """Labels in the order of a model's outputs: a list, numbers with their labels, or labels with their numbers."""
    if isinstance(value, dict):
        if all(isinstance(key, str) and key.isdecimal() for key in value):  # as JSON has numbers
            value = {int(key): label for key, label in value.items()}
        if value and all(isinstance(key, str) and isinstance(number, int) for key, number in value.items()):
            value = {number: key for key, number in value.items()}
        value = [value[number] for number in range(len(value))] if set(value) == set(range(len(value))) else None
    if not isinstance(value, list | tuple) or not 0 < len(value) <= LABELS_MAXIMUM:
        return None
    labels = tuple(label for label in value if isinstance(label, str) and len(label) <= TEXT_MAXIMUM)
    return labels if len(labels) == len(value) else None


def size_of(value: object) -> tuple[int, int] | None:
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
    """Architecture by name; the name of a weights file does not count."""
    word = _word(value)
    if word is None or word.endswith((".pt", ".pth", ".ckpt", ".safetensors", ".onnx")):
        return None
    return word.removesuffix(".yaml")


def _yaml_name(file: object, scale: object) -> str | None:
    """yolo11n, for yolo11.yaml with scale n and for yolo11n.yaml."""
    if not isinstance(file, str):
        return None
    stem = _architecture(file.replace("\\", "/").rpartition("/")[2])
    found = SCALED.fullmatch(stem) if stem else None
    if stem is None or found is None or not isinstance(scale, str) or found[2].startswith(scale):
        return stem
    return f"{found[1]}{scale}{found[2]}"
