"""ONNX graphs: facts from metadata, inputs and outputs. The graph is not run.

Guarantees: the exporter's metadata take precedence (ultralytics: task, names, imgsz) over shapes and names. A model for
an unserved task is refused by name. This module finds the kind of model; packing decides how to read boxes and maps.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experts.backends.onnx.answers import EXCLUSIVE, INDEPENDENT, last_operator
from experts.backends.weight_files import is_scattered, read_graph, read_onnx
from experts.checkpoints.trainer_facts import FactCollector, add_pixels, labels_of, size_of
from experts.errors import WeightsRefused
from experts.expert import ANOMALY_LABELS
from experts.model_files.description import (
    NORMALIZE_OPTIONS,
    ONE_OUTPUT,
    Kind,
    ModelDescription,
    unknown_labels,
    unknown_task,
    unserved_fit,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TASKS: dict[str, Kind] = {"detect": "detector", "segment": "detector", "classify": "classifier"}
ANOMALY_OUTPUTS = frozenset({"anomaly_map", "anomaly_maps", "pred_score", "pred_mask"})
NAMES_LENGTH = 1_000_000  # characters of the metadata entry of labels
FLOAT, INT64 = 1, 7  # of onnx.TensorProto
BOXES_LABELS_SCORES = ((FLOAT, 1), (FLOAT, 2), (INT64, 1))  # types and ranks, in order, of torchvision's detectors


@dataclass(frozen=True, slots=True)
class _GraphValue:
    """An input or an output; None: any size."""

    name: str
    element: int
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join('n' if each is None else str(each) for each in self.shape)})"


def describe_graph(file: Path, kind: Kind | None = None) -> ModelDescription:
    """Describe an .onnx file. ``kind``: given by the user.

    Raises WeightsMissing, WeightsCorrupt, and WeightsRefused for what cannot be served.
    """
    scattered = is_scattered(read_graph(str(file), file))
    model = read_onnx(str(file), file, gathers=True)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in map(_value, model.graph.input) if value.name not in weights]
    outputs = [_value(value) for value in model.graph.output]
    _require_images(file, inputs)
    return _Graph(file, facts, inputs[0], tuple(outputs), kind, scattered, last_operator(model)).described()


@dataclass(frozen=True, slots=True)
class _Graph:
    file: Path
    facts: Mapping[str, str]
    images: _GraphValue
    outputs: tuple[_GraphValue, ...]
    given: Kind | None
    is_scattered: bool
    last: str | None

    def described(self) -> ModelDescription:
        kind, why = self._kind()
        sure = {"architecture": f"an ONNX graph, {why}"}
        missing = {}
        if kind is None:
            missing["kind"] = f"{why}: say with --kind what it answers with, classifier, detector or anomaly"
        labels, count = self._labels(kind, sure, missing)
        task = self._task(count, sure, missing) if kind == "classifier" else None
        size = self._size(sure, missing)
        facts = self._pixels(kind, size, missing)
        sure |= {key: facts.evidence[key] for key in ("normalize", "fit") if key in facts.values}
        normalize, fit = facts.values.get("normalize"), facts.values.get("fit")
        return ModelDescription(
            self.file, kind, "onnx", labels, size, normalize, fit, task=task, label_count=count, sure=sure,
            missing=missing, is_scattered=self.is_scattered, said=self._said(),
        )  # fmt: skip

    def _kind(self) -> tuple[Kind | None, str]:
        task = self.facts.get("task")
        if self.given is not None:
            return self.given, f"that answers as a {self.given} does, as the user said"
        if task is not None and "stride" in self.facts:
            if task not in TASKS:
                served = ", ".join(TASKS)
                raise WeightsRefused(str(self.file), f"is ultralytics' for the task {task}: served are {served}")
            return TASKS[task], f"its metadata says task {task}"
        first, names = self.outputs[0], {value.name for value in self.outputs}
        shown = ", ".join(map(str, self.outputs))
        if found := names & ANOMALY_OUTPUTS:
            return "anomaly", f"it answers with {', '.join(sorted(found))}"
        rank = len(first.shape)
        is_flat_map = rank == 3 and None not in first.shape[1:] and first.shape[1:] == self.images.shape[2:]
        if len(self.outputs) == 1 and (is_flat_map or (rank == 4 and first.shape[1] == 1)):
            return "anomaly", f"it answers with a map, {shown}"
        if rank == 2 and len(self.outputs) == 1 and first.shape[1] != 1:
            return "classifier", f"it answers with {shown}"
        kinds = tuple(sorted((value.element, len(value.shape)) for value in self.outputs))
        if rank == 3 or {"boxes", "labels", "scores"} <= names or kinds == BOXES_LABELS_SCORES:
            return "detector", f"it answers with {shown}"
        return None, f"it answers with {shown}, which may mean several things"

    def _labels(
        self, kind: Kind | None, sure: dict[str, str], missing: dict[str, str]
    ) -> tuple[tuple[str, ...] | None, int | None]:
        if kind == "anomaly":
            sure["labels"] = "what anomaly experts answer with"
            return ANOMALY_LABELS, len(ANOMALY_LABELS)
        names = labels_of(_literal(self.facts.get("names")))
        names = names if names and all(names) and len(set(names)) == len(names) else None
        shape = self.outputs[0].shape
        count = (shape[1] if len(shape) > 1 else 1) if kind == "classifier" else None
        if names is not None and count in {None, len(names)}:
            sure["labels"] = "names in its metadata"
            return names, len(names)
        missing["labels"] = unknown_labels("the file has", count)
        return None, count

    def _task(self, count: int | None, sure: dict[str, str], missing: dict[str, str]) -> str | None:
        """Task by the last operator, the only trace of the training in a graph."""
        if self.last in INDEPENDENT or self.last in EXCLUSIVE:
            sure["task"] = f"it ends in {self.last}"
            return "multilabel" if self.last in INDEPENDENT else "multiclass"
        if count == 1:
            sure["task"] = ONE_OUTPUT
            return "multilabel"
        missing["task"] = unknown_task("a graph that ends in logits does")
        return None

    def _size(self, sure: dict[str, str], missing: dict[str, str]) -> tuple[int, int] | None:
        height, width = self.images.shape[2:]
        if height is not None and width is not None:
            sure["size"] = f"its input {self.images}"
            return height, width
        size = size_of(_literal(self.facts.get("imgsz")))
        if size is not None:
            sure["size"] = "imgsz in its metadata"
            return size
        missing["size"] = f"its input {self.images} takes any: --size HEIGHTxWIDTH, as it was trained"
        return None

    def _pixels(self, kind: Kind | None, size: tuple[int, int] | None, missing: dict[str, str]) -> FactCollector:
        """Find ``normalize`` and ``fit``, with their evidence."""
        facts = FactCollector()
        facts.add("size", size, "")
        if kind == "detector":
            facts.add("normalize", "unit", "detectors take pixels in [0, 1]")
            return facts
        if "stride" in self.facts and "task" in self.facts:
            facts.add("normalize", "unit", "ultralytics trains on pixels in [0, 1]")
            if self.facts["task"] == "classify" and size is not None:
                resize = size[0] if size[0] == size[1] else list(size)
                cut = {"resize": resize, "crop": resize, "interpolation": "bilinear"}
                facts.add("fit", cut, "ultralytics cuts classifiers' images to their middle")
        values = {key: _literal(text, otherwise=text) for key, text in self.facts.items()}
        add_pixels(facts, values, "metadata ")
        if facts.lacks("fit"):
            missing["fit"] = unserved_fit(facts.evidence["fit"])
        if "normalize" not in facts.values:
            missing["normalize"] = (
                f"a graph does not show how its images were scaled: {NORMALIZE_OPTIONS}; unit, as a rule, where the "
                "graph normalises by itself"
            )
        return facts

    def _said(self) -> tuple[str, ...]:
        said = []
        if self.facts.get("task") == "segment":
            said.append("a segmentation model: it is served as a detector of its boxes, without their masks")
        if self.is_scattered:
            said.append("its weights are in other files: it is written as one")
        return tuple(said)


def _value(value: Any) -> _GraphValue:  # noqa: ANN401  # onnx has no types
    kind = value.type.tensor_type
    return _GraphValue(value.name, kind.elem_type, tuple(each.dim_value or None for each in kind.shape.dim))


def _require_images(file: Path, inputs: list[_GraphValue]) -> None:
    shown = ", ".join(map(str, inputs)) or "nothing"
    if len(inputs) != 1:
        raise WeightsRefused(str(file), f"takes {shown}: only graphs with one input, the images, are served")
    images = inputs[0]
    if len(images.shape) != 4 or images.shape[1] not in {3, None}:
        raise WeightsRefused(str(file), f"takes {shown}: only colour images (n, 3, height, width) are served")
    if images.element != FLOAT:
        raise WeightsRefused(str(file), f"takes {images.name} in another type than float32: export it in float32")


def _literal(text: str | None, otherwise: str | None = None) -> Any:  # noqa: ANN401  # of any of Python's literals
    if text is None or len(text) > NAMES_LENGTH:
        return otherwise
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return otherwise
