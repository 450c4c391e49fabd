"""Meaning of an ONNX classifier's values: decided once, at packing, and stored in its program.

A classifier answers with one probability per label. Logits become probabilities by a softmax; for `task: multilabel`
each by a sigmoid. The graph's last operator (Softmax, Sigmoid) shows the kind, and is refused for the other task.
Otherwise the answers to synthetic images decide: probabilities add up to 1 for each. Multilabel graphs are decided by
operators alone: a second sigmoid would make every label hold.

Guarantees: an image's score does not depend on its neighbours. A graph of logits stores no choice, as device profiles
depend on its program's bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from experts.backends.onnx.layouts import mismatch
from experts.backends.onnx.neighbours import settle_batch
from experts.backends.outputs import label_by_label, likeliest, require_several_labels
from experts.backends.vision.pixels import normalized
from experts.errors import OutputInvalid
from experts.expert import Prediction, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx
    from onnxruntime import InferenceSession

    from experts.backends.base import Prepared
    from experts.expert import Expert, InputSpec

RECIPE = "what its answers mean is noted, alone where others count"  # in manifests
AT_ONCE = 2  # synthetic images in a run of a graph with an open batch: it may declare any size and take only one
PROBES = 6  # synthetic images
ROW_SUM_TOLERANCE = 1e-3  # rows of probabilities add up to 1 within float32
_NOTE = "coserve.answers"
ROUNDED_SUM_TOLERANCE = 0.05  # of known probabilities: quantised graphs round each of them
_KEEPING_VALUES = frozenset(
    {"Cast", "DequantizeLinear", "Dropout", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Squeeze", "Unsqueeze"}
)
INDEPENDENT = frozenset({"HardSigmoid", "Sigmoid"})
EXCLUSIVE = frozenset({"LogSoftmax", "Softmax"})
_LINEAR = frozenset({"Add", "Conv", "Gemm", "GlobalAveragePool", "MatMul", "ReduceMean"})


class OutputKind(StrEnum):
    LOGITS = "logits"
    PROBABILITIES = "probabilities"


def probe_images(pixels: InputSpec) -> np.ndarray:
    """Synthetic images as experts get them, (PROBES, 3, height, width): grey, white, noise of several kinds."""
    random, (height, width) = np.random.default_rng(0), pixels.size
    shape = (height, width, 3)
    coarse = random.normal(size=(-(-height // 8), -(-width // 8), 3))
    blocks = np.kron(coarse, np.ones((8, 8, 1)))[:height, :width]
    noise = random.normal(size=shape)
    images = (np.zeros(shape), np.ones(shape) * 2, random.uniform(-2, 2, shape), noise, blocks, noise / 10 - 1)
    whole = np.clip(128 + 64 * np.stack(images), 0, 255).astype(np.uint8)
    return np.stack([normalized(image, pixels.normalize).numpy() for image in whole])


def probed(session: InferenceSession, images: np.ndarray, at_once: int = AT_ONCE) -> list[list[np.ndarray]]:
    """A graph's answers, run by run, ``at_once`` images in each unless its batch is fixed; the last one is repeated."""
    source, size = session.get_inputs()[0], _fixed_batch(session) or at_once
    parts = (images[start : start + size] for start in range(0, len(images), size))
    filled = (np.concatenate([part, np.repeat(part[-1:], size - len(part), axis=0)]) for part in parts)
    return [session.run(None, {source.name: part}) for part in filled]


def settle_alone(expert: Expert, model: onnx.ModelProto, images: np.ndarray) -> None:
    """See ``neighbours``. Scores are compared as they count, whatever the values turn out to be."""

    def read(outputs: Sequence[np.ndarray]) -> np.ndarray:
        rows = _by_label(expert, outputs[0]).astype(np.float64)
        if rows.ndim != 2:
            return rows
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        return np.asarray(
            1 / (1 + np.exp(-rows)) if expert.task is Task.MULTILABEL else powers / powers.sum(axis=1, keepdims=True)
        )

    settle_batch(expert, model, images, read)


def decided(expert: Expert, model: onnx.ModelProto, session: InferenceSession, images: np.ndarray) -> OutputKind:
    """Kind of a graph's values, by its answers to synthetic images. Raises WeightsMismatch, see above.

    Each image has to be answered with one value per label.
    """
    size, parts = _fixed_batch(session) or AT_ONCE, []
    for first, *_ in probed(session, images):
        rows = _by_label(expert, first)
        if rows.ndim != 2 or rows.shape[0] != size:
            raise mismatch(expert, f"answers {size} images with {rows.shape}, not (images, labels): export it again")
        parts.append(rows)
    rows = np.concatenate(parts)[:PROBES]
    if rows.shape[1] != len(expert.labels):
        raise mismatch(expert, f"has {rows.shape[1]} labels, the line names {len(expert.labels)}")
    require_several_labels(expert)
    operator = last_operator(model)
    known = rows[np.isfinite(rows).all(axis=1)]
    if expert.task is Task.MULTILABEL:
        return _independent(expert, operator, known)
    if operator in INDEPENDENT:
        raise mismatch(
            expert,
            f"ends in {operator}: its labels do not exclude one another - write `task: multilabel`, "
            f"or if only one can hold, export it without that {operator}",
        )
    if operator == "Softmax" and not _are_probabilities(known, ROUNDED_SUM_TOLERANCE).all():
        raise mismatch(expert, "ends in a Softmax that is not over the labels: export it with axis=1")
    if operator == "Softmax" or (len(known) and _are_probabilities(known).all()):
        return OutputKind.PROBABILITIES
    sums = known.sum(axis=1, dtype=np.float64)
    is_varied = len(known) == PROBES and np.ptp(known, axis=0).max() > 0
    if is_varied and (known >= 0).all() and np.ptp(sums) <= ROW_SUM_TOLERANCE * sums.max():
        raise mismatch(
            expert,
            f"answers with numbers that add up to {sums[0]:.4g} for any image: export it so that they add up to 1",
        )
    return OutputKind.LOGITS


def _independent(expert: Expert, operator: str | None, known: np.ndarray) -> OutputKind:
    if operator in EXCLUSIVE:
        raise mismatch(expert, f"ends in {operator}: its labels exclude one another - remove `task: multilabel`")
    if operator not in INDEPENDENT | _LINEAR and bool(_are_within(known).all()):
        raise mismatch(
            expert,
            f"ends in {operator} and answers from 0 to 1, which may be probabilities or not: export "
            "it so that it ends in one Sigmoid of all labels, or before that",
        )
    return OutputKind.PROBABILITIES if operator in INDEPENDENT else OutputKind.LOGITS


def note(model: onnx.ModelProto, answers: OutputKind) -> None:
    if answers is not OutputKind.LOGITS:
        model.metadata_props.add(key=_NOTE, value=answers)


def noted(notes: Mapping[str, str]) -> OutputKind:
    return OutputKind(notes.get(_NOTE, OutputKind.LOGITS))


def predictions(
    kind: OutputKind, expert: Expert, runs: Sequence[Sequence[np.ndarray]], batch: Sequence[Prepared]
) -> tuple[Prediction, ...]:
    """One prediction per image. ``runs``: by output. Raises OutputInvalid for NaN, ties and wrong probabilities."""
    answered = np.concatenate([np.atleast_1d(run[0]) for run in runs])[: len(batch)]
    rows = _probabilities(expert, _by_label(expert, answered), kind)
    if expert.task is Task.MULTILABEL:
        return label_by_label(expert, rows.tolist())
    return likeliest(expert, torch.from_numpy(rows))


def _probabilities(expert: Expert, rows: np.ndarray, kind: OutputKind) -> np.ndarray:
    if not np.isfinite(rows).all():
        raise OutputInvalid(expert.id, "its output has NaN or infinity: check its weights")
    rows = rows.astype(np.float32, copy=False)
    if expert.task is Task.MULTILABEL:
        return _each_probable(expert, rows, kind)
    if kind is OutputKind.LOGITS:
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        softmax: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
        return softmax
    rows = np.where(np.abs(rows) <= ROW_SUM_TOLERANCE, np.abs(rows), rows)  # -1e-8 is a rounded 0
    if not _are_probabilities(rows, ROUNDED_SUM_TOLERANCE).all():
        raise OutputInvalid(
            expert.id, "its output does not add up to 1, as it did for all images when it was packed: check its weights"
        )
    return rows


def _each_probable(expert: Expert, rows: np.ndarray, kind: OutputKind) -> np.ndarray:
    if kind is OutputKind.LOGITS:
        sigmoid: np.ndarray = torch.from_numpy(rows).sigmoid().numpy()
        return sigmoid
    if not _are_within(rows).all():
        raise OutputInvalid(expert.id, "its output is not from 0 to 1, though it ends in a sigmoid: check its weights")
    return rows.clip(0, 1)


def _are_within(rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = (rows >= -ROW_SUM_TOLERANCE) & (rows <= 1 + ROW_SUM_TOLERANCE)
    return found


def _are_probabilities(rows: np.ndarray, tolerance: float = ROW_SUM_TOLERANCE) -> np.ndarray:
    found: np.ndarray = (rows >= 0).all(axis=1) & (np.abs(rows.sum(axis=1, dtype=np.float64) - 1) <= tolerance)
    return found


def last_operator(model: onnx.ModelProto) -> str | None:
    """Operator that computes the first output; None: an input. Joined values: their common operator, else Concat."""
    makers = {name: node for node in model.graph.node for name in node.output}
    found, waiting = set(), [model.graph.output[0].name]
    for name in waiting:
        node = makers.get(name)
        if node is not None and (node.op_type in _KEEPING_VALUES or node.op_type == "Concat"):
            waiting += node.input[: None if node.op_type == "Concat" else 1]
        else:
            found.add(None if node is None else str(node.op_type))
    return found.pop() if len(found) == 1 else "Concat"


def _fixed_batch(session: InferenceSession) -> int | None:
    count = session.get_inputs()[0].shape[0]
    return count if isinstance(count, int) else None


def _by_label(expert: Expert, rows: np.ndarray) -> np.ndarray:
    rows = np.atleast_1d(rows)  # one image's may lack that axis, too
    return rows[:, None] if rows.ndim == 1 and expert.task is Task.MULTILABEL else rows  # one label may lack its axis
