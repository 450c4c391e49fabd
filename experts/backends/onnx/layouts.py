"""Possible layouts of an ONNX graph's boxes, by its file's heading: metadata and shapes. Needs no runtime.

``Layout`` lists the known layouts with their exporters. Packing decides among them, see ``detections``;
a graph that fits none is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from experts.backends.onnx.heading import FLOAT, FLOATS, INT64, read_heading
from experts.errors import WeightsMismatch
from experts.expert import ONE_LABEL, Fit, Orientation, Task
from experts.labels import folded, moved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from experts.backends.onnx.heading import Heading
    from experts.expert import Expert, InputSpec

_KNOWN = "(n, 4 + labels, anchors), (n, anchors, 5 + labels), (n, boxes, 6) or (n, queries, 4 + labels)"
_SERVED_TASKS = frozenset({"classify", "detect", "segment"})  # in ultralytics' metadata


class Layout(StrEnum):
    """Layout of a graph's boxes. ``extra``: numbers beside them, such as coefficients of masks."""

    ANCHORS_LAST = "anchors last"
    """(n, 4 + labels + extra, anchors): centre and size in pixels; a score per label. YOLOv8 to YOLO26, v5u."""
    OBJECTNESS = "objectness"
    """(n, anchors, 5 + labels + extra): the same, with the score that anything is there before the labels'. YOLOv5."""
    CHOSEN = "chosen"
    """(n, boxes, 6 + extra): corners in pixels, score, label; suppressed, or never overlapping. nms=True, YOLO26."""
    QUERIES = "queries"
    """(n, queries, 4 + labels): centre and size in parts of the image; a score per label. RT-DETR."""
    CHOSEN_QUERIES = "chosen queries"
    """(n, queries, 6): centre and size in parts of the image, score, label. RT-DETR from ultralytics 8.4 on."""
    TORCHVISION = "torchvision"
    """Of one image, corners in pixels (boxes, 4), labels from 1 on (boxes,), scores (boxes,)."""

    @property
    def fit(self) -> Fit:
        return Fit.FILLED if self in {Layout.QUERIES, Layout.CHOSEN_QUERIES} else Fit.LETTERBOXED


@dataclass(frozen=True, slots=True)
class Detections:
    """Layouts that a graph's boxes may have; at least one."""

    layouts: tuple[Layout, ...]
    outputs: tuple[str, ...]  # names of those with boxes
    extra: int = 0  # see Layout
    at_once: int | None = None  # images per run, where fewer than the input's shape says

    @property
    def fit(self) -> Fit:
        fits = {layout.fit for layout in self.layouts}
        return fits.pop() if len(fits) == 1 else Fit.LETTERBOXED


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Preparation of images by a file's exporter. ``fit``: None for other files than detectors."""

    fit: Fit | None
    orientation: Orientation

    def applied(self, pixels: InputSpec) -> InputSpec:
        fit = pixels.fit if self.fit is None or pixels.fit is Fit.CROPPED else self.fit
        return replace(pixels, fit=fit, orientation=self.orientation)


def image_facts(expert: Expert) -> ImageFacts:
    """Read a file's facts: ultralytics and YOLOv5 turn images upright. Raises as ``read_detections``."""
    heading = read_heading(expert.id, expert.weights)
    found = _detections(expert, heading)
    orientation = Orientation.EXIF if "stride" in heading.metadata else Orientation.STORED
    return ImageFacts(None if found is None else found.fit, orientation)


def read_detections(expert: Expert) -> Detections | None:
    """None: no detector. Raises as ``read_heading``, and WeightsMismatch for an unserved or unfitting layout."""
    return _detections(expert, read_heading(expert.id, expert.weights))


def require_served(expert: Expert) -> None:
    """Raises as ``read_detections``, and WeightsMismatch for faults that a heading shows; packing finds the rest."""
    heading = read_heading(expert.id, expert.weights)
    require_fitting_input(expert, heading)
    if expert.task is Task.ANOMALY:
        _require_measuring(expert, heading)
        return
    is_multilabel = expert.task is Task.MULTILABEL
    if not is_multilabel and _detections(expert, heading) is not None:
        if expert.pixels.normalize != "unit":
            raise mismatch(expert, "is a detector: set `input.normalize` to unit")
        if expert.pixels.fit is Fit.CROPPED:
            raise mismatch(expert, "is a detector, which is not cut: remove `input.fit`")
        return
    shape = heading.outputs[0].shape if heading.outputs else ()
    require_names(expert, heading.names)
    if len(expert.labels) == 1 and not is_multilabel:
        raise WeightsMismatch(expert.id, ONE_LABEL)
    is_single = is_multilabel and shape is not None and len(shape) == len(expert.labels) == 1
    if not is_single and shape is not None and (len(shape) != 2 or shape[1] not in {None, len(expert.labels)}):
        raise mismatch(
            expert,
            f"answers {_shown(shape)}: for the {len(expert.labels)} labels that the line names, that "
            "is neither (n, labels) nor boxes",
        )


def require_fitting_input(expert: Expert, heading: Heading) -> None:
    """WeightsMismatch unless the one input takes float32 (n, 3, height, width) of the expert's size."""
    size = (3, *expert.pixels.size)
    if len(heading.inputs) != 1:
        names = ", ".join(value.name for value in heading.inputs) or "none"
        raise mismatch(expert, f"must have one input, the images; it has {names}")
    shape = heading.inputs[0].shape or ()
    fits = len(shape) in {3, 4} and all(one in {None, other} for one, other in zip(shape[-3:], size, strict=True))
    if heading.inputs[0].element != FLOAT or not fits or (len(shape) == 3 and None in shape):
        wanted = f"(n, 3, {size[1]}, {size[2]})"
        raise mismatch(expert, f"does not take float32 {wanted} but {_shown(shape)}: correct `input`")


def _require_measuring(expert: Expert, heading: Heading) -> None:
    """WeightsMismatch unless one output can be a score or a map, see ``experts.backends.onnx.anomaly``."""
    if not any(value.element in FLOATS and _may_measure(value.shape) for value in heading.outputs):
        listed = ", ".join(
            f"{value.name} {_shown(value.shape)}" for value in heading.outputs if value.shape is not None
        )
        raise mismatch(
            expert,
            f"answers {listed or 'nothing'}: of `task: anomaly` that is neither a score (n) or (n, 1) "
            "nor a map (n, 1, height, width)",
        )


def _may_measure(shape: tuple[int | None, ...] | None) -> bool:
    if shape is None or len(shape) in {0, 1, 3}:
        return True
    return len(shape) in {2, 4} and shape[1] in {None, 1}


def _detections(expert: Expert, heading: Heading) -> Detections | None:
    task = heading.metadata.get("task", "detect")
    if task not in _SERVED_TASKS:
        raise mismatch(expert, f"is exported for the task {task}, which is not served: detect and segment are")
    if parts := _torchvision_outputs(heading):
        require_names(expert, heading.names)
        return Detections((Layout.TORCHVISION,), parts, at_once=1)
    first = heading.outputs[0] if heading.outputs else None
    if first is None or first.shape is None or len(first.shape) != 3:
        return None
    require_names(expert, heading.names)
    extra = _extra(heading)
    layouts = fitting(first.shape, len(expert.labels), extra) & _written_by(heading.metadata)
    if not layouts:
        raise mismatch(
            expert,
            f"answers {_shown(first.shape)}: for the {len(expert.labels)} labels that the line names, that is "
            f"none of {_KNOWN}",
        )
    return Detections(tuple(sorted(layouts)), (first.name,), extra, _suppressed_at_once(heading))


def mismatch(expert: Expert, what: str) -> WeightsMismatch:
    return WeightsMismatch(expert.id, f"{expert.weights} {what}")


def require_names(expert: Expert, names: tuple[str, ...] | None) -> None:
    """WeightsMismatch for another number of labels, or another order; other words are the line's own choice."""
    if names is None:
        return
    if len(names) != len(expert.labels):
        raise mismatch(expert, f"has {len(names)} labels, {_listed(names)}; the line names {len(expert.labels)}")
    if moved(expert.names or expert.labels, names) or (expert.names and folded(expert.names) != folded(names)):
        raise mismatch(
            expert,
            f"has the labels {_listed(names)}, and the line {_listed(expert.names or expert.labels)}: write them in "
            "the order of the file",
        )


def fitting(shape: Sequence[int | None], label_count: int, extra: int) -> set[Layout]:
    """Layouts that a shape of three dimensions fits."""
    wanted = {
        Layout.ANCHORS_LAST: (1, 4 + label_count),
        Layout.OBJECTNESS: (2, 5 + label_count),
        Layout.CHOSEN: (2, 6),
        Layout.QUERIES: (2, 4 + label_count),
        Layout.CHOSEN_QUERIES: (2, 6),
    }
    return {layout for layout, (axis, count) in wanted.items() if shape[axis] in {None, count + extra}}


def _written_by(metadata: Mapping[str, str]) -> set[Layout]:
    """Layouts of the exporter in the metadata; without metadata, all but those of a named exporter."""
    is_ultralytics = metadata.get("author") == "Ultralytics"
    described = metadata.get("description", "").lower().replace("-", "")
    if metadata.get("head") == "RTDETRDecoder" or (is_ultralytics and "rtdetr" in described):
        return {Layout.QUERIES, Layout.CHOSEN_QUERIES}
    if is_ultralytics:
        return {Layout.ANCHORS_LAST, Layout.CHOSEN}
    return {Layout.ANCHORS_LAST, Layout.OBJECTNESS, Layout.CHOSEN, Layout.QUERIES}


def _extra(heading: Heading) -> int:
    """Mask coefficients beside each box: one for each mask of a second output (n, masks, height, width)."""
    second = heading.outputs[1].shape if len(heading.outputs) == 2 else None
    return second[1] or 0 if second is not None and len(second) == 4 else 0


def _suppressed_at_once(heading: Heading) -> int | None:
    """Batch size for which ultralytics unrolled the suppression: its graph drops further images."""
    batch = heading.metadata.get("batch", "")
    return int(batch) if "'nms': True" in heading.metadata.get("args", "") and batch.isdecimal() else None


def _torchvision_outputs(heading: Heading) -> tuple[str, str, str] | None:
    """Names of boxes, labels and scores."""
    by_kind: dict[tuple[int | None, int], list[str]] = {}
    for value in heading.outputs:
        if value.shape is not None:
            by_kind.setdefault((value.element, len(value.shape)), []).append(value.name)
    boxes, labels, scores = (by_kind.get(kind, []) for kind in ((FLOAT, 2), (INT64, 1), (FLOAT, 1)))
    if not len(boxes) == len(labels) == len(scores) == 1:
        return None
    return boxes[0], labels[0], scores[0]


def _shown(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("n" if extent is None else str(extent) for extent in shape) + ")"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
