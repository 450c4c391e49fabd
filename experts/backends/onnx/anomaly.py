"""Anomaly experts: a graph's scores and maps, judged against the line's threshold.

A score is one number per image, a map one per pixel; the larger, the stranger. Without a score, the map's maximum is
the score. Anomalib's outputs are known by name (v2: ``pred_score`` and ``anomaly_map``; ``pred_label`` and
``pred_mask`` follow a threshold of its own and are dropped), all others by shape: (n,) or (n, 1) is a score, (n, 1, h,
w) or (n, h, w) a map. The choice is made at packing and noted in the program: nothing else is computed.

Guarantees: an image's score does not depend on its neighbours: a graph that mixes them runs one image at a time. No
threshold lies in the packed bytes, so another one packs nothing anew.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import adaptive_max_pool2d

from experts.backends.onnx.answers import probe_images
from experts.backends.onnx.layouts import mismatch
from experts.backends.onnx.pruning import keep_outputs
from experts.backends.ort.session import REFUSALS, session_once
from experts.errors import OutputInvalid
from experts.expert import OTHER_THRESHOLD, Anomaly, AnomalyMap, Prediction
from experts.images import upright_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import onnx
    from onnxruntime import InferenceSession

    from experts.backends.base import Prepared
    from experts.expert import Expert

RECIPE = "measures anomalies"  # in manifests: a graph packed as a classifier is packed anew as an anomaly expert
SCORE_NAMES = ("pred_score", "pred_scores")  # Anomalib, v2 and v1
MAP_NAMES = ("anomaly_map", "anomaly_maps")
SIDE_BY_SIDE = 2  # images that a graph of any batch is tried with at once
BATCH_TOLERANCE = 1e-3  # of the largest score: what the order of sums may change
MAP_SIDE_PX = 128  # the longest side of a map that is kept
SCALE = 4.0  # a score of nothing is this many logistic units below its threshold, one of twice that as many above
_NOTE = "coserve.anomaly"


@dataclass(frozen=True, slots=True)
class AnomalyOutputs:
    """The outputs of a graph that count, by name; at least one of them."""

    score: str | None
    map: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.score, self.map) if name is not None)


def settle_outputs(expert: Expert, model: onnx.ModelProto, images: onnx.ValueInfoProto) -> AnomalyOutputs:
    """Leave the outputs that count, and fix a batch of one if need be. In place. Raises WeightsMismatch, REFUSALS."""
    made_up = probe_images(expert.pixels.height, expert.pixels.width)
    alone = _answers(session_once(model.SerializeToString()), made_up, at_once=1)
    outputs = _counting(expert, alone)
    keep_outputs(model, outputs.names)
    first = images.type.tensor_type.shape.dim[0]
    if not first.dim_value and not _takes_several(model, outputs, made_up, alone):
        first.dim_value = 1
    return outputs


def note(model: onnx.ModelProto, outputs: AnomalyOutputs) -> None:
    model.metadata_props.add(key=_NOTE, value=json.dumps(asdict(outputs), sort_keys=True))


def noted_outputs(session: InferenceSession) -> AnomalyOutputs | None:
    note = session.get_modelmeta().custom_metadata_map.get(_NOTE)
    return None if note is None else AnomalyOutputs(**json.loads(note))


def predictions(
    expert: Expert, outputs: AnomalyOutputs, runs: Sequence[Sequence[np.ndarray]], batch: Sequence[Prepared]
) -> tuple[Prediction, ...]:
    """``runs``: the graph's answers, by output. Raises OutputInvalid for NaN or infinity, or without a threshold."""
    if expert.threshold is None:
        why = "it has no threshold" if expert.threshold_of is None else OTHER_THRESHOLD
        raise OutputInvalid(
            expert.id, f"{why}: run `coserve experts threshold LINE.yaml {expert.id} --samples DATA`, or write one"
        )
    parts = zip(*runs, strict=True)
    answers = {name: _joined(values)[: len(batch)] for name, values in zip(outputs.names, parts, strict=True)}
    if not all(np.isfinite(values).all() for values in answers.values()):
        raise OutputInvalid(expert.id, "its output is not a number: check its weights")
    if outputs.map is None:
        where: Sequence[np.ndarray | None] = [None] * len(batch)
    else:
        where = [each.reshape(each.shape[-2:]) for each in answers[outputs.map]]
    scores = answers[outputs.score or outputs.names[0]].reshape(len(batch), -1).max(axis=1)
    return tuple(
        _prediction(expert, expert.threshold, float(score), each, prepared.orientation)
        for score, each, prepared in zip(scores, where, batch, strict=True)
    )


def certainty(score: float, threshold: float) -> float:
    """Logistic in units of the threshold, where it is 0.5: each model counts on a scale of its own."""
    distance = SCALE * (score - threshold) / (abs(threshold) or 1.0)
    return 1 / (1 + math.exp(-distance)) if distance >= 0 else math.exp(distance) / (1 + math.exp(distance))


def _prediction(
    expert: Expert, threshold: float, score: float, where: np.ndarray | None, orientation: int
) -> Prediction:
    good, anomalous = expert.labels
    sure = certainty(score, threshold)
    if score < threshold:
        return Prediction(good, 1 - sure, anomaly=Anomaly(score, threshold))
    shown = None if where is None else upright_map(_small(where), orientation)
    return Prediction(anomalous, sure, anomaly=Anomaly(score, threshold, shown))


def _small(values: np.ndarray) -> AnomalyMap:
    """A map as it is kept: each of its pixels is the highest of those that it stands for, so no peak is lost."""
    height, width = values.shape
    shrink = min(1.0, MAP_SIDE_PX / max(height, width))
    size = (max(1, round(height * shrink)), max(1, round(width * shrink)))
    pooled = adaptive_max_pool2d(torch.from_numpy(np.ascontiguousarray(values, np.float32))[None], size)[0].numpy()
    lowest, highest = float(pooled.min()), float(pooled.max())
    grey = np.zeros(size) if highest == lowest else (pooled - lowest) / (highest - lowest) * 255
    return AnomalyMap(*size, lowest, highest, np.round(grey).astype(np.uint8).tobytes())


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts])  # one image's score may lack a dimension


def _answers(session: InferenceSession, made_up: np.ndarray, at_once: int) -> dict[str, np.ndarray]:
    """Answers to the made-up images, by output, ``at_once`` at a time unless the graph's batch is fixed."""
    images = session.get_inputs()[0]
    size = images.shape[0] if isinstance(images.shape[0], int) else at_once
    filled = np.concatenate([made_up, np.zeros((-len(made_up) % size, *made_up.shape[1:]), made_up.dtype)])
    rows = [session.run(None, {images.name: filled[start : start + size]}) for start in range(0, len(filled), size)]
    names = [output.name for output in session.get_outputs()]
    return {name: _joined(parts)[: len(made_up)] for name, parts in zip(names, zip(*rows, strict=True), strict=True)}


def _counting(expert: Expert, answers: Mapping[str, np.ndarray]) -> AnomalyOutputs:
    numbers = {name: rows for name, rows in answers.items() if np.issubdtype(rows.dtype, np.floating)}
    scores = [name for name, rows in numbers.items() if rows.ndim in {1, 2} and rows[0].size == 1]
    maps = [name for name, rows in numbers.items() if rows.ndim == 3 or (rows.ndim == 4 and rows.shape[1] == 1)]
    outputs = AnomalyOutputs(_meant(scores, SCORE_NAMES), _meant(maps, MAP_NAMES))
    unclear = (len(scores) > 1 and outputs.score is None) or (len(maps) > 1 and outputs.map is None)
    if unclear or not outputs.names:
        shapes = {name: str(("n", *rows.shape[1:])).replace("'", "") for name, rows in answers.items()}
        given = ", ".join(f"{name} {rows.dtype} {shapes[name]}" for name, rows in answers.items())
        raise mismatch(
            expert,
            f"answers with {given}: an anomaly expert gives one score (n,) or (n, 1), one map (n, 1, height, width), "
            "or both; name them pred_score and anomaly_map where there are more, and export it anew",
        )
    return outputs


def _meant(candidates: Sequence[str], known: Sequence[str]) -> str | None:
    named = [name for name in candidates if name in known]
    chosen = named or candidates
    return chosen[0] if len(chosen) == 1 else None


def _takes_several(
    model: onnx.ModelProto, outputs: AnomalyOutputs, made_up: np.ndarray, alone: Mapping[str, np.ndarray]
) -> bool:
    """True where images side by side are answered as each is alone."""
    try:
        together = _answers(session_once(model.SerializeToString()), made_up, at_once=SIDE_BY_SIDE)
    except REFUSALS:
        return False
    return all(_are_alike(together[name], alone[name]) for name in outputs.names)


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """NaN or infinity must stand at the same places in both."""
    numbers = np.isfinite(other)
    if one.shape != other.shape or not np.array_equal(np.isfinite(one), numbers):
        return False
    tolerance = BATCH_TOLERANCE * float(np.abs(other[numbers]).max(initial=0.0))
    return bool((np.abs(one[numbers] - other[numbers]) <= tolerance).all())
