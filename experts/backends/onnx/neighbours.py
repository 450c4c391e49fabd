"""Answers alone and beside other images: a graph whose answers depend on their neighbours runs one image at a time.

Dynamic quantisation takes its range from the whole batch, and an exporter may fix a batch that it mixes. So packing
tries synthetic images alone, together, and in another order beside a white one; what differs is not served in batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx

from experts.backends.onnx.layouts import mismatch
from experts.backends.ort.session import REFUSALS, session_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from onnxruntime import InferenceSession

    from experts.expert import Expert

    Reader = Callable[[Sequence[np.ndarray]], np.ndarray]  # what counts of a run's outputs, by image

TOLERANCE = 1e-4  # of a score, and of a larger value in parts of it: what the order of sums may change
BY_RANGE = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulIntegerToFloat"})
_NOTE = "coserve.alone"


def settle_batch(
    expert: Expert, model: onnx.ModelProto, images: np.ndarray, read: Reader, tolerance: float = TOLERANCE
) -> None:
    """Fix a batch of one, with the reason as a note, where answers need it. In place.

    Raises WeightsMismatch for a fixed batch that mixes its images, and REFUSALS for a graph that does not run alone.
    """
    weights = {tensor.name for tensor in model.graph.initializer}  # which older files list as inputs, too
    first = next(value for value in model.graph.input if value.name not in weights).type.tensor_type.shape.dim[0]
    if first.dim_value == 1:
        return
    session, count = session_once(model.SerializeToString()), len(images)
    if first.dim_value:
        others = first.dim_value - 1
        found = _largest_difference(
            session, images, [np.array([each, *[one] * others]) for each in range(count) for one in (0, 1)], read
        )
        if found > tolerance:
            raise mismatch(
                expert,
                f"answers for images of one batch together (they differ by {found:.2g}): export it with a batch of 1",
            )
        return
    why = _why_alone(model, session, images, read, tolerance)
    if why is not None:
        first.dim_value = 1
        model.metadata_props.add(key=_NOTE, value=why)


def why_alone(program: bytes) -> str | None:
    """Why a program runs one image at a time; None: it does not, or its file says so."""
    notes = {entry.key: entry.value for entry in onnx.load_from_string(program).metadata_props}
    return f"it gets one image at a time: {notes[_NOTE]}" if _NOTE in notes else None


def _why_alone(
    model: onnx.ModelProto, session: InferenceSession, images: np.ndarray, read: Reader, tolerance: float
) -> str | None:
    if by_range := {node.op_type for node in model.graph.node} & BY_RANGE:
        return f"{min(by_range)} takes its range from all images of a batch"
    order = np.arange(len(images))
    alone = [order[place : place + 1] for place in order]
    _largest_difference(session, images, alone, read)  # it runs, or is refused
    try:
        found = _largest_difference(session, images, (*alone, order, order[::-1]), read)
    except (*REFUSALS, ValueError):
        return "it does not take several images"
    return f"an answer differs by {found:.2g} beside other images" if found > tolerance else None


def _largest_difference(
    session: InferenceSession, images: np.ndarray, batches: Sequence[np.ndarray], read: Reader
) -> float:
    """Largest among the answers to an image. Raises ValueError where a batch is not answered image by image."""
    source, seen, largest = session.get_inputs()[0].name, dict[int, np.ndarray](), 0.0
    for batch in batches:
        rows = read(session.run(None, {source: images[batch]}))
        if len(rows) != len(batch):
            raise ValueError(f"{len(rows)} answers to {len(batch)} images")
        for place, row in zip(batch.tolist(), rows, strict=True):
            other = seen.setdefault(place, row)
            if row.shape != other.shape or not np.array_equal(np.isfinite(row), np.isfinite(other)):
                return float("inf")
            known = np.isfinite(other)
            apart = np.abs(row[known] - other[known]) / np.maximum(1.0, np.abs(other[known]))
            largest = max(largest, float(apart.max(initial=0.0)))
    return largest
