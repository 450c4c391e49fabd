"""Boxes of ONNX detectors: their layout is settled once, at packing, and stored in the program.

A file's heading gives its exporter and so the layout, see ``layouts``; answers to synthetic images have to agree with
it. Outputs without boxes, such as masks, are cut off with the nodes that only they need.

Guarantees: thresholds, suppression and limits are those of torch's detectors (``experts.backends.vision.boxes``). A
graph that chooses its boxes itself has room for a fixed number: if all places are used, boxes may be missing, and the
image is not judged.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from experts.backends.modules.vision import ops
from experts.backends.onnx.decoders import Layout
from experts.backends.onnx.layouts import mismatch, require_pixels
from experts.backends.onnx.neighbours import settle_batch
from experts.backends.outputs import require_numbers
from experts.backends.vision.boxes import best_labels, prediction, selected, suppressed
from experts.errors import OutputInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import onnx
    from torch import Tensor

    from experts.backends.base import Prepared
    from experts.backends.onnx.layouts import Detections
    from experts.expert import Expert, Prediction

RECIPE = "what its boxes mean is noted"  # in manifests
_NOTE, _LIMIT_NOTE = "coserve.detections", "coserve.least"
_ROUNDED = 1e-6  # of a limit in float32
_SCORE_TOLERANCE = 1e-3  # of a score below 0 or above 1
_STRIDES = ((8, 16, 32), (8, 16, 32, 64))  # of YOLOX's levels


def decided(expert: Expert, found: Detections, answers: Sequence[np.ndarray]) -> Layout:
    """Layout of a graph's boxes. ``answers``: to synthetic images, by output; they only have to agree with it.

    Raises WeightsMismatch where they do not, and for another input than its exporter's.
    """
    kind = found.kind
    require_pixels(expert, kind)
    first = answers[0]
    fits = [each for each in kind.fitting(first.shape, len(expert.labels), found.extra) if each in found.layouts]
    layouts = [each for each in fits if _are_scores(each, answers, len(expert.labels))]
    if Layout.CELLS in layouts and _strides(expert.pixels.size, first.shape[1]) is None:
        layouts.remove(Layout.CELLS)
    if len(layouts) == 2 and Layout.CHOSEN_QUERIES in layouts:  # two labels: only label numbers are all whole
        return Layout.CHOSEN_QUERIES
    if len(layouts) != 1:
        raise mismatch(
            expert,
            f"answers {first.shape}, and not as {kind.what} ({found.why}) with scores from 0 to 1: export it again, "
            "with its metadata and its last activation, or correct `detector`",
        )
    return layouts[0]


def _are_scores(layout: Layout, answers: Sequence[np.ndarray], label_count: int) -> bool:
    """True where numbers in the places of a layout's scores and labels can be scores and labels."""
    first = answers[0]
    scores = {
        Layout.ANCHORS_LAST: lambda: first[:, 4 : 4 + label_count],
        Layout.OBJECTNESS: lambda: first[:, :, 4 : 5 + label_count],
        Layout.CELLS: lambda: first[:, :, 4 : 5 + label_count],
        Layout.QUERIES: lambda: first[:, :, : 4 + label_count],
        Layout.CHOSEN_QUERIES: lambda: first[:, :, :5],
        Layout.CHOSEN: lambda: first[:, :, 4],
        Layout.BATCHED: lambda: first[:, 6],
        Layout.LABELLED: lambda: first[:, :, 4],
        Layout.LOGITS: lambda: first,
        Layout.TARGETED: lambda: answers[2],
        Layout.TORCHVISION: lambda: answers[2],
    }[layout]()
    if layout in {Layout.CHOSEN, Layout.CHOSEN_QUERIES} and not _are_labels(first[:, :, 5], label_count):
        return False
    if layout is Layout.LOGITS and answers[1].shape[2] != label_count:
        return False
    known = scores[np.isfinite(scores)]
    return bool(((known >= -_SCORE_TOLERANCE) & (known <= 1 + _SCORE_TOLERANCE)).all())


def settle_alone(expert: Expert, model: onnx.ModelProto, layout: Layout, images: np.ndarray) -> None:
    """See ``neighbours``. Scores are compared; chosen ones by their order, as equal ones may change places."""
    count, chosen = len(expert.labels), {Layout.CHOSEN, Layout.CHOSEN_QUERIES, Layout.LABELLED, Layout.TARGETED}

    def read(outputs: Sequence[np.ndarray]) -> np.ndarray:
        found = outputs[1] if layout is Layout.LOGITS else outputs[2] if layout is Layout.TARGETED else outputs[0]
        if layout in chosen:
            return np.sort(found if layout is Layout.TARGETED else found[:, :, 4], axis=1)
        return found[:, 4 : 4 + count] if layout is Layout.ANCHORS_LAST else found[:, :, -count:]

    settle_batch(expert, model, images, read)


def _are_labels(labels: np.ndarray, label_count: int) -> bool:
    return bool(((labels == np.round(labels)) & (labels >= 0) & (labels < label_count)).all())


def note(model: onnx.ModelProto, layout: Layout, limit: float | None) -> None:
    model.metadata_props.add(key=_NOTE, value=layout)
    if limit is not None:
        model.metadata_props.add(key=_LIMIT_NOTE, value=str(limit))


def below_limit(expert: Expert, limit: float | None) -> str | None:
    """The fault of a `confidence` for which the graph has left out boxes already."""
    if limit is None or expert.confidence >= limit - _ROUNDED:
        return None
    return (
        f"leaves out boxes that score below {limit:g} by itself, and `confidence` is {expert.confidence:g}: write "
        f"`confidence: {limit:g}`, or export it with a lower limit"
    )


def noted_limit(notes: Mapping[str, str]) -> float | None:
    return float(notes[_LIMIT_NOTE]) if _LIMIT_NOTE in notes else None


def noted(notes: Mapping[str, str]) -> Layout | None:
    return Layout(notes[_NOTE]) if _NOTE in notes else None


def predictions(
    layout: Layout, expert: Expert, runs: Sequence[Sequence[np.ndarray]], batch: Sequence[Prepared]
) -> tuple[Prediction, ...]:
    """One prediction per image. ``runs``: by output. Raises OutputInvalid for NaN and for too many boxes."""
    if layout in {Layout.TORCHVISION, Layout.BATCHED}:
        answers = [tuple(map(torch.from_numpy, run)) for run in runs]  # an image in each run
    else:
        outputs = [torch.from_numpy(np.concatenate(each)[: len(batch)]) for each in zip(*runs, strict=True)]
        answers = list(zip(*outputs, strict=True))
    if len(answers) != len(batch):
        raise OutputInvalid(expert.id, f"it answered for {len(answers)} of {len(batch)} images: export it again")
    for answer in answers:
        require_numbers(expert, *answer)
    read = _READERS[layout]
    found = [read(expert, answer, each) for answer, each in zip(answers, batch, strict=True)]
    return tuple(prediction(expert, rows.tolist(), each) for rows, each in zip(found, batch, strict=True))


# an image's rows of ``experts.backends.vision.boxes``, by layout


def _anchors_last(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    rows = answer[0].float().T
    return suppressed(expert, ops.box_convert(rows[:, :4], "cxcywh", "xyxy"), rows[:, 4 : 4 + len(expert.labels)])


def _objectness(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    rows = answer[0].float()
    scores = rows[:, 4:5] * rows[:, 5 : 5 + len(expert.labels)]
    return suppressed(expert, ops.box_convert(rows[:, :4], "cxcywh", "xyxy"), scores)


def _cells(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    """Decode as YOLOX does (yolox/models/yolo_head.py, decode_outputs)."""
    rows, size = answer[0].float(), (int(prepared.tensor.shape[1]), int(prepared.tensor.shape[2]))
    grids, steps = [], []
    for stride in _strides(size, len(rows)) or ():
        down, right = torch.meshgrid(*(torch.arange(side // stride) for side in size), indexing="ij")
        grids.append(torch.stack((right, down), dim=2).reshape(-1, 2))
        steps.append(torch.full((grids[-1].shape[0], 1), stride))
    grid, step = torch.cat(grids), torch.cat(steps)
    places = torch.cat(((rows[:, :2] + grid) * step, rows[:, 2:4].exp() * step), dim=1)
    require_numbers(expert, places)
    return _objectness(expert, (torch.cat((places, rows[:, 4:]), dim=1),), prepared)


def _strides(size: tuple[int, int], anchors: int) -> tuple[int, ...] | None:
    for strides in _STRIDES:
        if sum((size[0] // stride) * (size[1] // stride) for stride in strides) == anchors:
            return strides
    return None


def _chosen(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    rows = answer[0].float()
    _refuse_full(expert, rows[:, 4])
    return selected(expert, rows[:, :4], rows[:, 4], rows[:, 5])


def _batched(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    rows = answer[0].float()
    return selected(expert, rows[:, 1:5], rows[:, 6], rows[:, 5])


def _queries(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    rows = answer[0].float()
    best, labels = best_labels(expert, rows[:, 4 : 4 + len(expert.labels)])
    return selected(expert, _unfolded(rows[:, :4], prepared), best, labels)


def _chosen_queries(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    rows = answer[0].float()
    _refuse_full(expert, rows[:, 4])
    return selected(expert, _unfolded(rows[:, :4], prepared), rows[:, 4], rows[:, 5])


def _logits(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    best, labels = best_labels(expert, answer[1].float().sigmoid())
    return selected(expert, _unfolded(answer[0].float(), prepared), best, labels)


def _labelled(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    rows = answer[0].float()
    _refuse_full(expert, rows[:, 4])
    return selected(expert, rows[:, :4], rows[:, 4], answer[1])


def _targeted(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    labels, boxes, scores = answer
    _refuse_full(expert, scores.float())
    return selected(expert, boxes.float(), scores.float(), labels)


def _torchvision(expert: Expert, answer: Sequence[Tensor], prepared: Prepared) -> Tensor:
    boxes, labels, scores = answer
    return selected(expert, boxes, scores, labels - 1)  # 0 is the background


_READERS: Mapping[Layout, Callable[[Expert, Sequence[Tensor], Prepared], Tensor]] = MappingProxyType(
    {
        Layout.ANCHORS_LAST: _anchors_last, Layout.OBJECTNESS: _objectness, Layout.CELLS: _cells,
        Layout.CHOSEN: _chosen, Layout.BATCHED: _batched, Layout.QUERIES: _queries,
        Layout.CHOSEN_QUERIES: _chosen_queries, Layout.LOGITS: _logits, Layout.LABELLED: _labelled,
        Layout.TARGETED: _targeted, Layout.TORCHVISION: _torchvision,
    }
)  # fmt: skip


def _unfolded(boxes: Tensor, prepared: Prepared) -> Tensor:
    """Corners in pixels of the input, from centres and sizes in parts of it."""
    extent = boxes.new_tensor(prepared.tensor.shape[:0:-1]).repeat(2)  # width and height
    return ops.box_convert(boxes, "cxcywh", "xyxy") * extent


def _refuse_full(expert: Expert, scores: Tensor) -> None:
    """Raises OutputInvalid where all boxes that the graph has room for count: it may have left out others."""
    if bool((scores > expert.confidence).all()):
        raise OutputInvalid(
            expert.id,
            f"it found {len(scores)} boxes in one image, all that its graph has room for: export it with a larger "
            "max_det, or give it smaller parts of the board",
        )
