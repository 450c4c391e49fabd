"""Detectors of ONNX graphs: how each exporter lays out boxes, and how it wants its images.

A row of DETECTORS is a word of the line file's `detector`. Rows of ultralytics, YOLOX and torchvision were compared
with real files or with the library's own predictions. The others (YOLOv5 and YOLOv6 by their own repositories,
mmdeploy, RT-DETR, D-FINE, DEIM, rfdetr) follow the public descriptions of their exports, and were tried on made graphs
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from experts.expert import Fit, Normalization, Orientation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Layout(StrEnum):
    """Layout of a graph's boxes. ``extra``: numbers beside them, such as coefficients of masks."""

    ANCHORS_LAST = "anchors last"
    """(n, 4 + labels + extra, anchors): centre and size in pixels; a score per label."""
    OBJECTNESS = "objectness"
    """(n, anchors, 5 + labels + extra): the same, with the score that anything is there before the labels'."""
    CELLS = "cells"
    """(n, anchors, 5 + labels): centre and logarithm of the size in cells of a grid, to be decoded; scores as above."""
    CHOSEN = "chosen"
    """(n, boxes, 6 + extra): corners in pixels, score, label; suppressed, or never overlapping."""
    BATCHED = "batched"
    """(boxes of all images, 7): number of the image, corners in pixels, label, score."""
    QUERIES = "queries"
    """(n, queries, 4 + labels): centre and size in parts of the image; a score per label."""
    CHOSEN_QUERIES = "chosen queries"
    """(n, queries, 6): centre and size in parts of the image, score, label. RT-DETR from ultralytics 8.4 on."""
    LOGITS = "logits"
    """(n, queries, 4) and (n, queries, labels): centre and size in parts of the image; a logit per label."""
    LABELLED = "labelled"
    """(n, boxes, 5) and (n, boxes): corners in pixels, score; label."""
    TARGETED = "targeted"
    """(n, boxes), (n, boxes, 4), (n, boxes): label; corners in pixels of a second input, the target size; score."""
    TORCHVISION = "torchvision"
    """One image's corners in pixels (boxes, 4), labels from 1 on (boxes,), scores (boxes,)."""


@dataclass(frozen=True, slots=True)
class DetectorKind:
    """A kind of detector. ``fit`` and ``normalize``: how its trainer prepares images; None: its files differ.

    ``prepared``: keys of the line file's `fit` where ``fit`` is None; None: its files differ in it. ``orientation``:
    EXIF where OpenCV or ultralytics reads images, STORED where Pillow does.
    """

    what: str
    layouts: tuple[Layout, ...]
    fit: Fit | None = None
    normalize: str | Normalization | None = None
    orientation: Orientation = Orientation.EXIF
    prepared: Mapping[str, Any] | None = None

    @property
    def chooses(self) -> bool:
        """True where the graph may leave out boxes by itself."""
        return not {Layout.ANCHORS_LAST, Layout.OBJECTNESS, Layout.CELLS, Layout.QUERIES} & {*self.layouts}

    def fitting(
        self,
        shape: Sequence[int | None] | None,
        label_count: int | None,
        extra: int = 0,
        *,
        is_stated: bool = False,
    ) -> tuple[Layout, ...]:
        """Layouts that the first output's shape fits; what is open fits anything, unless ``is_stated``."""
        return tuple(each for each in self.layouts if _fits(_extents(each, label_count, extra), shape, is_stated))


CORNERED = MappingProxyType({"pad": "top-left", "color": 114, "rounding": "down", "interpolation": "opencv-linear"})
TENSORS = MappingProxyType({"interpolation": "torch-float-bilinear-antialias"})
PIXELS_BGR = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 255, "bgr")
DETECTORS: Mapping[str, DetectorKind] = MappingProxyType(
    {
        "yolov8": DetectorKind(
            "YOLOv8 to v12 and 26 of ultralytics, YOLOv9", (Layout.ANCHORS_LAST,), Fit.LETTERBOXED, "unit"
        ),
        "yolov5": DetectorKind("YOLOv5, v6 and v7", (Layout.OBJECTNESS,), Fit.LETTERBOXED, "unit"),
        "yolo-end2end": DetectorKind("YOLOs with nms=True, YOLOv10 and 26", (Layout.CHOSEN,), Fit.LETTERBOXED, "unit"),
        "yolo-batched": DetectorKind("YOLOv6 and v7 with --max-wh", (Layout.BATCHED,), Fit.LETTERBOXED, "unit"),
        "yolox": DetectorKind("YOLOX", (Layout.CELLS,), None, PIXELS_BGR, prepared=CORNERED),
        "yolox-decoded": DetectorKind(
            "YOLOX with --decode_in_inference", (Layout.OBJECTNESS,), None, PIXELS_BGR, prepared=CORNERED
        ),
        "mmdeploy": DetectorKind("mmdeploy's end2end", (Layout.LABELLED,)),
        "rtdetr-ultralytics": DetectorKind(
            "RT-DETR of ultralytics", (Layout.QUERIES, Layout.CHOSEN_QUERIES), Fit.FILLED, "unit"
        ),
        "rtdetr": DetectorKind("RT-DETR, D-FINE and DEIM", (Layout.TARGETED,), None, None, Orientation.STORED, {}),
        "rfdetr": DetectorKind("RF-DETR", (Layout.LOGITS,), None, "imagenet", Orientation.STORED, TENSORS),
        "torchvision": DetectorKind(
            "torchvision's detectors", (Layout.TORCHVISION,), Fit.LETTERBOXED, "unit", Orientation.STORED
        ),
    }
)


def _extents(layout: Layout, label_count: int | None, extra: int) -> tuple[int | None, ...]:
    """Shape of a layout's first output; None: any."""
    behind_4, behind_5 = (None if label_count is None else places + label_count + extra for places in (4, 5))
    return {
        Layout.ANCHORS_LAST: (None, behind_4, None),
        Layout.OBJECTNESS: (None, None, behind_5),
        Layout.CELLS: (None, None, behind_5),
        Layout.CHOSEN: (None, None, 6 + extra),
        Layout.BATCHED: (None, 7),
        Layout.QUERIES: (None, None, behind_4),
        Layout.CHOSEN_QUERIES: (None, None, 6),
        Layout.LOGITS: (None, None, 4),
        Layout.LABELLED: (None, None, 5),
        Layout.TARGETED: (None, None),
        Layout.TORCHVISION: (None, 4),
    }[layout]


def _fits(extents: tuple[int | None, ...], shape: Sequence[int | None] | None, is_stated: bool) -> bool:
    if shape is None or len(shape) != len(extents):
        return shape is None and not is_stated
    pairs = zip(extents, shape, strict=True)
    return all(wanted is None or one == wanted or (one is None and not is_stated) for wanted, one in pairs)
