"""Answers of graphs that are not served, and the evidence by which each is told.

Guarantees: a graph is named only by what its exporter or its operators show: metadata, names of outputs, recurrent or
normalising layers, the operator that its answers end in. Of other graphs the user is asked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from experts.backends.onnx.layouts import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from experts.backends.onnx.evidence import Structure
    from experts.backends.onnx.heading import Heading

TEXT = "text recognition (CTC: a character for each column of the image)"
POSE = "keypoints (a pose)"
NAMED: Mapping[str, tuple[str, ...]] = {  # by the names that exporters give to outputs
    "a detector of Hugging Face's DETR family, whose boxes compete with a label for none": ("logits", "pred_boxes"),
    "masks of instances": ("pred_masks",),
    POSE: ("simcc_x", "simcc_y"),
    "depth of each pixel": ("predicted_depth",),
    "embeddings (a vector for comparing images)": ("last_hidden_state",),
}
EMBEDDINGS = ("image_embeds", "embeddings", "embedding", "pooler_output", "features")
RECURRENT = frozenset({"LSTM", "GRU", "DynamicQuantizeLSTM"})
LENGTHS = frozenset({"ReduceL2", "ReduceSumSquare"})
SERVED = "served are classifiers (n, labels), detectors of boxes, and scores or maps of what is strange"
# heads of keypoints and angles, as ultralytics names them; those of open vocabularies are other layers
BESIDE_BOXES = re.compile(r"model\.\d+[./]cv4\.\d\.\d[./]")


def unserved(heading: Heading, structure: Callable[[], Structure], last: str | None) -> str | None:
    """A sentence about answers of no served kind; None without evidence. ``last``: operator that they end in."""
    shapes = [value.shape or () for value in heading.outputs]
    found = _named(heading) or _text(heading, shapes[0], structure, last) or _shaped(shapes, structure, last)
    if found is None:
        return None
    what, why = found
    return f"answers with {shown(heading)}, and {why}: that is {what}, which is not served; {SERVED}"


def _named(heading: Heading) -> tuple[str, str] | None:
    names = {value.name for value in heading.outputs}
    for what, given in NAMED.items():
        if names.issuperset(given):
            return what, f"its exporter calls that {' and '.join(given)}"
    first = heading.outputs[0]
    if len(first.shape or ()) == 2 and first.name in EMBEDDINGS:
        return "an embedding (a vector for comparing images)", f"its exporter calls that {first.name}"
    return None


def _text(
    heading: Heading, shape: Sequence[int | None], structure: Callable[[], Structure], last: str | None
) -> tuple[str, str] | None:
    """Characters are many: listed in the metadata, or ranked at each place, or read by a recurrent layer."""
    characters = heading.metadata.get("character", "").splitlines()
    if len(shape) == 3 and characters:
        return TEXT, f"its metadata list {len(characters)} characters"
    if len(shape) == 3 and last in {"Softmax", "LogSoftmax"}:
        return TEXT, f"a {last} ranks {shape[2] or 'the'} characters at each place"
    is_row = len(shape) == 3 or (len(shape) == 2 and shape[1] is None)
    layers = structure().operators & RECURRENT if is_row else frozenset()
    return (TEXT, f"a recurrent layer ({min(layers)}) reads it column by column") if layers else None


def _shaped(
    shapes: Sequence[tuple[int | None, ...]], structure: Callable[[], Structure], last: str | None
) -> tuple[str, str] | None:
    first = shapes[0]
    if len(first) == 4 and first[1] != 1 and first[1:].count(1) != 2:
        return (
            "a segmentation, heatmaps of keypoints, or features",
            f"that is a map for each of {first[1] or 'its'} channels",
        )
    if len(first) == 2 and len(shapes) == 1 and last == "LpNormalization":
        return "an embedding (a vector for comparing images)", "its last operator makes it of length 1"
    if len(first) == 2 and len(shapes) == 1 and last == "Div" and structure().operators & LENGTHS:
        return "an embedding (a vector for comparing images)", "its last operators divide it by its length"
    if len(first) == 3 and len(shapes) == 1 and structure().names(BESIDE_BOXES):
        return f"{POSE} or rotated boxes", "ultralytics' layers beside boxes and labels (cv4) are in it"
    return None
