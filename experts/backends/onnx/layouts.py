"""Boxes of an ONNX graph, by its file's heading and its exporter's evidence, see ``evidence``. Needs no runtime.

A graph that may have boxes, and shows nothing of its exporter, is refused with the question that settles it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experts.backends.onnx.decoders import DETECTORS, DetectorKind, Layout
from experts.backends.onnx.evidence import RecognisedDetector, extra_of, may_be_boxes, recognised, torchvision_outputs
from experts.backends.onnx.heading import FLOATS, read_heading
from experts.errors import WeightsMismatch
from experts.expert import ONE_LABEL, UNIT, Fit, Normalization, Orientation, Task
from experts.labels import folded, moved, renamed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from experts.backends.onnx.heading import Heading
    from experts.expert import Expert, InputSpec

TARGET_SIZES = "orig_target_sizes"  # second input of RT-DETR, D-FINE and DEIM
SCALED_BY_DEFAULT = ("bilinear", "opencv-linear")  # where no `fit` is written, and of letterboxed images
_SERVED_TASKS = frozenset({"classify", "detect", "segment"})  # in ultralytics' metadata


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of a graph: a row of DETECTORS, the layouts that its shapes leave, and where the boxes are."""

    detector: str
    why: str
    layouts: tuple[Layout, ...]
    outputs: tuple[str, ...]  # names of those with boxes, in the order of the layout
    extra: int = 0  # see Layout
    at_once: int | None = None  # images per run, where fewer than the input's shape says

    @property
    def kind(self) -> DetectorKind:
        return DETECTORS[self.detector]


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Preparation of images by a file's exporter. ``fit`` and ``detector``: None for other files than detectors."""

    fit: Fit | None
    orientation: Orientation
    detector: str | None = None

    @property
    def normalize(self) -> str | Normalization | None:
        """Preparation by a detector's trainer, where the line does not say."""
        if self.detector is not None:
            return DETECTORS[self.detector].normalize
        return "unit" if self.fit in {Fit.LETTERBOXED, Fit.FILLED} else None

    @property
    def prepared(self) -> Mapping[str, Any]:
        """Keys of the line file's `fit`, where the line does not have it."""
        return (DETECTORS[self.detector].prepared if self.detector is not None else None) or {}

    def applied(self, pixels: InputSpec) -> InputSpec:
        """An exporter's fit counts where the line states none."""
        fit = pixels.fit if self.fit is None or pixels.fit in {Fit.CROPPED, Fit.PADDED} else self.fit
        if self.fit is not None and pixels.fit is Fit.STRETCHED and pixels.interpolation == "opencv-linear":
            fit = Fit.FILLED
        return replace(pixels, fit=fit, orientation=self.orientation)


def image_facts(expert: Expert) -> ImageFacts:
    """Read a file's facts: ultralytics turns images upright. Raises as ``read_detections``."""
    heading = read_heading(expert.id, expert.weights)
    found = _detections(expert, heading)
    if found is not None:
        return ImageFacts(found.kind.fit, found.kind.orientation, found.detector)
    return ImageFacts(None, Orientation.EXIF if "stride" in heading.metadata else Orientation.STORED)


def read_detections(expert: Expert) -> Detections | None:
    """None: no detector. Raises as ``read_heading``, and WeightsMismatch for an unserved or unfitting layout."""
    return _detections(expert, read_heading(expert.id, expert.weights))


def require_served(expert: Expert) -> None:
    """Raises as ``read_detections``, and WeightsMismatch for faults that a heading shows; packing finds the rest."""
    heading = read_heading(expert.id, expert.weights)
    if expert.task is Task.ANOMALY:
        _require_measuring(expert, heading)
        return
    is_multilabel = expert.task is Task.MULTILABEL
    if not is_multilabel and (found := _detections(expert, heading)) is not None:
        require_pixels(expert, found.kind)
        return
    shape = heading.outputs[0].shape if heading.outputs else ()
    require_names(expert, heading.names)
    if len(expert.labels) == 1 and not is_multilabel:
        raise WeightsMismatch(expert.id, ONE_LABEL)
    is_single = is_multilabel and shape is not None and len(shape) == len(expert.labels) == 1
    if not is_single and shape is not None and (len(shape) != 2 or shape[1] not in {None, len(expert.labels)}):
        raise mismatch(
            expert,
            f"answers {shown_shape(shape)}: for the {len(expert.labels)} labels that the line names, that "
            "is neither (n, labels) nor boxes",
        )


def require_pixels(expert: Expert, kind: DetectorKind) -> None:
    """WeightsMismatch for an input that no code gives such a detector: some pads, stretches or orders channels its own
    way."""
    pixels = expert.pixels
    numbers = replace(pixels.normalize, channels="rgb") if isinstance(pixels.normalize, Normalization) else UNIT
    if kind.normalize == "unit" and (numbers != UNIT or pixels.normalize == "imagenet"):
        raise mismatch(
            expert, "is a detector: set `input.normalize` to unit, or to the numbers of unit and `channels: bgr`"
        )
    if pixels.fit is Fit.CROPPED:
        raise mismatch(expert, "is a detector, whose images are not cut: write `fit` with `pad`, or remove it")
    if kind.fit is not None and pixels.fit not in {kind.fit, Fit.PADDED, Fit.FILLED}:
        raise mismatch(expert, f"is a detector, which wants its images {kind.fit}; the line sends them {pixels.fit}")
    if kind.fit is pixels.fit and pixels.interpolation not in SCALED_BY_DEFAULT:
        raise mismatch(expert, f"has its images {kind.fit} by opencv-linear: write `fit` with `pad`, or remove it")


def _require_measuring(expert: Expert, heading: Heading) -> None:
    """WeightsMismatch unless one output can be a score or a map, see ``experts.backends.onnx.anomaly``."""
    if not any(value.element in FLOATS and _may_measure(value.shape) for value in heading.outputs):
        listed = ", ".join(
            f"{value.name} {shown_shape(value.shape)}" for value in heading.outputs if value.shape is not None
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
    if task == "classify":
        return None
    if expert.detector is not None:
        found: RecognisedDetector | None = RecognisedDetector(expert.detector, "named in the line file")
    else:
        found = recognised(expert.id, expert.weights, heading, len(heading.names or expert.labels))
    if found is None:
        _require_no_boxes(expert, heading)
        return None
    require_names(expert, heading.names)
    kind, extra = DETECTORS[found.detector], extra_of(heading)
    names = outputs_of(found.detector, heading)
    first = next((value for value in heading.outputs if value.name in names[:1]), None)
    layouts = kind.fitting(None if first is None else first.shape, len(expert.labels), extra)
    if not layouts or first is None:
        raise mismatch(
            expert,
            f"answers {shown(heading)}: for the {len(expert.labels)} labels that the line names, that is not "
            f"{' or '.join(kind.layouts)} of {kind.what} ({found.why})",
        )
    single = {Layout.TORCHVISION, Layout.BATCHED} & {*layouts}
    return Detections(found.detector, found.why, layouts, names, extra, 1 if single else _suppressed_at_once(heading))


def _require_no_boxes(expert: Expert, heading: Heading) -> None:
    shape = heading.outputs[0].shape if heading.outputs else ()
    if may_be_boxes(heading) and (shape is None or len(shape) != 2 or shape[1] not in {None, len(expert.labels)}):
        raise mismatch(expert, f"answers {shown(heading)}: {unknown_detector(heading, len(expert.labels))}")


def unknown_detector(heading: Heading, label_count: int | None) -> str:
    """The question for a detector without evidence."""
    options = [f"{name} ({DETECTORS[name].what})" for name in possible_detectors(heading, label_count)]
    listed = ", ".join(options) or f"none of {', '.join(DETECTORS)} has boxes of this shape"
    return (
        f"nothing in it shows what made it, and how its boxes are meant: say --detector, or write `detector:`; {listed}"
    )


def possible_detectors(heading: Heading, label_count: int | None) -> tuple[str, ...]:
    """Rows of DETECTORS that the outputs do not contradict: what a search by known answers tries."""
    found = []
    for name, kind in DETECTORS.items():
        values = {value.name: value for value in heading.outputs}
        first = values.get(next(iter(outputs_of(name, heading)), ""))
        if first is not None and kind.fitting(first.shape, label_count, extra_of(heading)):
            found.append(name)
    return tuple(found)


def outputs_of(detector: str, heading: Heading) -> tuple[str, ...]:
    """Names of the outputs with a detector's boxes, in the order of its layout; none where they are not there."""
    names = {value.name for value in heading.outputs}
    named = {"mmdeploy": ("dets", "labels"), "rtdetr": ("labels", "boxes", "scores"), "rfdetr": ("dets", "labels")}
    if detector in named:
        return named[detector] if names.issuperset(named[detector]) else ()
    if detector == "torchvision":
        return torchvision_outputs(heading) or ()
    return tuple(value.name for value in heading.outputs[:1])


def mismatch(expert: Expert, what: str) -> WeightsMismatch:
    return WeightsMismatch(expert.id, f"{expert.weights} {what}")


def require_names(expert: Expert, names: tuple[str, ...] | None) -> None:
    """WeightsMismatch for another number or order of labels, or for words of the line that could be of any of them."""
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
    if not expert.names and len(renamed(expert.labels, names)) > 1:
        pairs = _listed([f"{name}: {word}" for name, word in zip(names, expert.labels, strict=True)])
        raise mismatch(
            expert,
            f"has the labels {_listed(names)}, and the line other words, {_listed(expert.labels)}: write which is "
            f"which, in the line's order `labels: {{{pairs}}}`",
        )


def _suppressed_at_once(heading: Heading) -> int | None:
    """Batch size for which ultralytics unrolled the suppression: its graph drops further images."""
    batch = heading.metadata.get("batch", "")
    return int(batch) if "'nms': True" in heading.metadata.get("args", "") and batch.isdecimal() else None


def shown(heading: Heading) -> str:
    return ", ".join(f"{value.name} {shown_shape(value.shape or ())}" for value in heading.outputs) or "nothing"


def shown_shape(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("n" if extent is None else str(extent) for extent in shape) + ")"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
