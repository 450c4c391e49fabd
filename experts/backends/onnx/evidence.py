"""Evidence of a detector's exporter: metadata, names of inputs, outputs and weights, operators before its boxes.

Guarantees: nothing is concluded from numbers of dimensions alone, nor from answers. A graph without evidence has no
detector: the line file names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from experts.backends.onnx.decoders import DETECTORS
from experts.backends.onnx.heading import FLOAT, FLOATS, INT64, INTEGERS, read_nodes
from experts.errors import WeightsCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import onnx

    from experts.backends.onnx.heading import Heading

KEEPING = frozenset(  # operators that pass values on, at most with other places or types
    {
        "Cast",
        "DequantizeLinear",
        "Flatten",
        "Identity",
        "QuantizeLinear",
        "Reshape",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
CHOOSING = KEEPING | {
    "Concat",
    "Gather",
    "GatherElements",
    "GatherND",
    "Max",
    "Mul",
    "ReduceMax",
    "Slice",
    "Split",
    "TopK",
}
COMPARING = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
CELL = ("Conv", "Sigmoid", "Sigmoid")  # what YOLOX joins on each level: place, objectness, labels
DFL = re.compile(r"model\.\d+[./]dfl[./]")  # ultralytics' and YOLOv9's distribution of distances
ANCHORED = re.compile(r"model\.\d+[./]m\.[012][./]")  # a convolution for three anchors a cell: YOLOv5 and v7
STAGED = re.compile(r"ERBlock")  # YOLOv6's backbone
TORCHVISION = re.compile(r"(roi_heads\.box_predictor|head\.classification_head)\.")


@dataclass(frozen=True)
class Structure:
    """Nodes of a graph in their order, and names of its weights."""

    nodes: tuple[onnx.NodeProto, ...]
    weights: frozenset[str]

    @classmethod
    def read(cls, expert: str, path: Path) -> Structure:
        """Raises as ``read_heading``."""
        from google.protobuf.message import DecodeError
        from onnx import NodeProto

        nodes, weights = read_nodes(expert, path)
        try:
            return cls(tuple(map(NodeProto.FromString, nodes)), weights)
        except DecodeError as error:
            raise WeightsCorrupt(expert, f"{path} is not an ONNX model: {error}") from error

    @cached_property
    def makers(self) -> Mapping[str, onnx.NodeProto]:
        return {name: node for node in self.nodes for name in node.output}

    @cached_property
    def operators(self) -> frozenset[str]:
        return frozenset(node.op_type for node in self.nodes)

    def before(self, names: Sequence[str], through: frozenset[str] | None = None) -> Iterator[onnx.NodeProto]:
        """Nodes that these values are computed by; ``through``: behind other operators, none."""
        waiting, seen = [*names], set(names)
        for name in waiting:
            node = self.makers.get(name)
            if node is None:
                continue
            yield node
            if through is None or node.op_type in through:
                new = {*node.input} - seen
                seen |= new
                waiting += sorted(new)

    def names(self, pattern: re.Pattern[str]) -> bool:
        """True if a weight or a node is named so."""
        return any(map(pattern.search, (*self.weights, *(node.name for node in self.nodes))))

    def maker(self, name: str) -> str | None:
        """Operator of a value, without those that pass it on; None for an input or a weight."""
        node = self.makers.get(name)
        while node is not None and node.op_type in KEEPING:
            node = self.makers.get(node.input[0])
        return None if node is None else str(node.op_type)

    def cells(self) -> Iterator[onnx.NodeProto]:
        """Concatenations of YOLOX's three heads, whose places have no activation."""
        for node in self.nodes:
            if node.op_type == "Concat" and tuple(map(self.maker, node.input)) == CELL:
                yield node


@dataclass(frozen=True, slots=True)
class RecognisedDetector:
    """A row of DETECTORS, and why."""

    detector: str
    why: str


def recognised(expert: str, path: Path, heading: Heading, label_count: int | None) -> RecognisedDetector | None:
    """None without evidence. ``label_count``: None where it is not known. Raises as ``read_heading``."""
    found = _by_metadata(heading, label_count) or _by_names(heading)
    if found is None and may_be_boxes(heading):
        found = _by_operators(heading, Structure.read(expert, path))
    return found


def least_score(graph: onnx.GraphProto, outputs: Sequence[str]) -> float | None:
    """Score below which a graph leaves out boxes by itself, before these outputs; None: it does not show one."""
    from onnx import numpy_helper

    structure = Structure(tuple(graph.node), frozenset())
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}

    def number(name: str) -> float | None:
        tensor = constants.get(name)
        is_one = tensor is not None and tensor.data_type in FLOATS and not [each for each in tensor.dims if each != 1]
        return float(numpy_helper.to_array(tensor).item()) if is_one else None

    found = []
    for node in structure.before(outputs):
        if node.op_type == "NonMaxSuppression":
            found.append(number(node.input[4]) if len(node.input) > 4 else None)
        elif node.op_type in COMPARING:
            value, limit = node.input if node.op_type.startswith("Greater") else reversed(node.input)
            made = {each.op_type for each in structure.before([value], CHOOSING)}
            found.append(number(limit) if made & {"Sigmoid", "Softmax"} else None)
    return max((round(each, 6) for each in found if each is not None and 0 < each < 1), default=None)


def may_be_boxes(heading: Heading) -> bool:
    """False for a classifier, a score or a map."""
    shapes = [value.shape for value in heading.outputs]
    is_batched = len(shapes) == 1 and shapes[0] is not None and len(shapes[0]) == 2 and shapes[0][1] == 7
    return (
        is_batched
        or None in shapes
        or any(len(each or ()) == 3 for each in shapes)
        or bool(torchvision_outputs(heading))
    )


def extra_of(heading: Heading) -> int:
    """Mask coefficients beside each box: one for each mask of a second output (n, masks, height, width)."""
    second = heading.outputs[1].shape if len(heading.outputs) == 2 else None
    return second[1] or 0 if second is not None and len(second) == 4 else 0


def _by_metadata(heading: Heading, label_count: int | None) -> RecognisedDetector | None:
    notes = heading.metadata
    if "stride" not in notes or "names" not in notes or notes.get("task", "detect") not in {"detect", "segment"}:
        return None
    if notes.get("author") != "Ultralytics":
        return _by_shape(heading, label_count, "stride and names in its metadata", "yolov5", "yolov8", "yolo-end2end")
    described = notes.get("description", "").lower().replace("-", "")
    if notes.get("head") == "RTDETRDecoder" or "rtdetr" in described:
        return RecognisedDetector("rtdetr-ultralytics", "ultralytics' metadata name RT-DETR")
    if "'nms': True" in notes.get("args", "") or notes.get("end2end") == "True":
        return RecognisedDetector("yolo-end2end", "ultralytics' metadata: it chooses its boxes itself")
    if notes.get("end2end") == "False":
        return RecognisedDetector("yolov8", "ultralytics' metadata: it leaves boxes to be suppressed")
    return _by_shape(heading, label_count, "ultralytics' metadata", "yolov8", "yolo-end2end")


def _by_shape(heading: Heading, label_count: int | None, why: str, *detectors: str) -> RecognisedDetector | None:
    """The one of an exporter's layouts that the shape fits, or that alone fits what it states."""
    shape, extra = heading.outputs[0].shape or (), extra_of(heading)
    fits = [each for each in detectors if DETECTORS[each].fitting(shape, label_count, extra)]
    stated = [each for each in fits if DETECTORS[each].fitting(shape, label_count, extra, is_stated=True)]
    for found in (fits, stated):
        if len(found) == 1:
            return RecognisedDetector(found[0], f"{why}, and the shape of its answers")
    return None


def _by_names(heading: Heading) -> RecognisedDetector | None:
    outputs = {value.name: value for value in heading.outputs}
    inputs = {value.name for value in heading.inputs}
    shapes = {name: value.shape or () for name, value in outputs.items()}
    if {"labels", "boxes", "scores"} <= outputs.keys() and "orig_target_sizes" in inputs:
        return RecognisedDetector("rtdetr", "its input orig_target_sizes, and its outputs labels, boxes and scores")
    if {"dets", "labels"} <= outputs.keys() and len(shapes["dets"]) == 3:
        is_whole = outputs["labels"].element in INTEGERS
        if shapes["dets"][-1] in {5, None} and is_whole:
            return RecognisedDetector("mmdeploy", "its outputs dets, with a score in each row, and labels")
        if shapes["dets"][-1] == 4 and not is_whole and len(shapes["labels"]) == 3:
            return RecognisedDetector("rfdetr", "its outputs dets and labels, a row for each query")
    return None


def _by_operators(heading: Heading, structure: Structure) -> RecognisedDetector | None:
    if torchvision_outputs(heading) and structure.names(TORCHVISION):
        return RecognisedDetector("torchvision", "its outputs boxes, labels and scores, and the names of its weights")
    if any(structure.cells()):
        if "Exp" in structure.operators:
            return RecognisedDetector(
                "yolox-decoded", "its last operators: YOLOX's heads, and the powers of their sizes"
            )
        return RecognisedDetector("yolox", "its last operators: YOLOX's heads, whose places are not decoded")
    if "NonMaxSuppression" in structure.operators:
        named = structure.names(ANCHORED) or structure.names(STAGED)
        return _by_shape(heading, None, "names of its layers", "yolo-batched") if named else None
    if structure.names(DFL):
        return _by_shape(heading, None, "names of its layers", "yolov8", "yolo-end2end")
    if structure.names(ANCHORED) or structure.names(STAGED):
        return _by_shape(heading, None, "names of its layers", "yolov5")
    return None


def torchvision_outputs(heading: Heading) -> tuple[str, str, str] | None:
    """Names of boxes, labels and scores, by their types: exports of torchvision do not name them."""
    by_kind: dict[tuple[int | None, int], list[str]] = {}
    for value in heading.outputs:
        if value.shape is not None:
            by_kind.setdefault((value.element, len(value.shape)), []).append(value.name)
    boxes, labels, scores = (by_kind.get(kind, []) for kind in ((FLOAT, 2), (INT64, 1), (FLOAT, 1)))
    return (boxes[0], labels[0], scores[0]) if len(boxes) == len(labels) == len(scores) == 1 else None
