"""ONNX graphs: facts from metadata, inputs and outputs. The graph is not run.

Guarantees: the exporter's metadata take precedence (ultralytics: task, names, imgsz) over shapes and names. A model for
an unserved task is refused by name. This module finds the kind of model; packing decides how to read boxes and maps.
"""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from experts.backends.onnx.answers import EXCLUSIVE, INDEPENDENT, last_operator
from experts.backends.onnx.decoders import DETECTORS
from experts.backends.onnx.evidence import RecognisedDetector, Structure, least_score, may_be_boxes, recognised
from experts.backends.onnx.heading import INTEGERS, UINT8, read_heading
from experts.backends.onnx.inputs import form_of
from experts.backends.onnx.layouts import outputs_of, possible_detectors, shown_shape, unknown_detector
from experts.backends.weight_files import is_scattered, read_graph, read_onnx
from experts.checkpoints.trainer_facts import LABEL_KEYS, FactCollector, add_pixels, labels_of, size_of
from experts.errors import WeightsRefused
from experts.expert import ANOMALY_LABELS, CONFIDENCE_MINIMUM, Normalization
from experts.model_files.description import (
    FIT_OPTIONS,
    NORMALIZE_OPTIONS,
    ONE_OUTPUT,
    Kind,
    ModelDescription,
    unknown_labels,
    unknown_task,
    unserved_fit,
)
from experts.model_files.unserved_graphs import unserved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from experts.backends.onnx.heading import Heading, Value
    from experts.backends.onnx.inputs import InputForm

TASKS: dict[str, Kind] = {"detect": "detector", "segment": "detector", "classify": "classifier"}
ANOMALY_OUTPUTS = frozenset({"anomaly_map", "anomaly_maps", "pred_score", "pred_mask"})
NAMES_LENGTH = 1_000_000  # characters of the metadata entry of labels


def describe_graph(file: Path, kind: Kind | None = None, detector: str | None = None) -> ModelDescription:
    """Describe an .onnx file. ``kind`` and ``detector``: given by the user.

    Raises WeightsMissing, WeightsCorrupt, and WeightsRefused for what cannot be served.
    """
    scattered = is_scattered(read_graph(str(file), file))
    model = read_onnx(str(file), file, gathers=True)
    heading = read_heading(str(file), file)
    form = form_of(heading.inputs)
    if form is None:
        raise WeightsRefused(
            str(file),
            f"takes {_listed(heading.inputs)}: only graphs with one input of images are served, (n, 3, height, width), "
            "of one channel, or with channels last, in float32, float16 or uint8",
        )
    last = last_operator(model)
    is_marked = "stride" in heading.metadata or ANOMALY_OUTPUTS & {value.name for value in heading.outputs}
    if kind is None and detector is None and not is_marked:
        why = unserved(heading, cache(partial(Structure.read, str(file), file)), last)
        if why is not None:
            raise WeightsRefused(str(file), why)
    named = None if detector is None else RecognisedDetector(detector, "as `detector` says")
    found = named or _recognised(file, heading)
    limit = None if found is None else least_score(model.graph, outputs_of(found.detector, heading))
    kind = "detector" if named else kind
    return _Graph(file, heading, form, kind, found, scattered, last, limit).described()


def _recognised(file: Path, heading: Heading) -> RecognisedDetector | None:
    names = labels_of(_literal(heading.metadata.get("names")))
    return recognised(str(file), file, heading, None if names is None else len(names))


@dataclass(frozen=True, slots=True)
class _Graph:
    file: Path
    heading: Heading
    images: InputForm
    given: Kind | None
    found: RecognisedDetector | None
    is_scattered: bool
    last: str | None
    limit: float | None

    @property
    def facts(self) -> Mapping[str, str]:
        return self.heading.metadata

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.heading.outputs

    def described(self) -> ModelDescription:
        kind, why = self._kind()
        if kind in {None, "classifier"} and self.found is None:
            self._require_scores(kind)
        evidence = {"architecture": f"an ONNX graph, {why}"}
        missing = {}
        if kind is None:
            missing["kind"] = (
                f"{why}: say with --kind what it answers with, classifier or anomaly, or with --detector how its boxes "
                f"are meant, {', '.join(possible_detectors(self.heading, None)) or 'of which none fits'}"
            )
        if kind == "detector" and self.found is None:
            missing["detector"] = unknown_detector(self.heading, None)
        labels, count = self._labels(kind, evidence, missing)
        task = self._task(count, evidence, missing) if kind == "classifier" else None
        size = self._size(evidence, missing)
        facts = self._pixels(kind, size, missing)
        found = {key: facts.values[key] for key in ("normalize", "fit", "orientation") if key in facts.values}
        evidence |= {key: facts.evidence[key] for key in found}
        limit = self.limit if kind == "detector" and (self.limit or 0.0) > CONFIDENCE_MINIMUM else None
        evidence |= {} if limit is None else {"confidence": "its graph leaves out boxes of lower scores"}
        return ModelDescription(
            self.file, kind, "onnx", labels, size, task=task, label_count=count, evidence=evidence, missing=missing,
            is_scattered=self.is_scattered, remarks=self._remarks(), **found,
            detector=None if kind != "detector" or self.found is None else self.found.detector,
            confidence=limit, is_grey=self.images.channels == 1, detectors=possible_detectors(self.heading, count),
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
        shown = _listed(self.outputs)
        if self.found is not None:
            return "detector", f"that answers as {DETECTORS[self.found.detector].what}: {self.found.why}"
        first, names = self.outputs[0].shape or (), {value.name for value in self.outputs}
        if found := names & ANOMALY_OUTPUTS:
            return "anomaly", f"it answers with {', '.join(sorted(found))}"
        is_flat_map = len(first) == 3 and first[1:] == (self.images.height, self.images.width) and None not in first[1:]
        is_map = len(first) == 4 and first[1] == 1 and first[1:].count(1) != 2
        if len(self.outputs) == 1 and (is_flat_map or is_map):
            if self.last in INDEPENDENT:
                return None, (
                    f"it answers with a map, {shown}, that ends in {self.last}, as a segmentation of one class does, "
                    "text detection among them, which is not served"
                )
            return "anomaly", f"it answers with a map, {shown}"
        if len(first) == 2 and len(self.outputs) == 1 and first[1] != 1 and not self._suppresses():
            return "classifier", f"it answers with {shown}"
        return None, f"it answers with {shown}, which may mean several things"

    def _require_scores(self, kind: Kind | None) -> None:
        """WeightsRefused for outputs that no option makes scores of labels."""
        first, others = self.outputs[0], self.outputs[1:]
        shape, shown = first.shape or (), _listed(self.outputs)
        alike = [other.name for other in others if (other.shape, other.element) == (first.shape, first.element)]
        fault = None
        if first.element in INTEGERS and (kind or not others):
            fault = "whole numbers, which are no scores: export it without its ArgMax"
        elif len(shape) == 4 and shape[1:].count(1) == 2:
            fault = "not (n, labels): export it with a Flatten behind"
        elif kind and len(shape) == 2 and alike:
            fault = f"of which {first.name} and {' and '.join(alike)} may both be of the labels: export it with one"
        if fault is not None:
            raise WeightsRefused(str(self.file), f"answers with {shown}, {fault}")

    def _suppresses(self) -> bool:
        """True for boxes in a row for each, which look like the answers of a classifier."""
        operators = Structure.read(str(self.file), self.file).operators if may_be_boxes(self.heading) else frozenset()
        return "NonMaxSuppression" in operators

    def _labels(
        self, kind: Kind | None, evidence: dict[str, str], missing: dict[str, str]
    ) -> tuple[tuple[str, ...] | None, int | None]:
        if kind == "anomaly":
            evidence["labels"] = "what anomaly experts answer with"
            return ANOMALY_LABELS, len(ANOMALY_LABELS)
        listed = {key: names for key in LABEL_KEYS if (names := labels_of(_literal(self.facts.get(key))))}
        listed |= {"character": tuple(self.facts.get("character", "").splitlines())}  # PaddleOCR's and RapidOCR's
        shape = self.outputs[0].shape or ()
        count = (shape[1] if len(shape) > 1 else 1) if kind == "classifier" else None
        for key, names in listed.items():
            if names and all(names) and len(set(names)) == len(names) and count in {None, len(names)}:
                evidence["labels"] = f"{key} in its metadata"
                return names, len(names)
        missing["labels"] = unknown_labels("the file has", count)
        return None, count

    def _task(self, count: int | None, evidence: dict[str, str], missing: dict[str, str]) -> str | None:
        """Task by the last operator, the only trace of the training in a graph."""
        if self.last in INDEPENDENT or self.last in EXCLUSIVE:
            evidence["task"] = f"it ends in {self.last}"
            return "multilabel" if self.last in INDEPENDENT else "multiclass"
        if count == 1:
            evidence["task"] = ONE_OUTPUT
            return "multilabel"
        missing["task"] = unknown_task("a graph that ends in logits does")
        return None

    def _size(self, evidence: dict[str, str], missing: dict[str, str]) -> tuple[int, int] | None:
        height, width = self.images.height, self.images.width
        shown = _listed(self.heading.inputs[:1])
        if height is not None and width is not None:
            evidence["size"] = f"its input {shown}"
            return height, width
        size = size_of(_literal(self.facts.get("imgsz")))
        if size is not None:
            evidence["size"] = "imgsz in its metadata"
            return size
        missing["size"] = f"its input {shown} takes any: --size HEIGHTxWIDTH, as it was trained"
        return None

    def _pixels(self, kind: Kind | None, size: tuple[int, int] | None, missing: dict[str, str]) -> FactCollector:
        """Find ``normalize`` and ``fit``, with their evidence."""
        facts = FactCollector()
        facts.add("size", size, "")
        if kind == "detector":
            self._add_detector(facts, missing)
            return facts
        if "stride" in self.facts and "task" in self.facts:
            facts.add("normalize", "unit", "ultralytics trains on pixels in [0, 1]")
            facts.add("orientation", "exif", "ultralytics turns images as their EXIF entry says")
            if self.facts["task"] == "classify" and size is not None:
                resize = size[0] if size[0] == size[1] else list(size)
                cut = {"resize": resize, "crop": resize, "interpolation": "bilinear"}
                facts.add("fit", cut, "ultralytics cuts classifiers' images to their middle")
        values = {key: _literal(text, otherwise=text) for key, text in self.facts.items()}
        add_pixels(facts, values, "metadata ")
        if facts.lacks("fit"):
            missing["fit"] = unserved_fit(facts.evidence["fit"])
        if self.images.element == UINT8:
            facts.values.pop("normalize", None)
            missing["normalize"] = (
                "it takes uint8, pixels as they are, and does not show in which order: --normalize '{mean: [0, 0, 0], "
                "std: [1, 1, 1], scale: 255}', and with `channels: bgr` if blue comes first"
            )
        elif "normalize" not in facts.values:
            missing["normalize"] = (
                f"a graph does not show how its images were scaled: {NORMALIZE_OPTIONS}; unit, as a rule, where the "
                "graph normalises by itself"
            )
        return facts

    def _add_detector(self, facts: FactCollector, missing: dict[str, str]) -> None:
        """Preparation of images by a detector's trainer; asked where its files differ."""
        row = None if self.found is None else DETECTORS[self.found.detector]
        if row is None:
            return
        why = f"{row.what}: as its own code prepares images"
        if isinstance(row.normalize, Normalization):
            facts.add("normalize", asdict(row.normalize), why)
        elif row.normalize is not None:
            facts.add("normalize", row.normalize, why)
        else:
            missing["normalize"] = f"models of {row.what} differ in it: {NORMALIZE_OPTIONS}"
        facts.add("fit", dict(row.prepared) if row.prepared else None, why)
        if row.fit is None and row.prepared is None:
            missing["fit"] = f"models of {row.what} differ in it: {FIT_OPTIONS}"

    def _remarks(self) -> tuple[str, ...]:
        remarks = []
        if self.images.channels == 1:
            remarks.append("it takes one channel: images become grey as Pillow and OpenCV make them")
        if self.facts.get("task") == "segment":
            remarks.append("a segmentation model: it is served as a detector of its boxes, without their masks")
        if self.is_scattered:
            remarks.append("its weights are in other files: it is written as one")
        return tuple(remarks)


def _listed(values: Sequence[Value]) -> str:
    return ", ".join(f"{value.name} {shown_shape(value.shape or ())}" for value in values) or "nothing"


def _literal(text: str | None, otherwise: str | None = None) -> Any:  # noqa: ANN401  # of any of Python's literals
    if text is None or len(text) > NAMES_LENGTH:
        return otherwise
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return otherwise
