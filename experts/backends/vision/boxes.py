"""Detectors of torch and ONNX: boxes suppressed, limited, converted to the image's pixels.

An image with more boxes than the limit is OutputInvalid, with their number: the best ones alone would be incomplete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from experts.backends.modules.vision import ops
from experts.backends.outputs import winners
from experts.errors import OutputInvalid
from experts.expert import NOTHING_FOUND, BoundingBox, Prediction
from experts.images import upright_corners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.backends.base import Prepared
    from experts.expert import Expert

BOXES_MAXIMUM = 1000  # of one image; one with more is not judged
CANDIDATES_MAXIMUM = 30_000  # boxes of one image that enter non-maximum suppression


def candidates(expert: Expert, scores: Tensor) -> Tensor:
    """Indices of boxes above the expert's confidence, in order. ``scores``: (anchors, labels)."""
    return _confident(expert, scores.amax(dim=1))


def best_labels(expert: Expert, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Best score of each box and its label. Raises OutputInvalid for a box that counts and has two best labels."""
    winners(expert, scores[candidates(expert, scores)])
    best, labels = scores.max(dim=1)
    return best, labels


def suppressed(expert: Expert, boxes: Tensor, scores: Tensor) -> Tensor:
    """Rows (left, top, right, bottom, score, label), best first. Raises OutputInvalid for too many, and for ties."""
    best, labels = best_labels(expert, scores)
    found = _confident(expert, best)
    _refuse_beyond(CANDIDATES_MAXIMUM, len(found), "boxes before suppression", expert)
    rivals = labels[found] if expert.suppression is None else torch.zeros_like(found)
    kept = found[ops.batched_nms(boxes[found], best[found], rivals, expert.iou)]
    return _rows(expert, boxes[kept], best[kept], labels[kept])


def selected(expert: Expert, boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """Rows of boxes that the model chose itself. Raises OutputInvalid for too many, or for an unknown label."""
    found = _confident(expert, scores)
    found = found[scores[found].argsort(descending=True, stable=True)]
    rows = _rows(expert, boxes[found], scores[found], labels[found])
    unknown = rows[(rows[:, 5] < 0) | (rows[:, 5] >= len(expert.labels)), 5]
    if len(unknown):
        raise OutputInvalid(
            expert.id, f"it found a box of label {int(unknown[0])}, and has {len(expert.labels)}: correct `labels`"
        )
    return rows


def prediction(expert: Expert, rows: Sequence[Sequence[float]], prepared: Prepared) -> Prediction:
    """Prediction of one image from rows in the pixels of the expert's input."""
    if not rows:
        return Prediction(NOTHING_FOUND, 0.0)
    boxes = tuple(_box(expert, row, prepared) for row in rows)
    return Prediction(boxes[0].label, boxes[0].score, boxes)


def _confident(expert: Expert, scores: Tensor) -> Tensor:
    return (scores > expert.confidence).nonzero().squeeze(1)


def _rows(expert: Expert, boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    _refuse_beyond(BOXES_MAXIMUM, len(boxes), "boxes", expert)
    return torch.cat((boxes, scores.unsqueeze(1), labels.unsqueeze(1).float()), dim=1)


def _refuse_beyond(maximum: int, count: int, what: str, expert: Expert) -> None:
    if count > maximum:
        raise OutputInvalid(
            expert.id,
            f"it found {count} {what} in one image, more than the {maximum} that are judged: "
            "give it smaller parts of the board, or train it further if there are not so many things to find",
        )


def _box(expert: Expert, row: Sequence[float], prepared: Prepared) -> BoundingBox:
    """Convert a row in input pixels to a box in the upright image's pixels, cut at its edges."""
    left, right = ((x - prepared.pad_left) / prepared.scale_x for x in (row[0], row[2]))
    top, bottom = ((y - prepared.pad_top) / prepared.scale_y for y in (row[1], row[3]))
    height, width = prepared.image_height, prepared.image_width
    left, right = (min(max(x, 0.0), width) for x in (left, right))
    top, bottom = (min(max(y, 0.0), height) for y in (top, bottom))
    corners = upright_corners((left, top, right, bottom), height, width, prepared.orientation)
    return BoundingBox(expert.labels[int(row[5])], row[4], *corners)
