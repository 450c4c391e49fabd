"""Boxes of ONNX detectors: their layout is decided once, at packing, and stored in the program.

A file's heading gives the possible layouts, see ``layouts``; answers to synthetic images decide among several, and
an ambiguous graph is refused. Outputs without boxes, such as masks, are cut off with the nodes that only they need.

Guarantees: thresholds, suppression and limits are those of torch's detectors (``experts.backends.boxes``). A graph that
chooses its boxes itself has room for a fixed number: if all places are used, boxes may be missing, and the image is not
judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torchvision.ops import box_convert

from experts.backends.boxes import prediction, selected, suppressed
from experts.backends.onnx.layouts import Detections, Layout, fitting, mismatch
from experts.backends.outputs import require_numbers
from experts.errors import OutputInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx
    from torch import Tensor

    from experts.backends.base import Prepared
    from experts.expert import Expert, Prediction

RECIPE = "what its boxes mean is noted"  # in manifests
_NOTE = "coserve.detections"
_SCORE_TOLERANCE = 1e-3  # of a score below 0 or above 1


def decided(expert: Expert, found: Detections, answers: Sequence[np.ndarray]) -> Layout:
    """``answers``: to synthetic images. Raises WeightsMismatch without one clear layout, and for another input."""
    layout = Layout.TORCHVISION if found.layouts == (Layout.TORCHVISION,) else _decided(expert, found, answers[0])
    if (expert.pixels.fit, expert.pixels.normalize) != (layout.fit, "unit"):
        raise mismatch(
            expert,
            f"is a detector, which wants its images {layout.fit} and `normalize: unit`; the line "
            f"sends them {expert.pixels.fit} and `normalize: {expert.pixels.normalize}`",
        )
    return layout


def _decided(expert: Expert, found: Detections, answer: np.ndarray) -> Layout:
    possible = fitting(answer.shape, len(expert.labels), found.extra) if answer.ndim == 3 else set()
    layouts = {each for each in possible & set(found.layouts) if _are_scores(each, answer, len(expert.labels))}
    if Layout.CHOSEN in layouts:
        return Layout.CHOSEN  # only labels are all whole numbers
    if len(layouts) != 1:
        what = " or ".join(sorted(layouts)) or "none of the layouts that are known, with scores from 0 to 1"
        raise mismatch(
            expert,
            f"answers {answer.shape}, which is {what}: export it again, with its metadata and its last activation",
        )
    return layouts.pop()


def _are_scores(layout: Layout, answer: np.ndarray, label_count: int) -> bool:
    """True where numbers in the places of a layout's scores and labels can be scores and labels."""
    if layout is Layout.ANCHORS_LAST:
        return _within(answer[:, 4 : 4 + label_count])
    if layout is Layout.OBJECTNESS:
        return _within(answer[:, :, 4 : 5 + label_count])
    if layout is Layout.QUERIES:
        return _within(answer[:, :, : 4 + label_count])
    labels = answer[:, :, 5]
    are_labels = bool(((labels == np.round(labels)) & (labels >= 0) & (labels < label_count)).all())
    return are_labels and _within(answer[:, :, :5] if layout is Layout.CHOSEN_QUERIES else answer[:, :, 4])


def _within(scores: np.ndarray) -> bool:
    known = scores[np.isfinite(scores)]
    return bool(((known >= -_SCORE_TOLERANCE) & (known <= 1 + _SCORE_TOLERANCE)).all())


def note(model: onnx.ModelProto, layout: Layout) -> None:
    model.metadata_props.add(key=_NOTE, value=layout)


def noted(notes: Mapping[str, str]) -> Layout | None:
    return Layout(notes[_NOTE]) if _NOTE in notes else None


def predictions(
    layout: Layout, expert: Expert, runs: Sequence[Sequence[np.ndarray]], batch: Sequence[Prepared]
) -> tuple[Prediction, ...]:
    """One prediction per image. ``runs``: by output. Raises OutputInvalid for NaN and for too many boxes."""
    if layout is Layout.TORCHVISION:
        found = [_torchvision_rows(expert, *run) for run in runs]
    else:
        answers = torch.from_numpy(np.concatenate([run[0] for run in runs])[: len(batch)]).float()
        if len(answers) != len(batch):
            raise OutputInvalid(expert.id, f"it answered for {len(answers)} of {len(batch)} images: export it again")
        require_numbers(expert, answers)
        found = [_rows(expert, layout, answer, prepared) for answer, prepared in zip(answers, batch, strict=True)]
    return tuple(prediction(expert, rows.tolist(), each) for rows, each in zip(found, batch, strict=True))


def _rows(expert: Expert, layout: Layout, answer: Tensor, prepared: Prepared) -> Tensor:
    """Rows of ``experts.backends.boxes`` from one image's answer."""
    count = len(expert.labels)
    if layout is Layout.ANCHORS_LAST:
        return suppressed(expert, box_convert(answer[:4].T, "cxcywh", "xyxy"), answer[4 : 4 + count].T)
    if layout is Layout.OBJECTNESS:
        scores = answer[:, 4:5] * answer[:, 5 : 5 + count]
        return suppressed(expert, box_convert(answer[:, :4], "cxcywh", "xyxy"), scores)
    boxes = answer[:, :4]
    if layout is not Layout.CHOSEN:
        extent = answer.new_tensor(prepared.tensor.shape[:0:-1]).repeat(2)  # width and height of its input
        boxes = box_convert(boxes, "cxcywh", "xyxy") * extent
    if layout is Layout.QUERIES:
        best, labels = answer[:, 4 : 4 + count].max(dim=1)
        return selected(expert, boxes, best, labels)
    _refuse_full(expert, answer[:, 4])
    return selected(expert, boxes, answer[:, 4], answer[:, 5])


def _torchvision_rows(expert: Expert, boxes: np.ndarray, labels: np.ndarray, scores: np.ndarray) -> Tensor:
    found = torch.from_numpy(boxes), torch.from_numpy(scores)
    require_numbers(expert, *found)
    return selected(expert, found[0], found[1], torch.from_numpy(labels) - 1)  # 0 is the background


def _refuse_full(expert: Expert, scores: Tensor) -> None:
    """Raises OutputInvalid where all boxes that the graph has room for count: it may have left out others."""
    if bool((scores > expert.confidence).all()):
        raise OutputInvalid(
            expert.id,
            f"it found {len(scores)} boxes in one image, all that its graph has room for: export it with a larger "
            "max_det, or give it smaller parts of the board",
        )
