"""Anomaly experts: a graph's scores and maps, judged against the line's threshold.

A score is one number per image, a map one per pixel; larger means more anomalous. Without a score, the map's maximum is
the score. Anomalib's outputs are known by name (v2: ``pred_score`` and ``anomaly_map``; ``pred_label`` and
``pred_mask`` follow a threshold of its own and are dropped), all others by shape: (n,) or (n, 1) is a score, (n, 1, h,
w) or (n, h, w) a map. The choice is made at packing and stored in the program; other outputs are not computed.

Guarantees: an image's score does not depend on its neighbours: a graph that mixes them runs one image at a time. The
threshold is not in the packed bytes: a new threshold needs no repacking.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import adaptive_max_pool2d

from experts.backends.onnx.answers import probe_images, probed
from experts.backends.onnx.layouts import mismatch
from experts.backends.onnx.neighbours import settle_batch
from experts.backends.onnx.pruning import keep_outputs
from experts.backends.ort.session import session_once
from experts.errors import OutputInvalid
from experts.expert import OTHER_THRESHOLD, Anomaly, AnomalyMap, Prediction
from experts.images import upright_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import onnx
    from onnxruntime import InferenceSession

    from experts.backends.base import Prepared
    from experts.expert import Expert

RECIPE = "measures anomalies"  # in manifests
SCORE_NAMES = ("pred_score", "pred_scores")  # Anomalib, v2 and v1
MAP_NAMES = ("anomaly_map", "anomaly_maps")
BATCH_TOLERANCE = 1e-3  # of the largest score: what the order of sums may change
MAP_SIDE_PX = 128  # longest side of a kept map
SCALE = 4.0  # logistic units from a score of 0 to the threshold
_NOTE = "coserve.anomaly"


@dataclass(frozen=True, slots=True)
class AnomalyOutputs:
    """Names of a graph's score and map outputs; at least one."""

    score: str | None
    map: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.score, self.map) if name is not None)


def settle_outputs(expert: Expert, model: onnx.ModelProto) -> AnomalyOutputs:
    """Keep score and map outputs, and see ``neighbours``. In place. Raises WeightsMismatch, REFUSALS."""
    synthetic = probe_images(expert.pixels)
    alone = _answers(session_once(model.SerializeToString()), synthetic, at_once=1)
    outputs = _counting(expert, alone)
    keep_outputs(model, outputs.names)
    scales = [
        float(np.abs(rows[np.isfinite(rows)]).max(initial=0.0)) or 1.0
        for rows in (alone[name] for name in outputs.names)
    ]

    def read(found: Sequence[np.ndarray]) -> np.ndarray:
        parts = zip(map(np.atleast_1d, found), scales, strict=True)
        return np.concatenate([rows.reshape(len(rows), -1) / scale for rows, scale in parts], axis=1)

    settle_batch(expert, model, synthetic, read, BATCH_TOLERANCE)
    return outputs


def note(model: onnx.ModelProto, outputs: AnomalyOutputs) -> None:
    model.metadata_props.add(key=_NOTE, value=json.dumps(asdict(outputs), sort_keys=True))


def noted(notes: Mapping[str, str]) -> AnomalyOutputs | None:
    return AnomalyOutputs(**json.loads(notes[_NOTE])) if _NOTE in notes else None


def predictions(
    outputs: AnomalyOutputs, expert: Expert, runs: Sequence[Sequence[np.ndarray]], batch: Sequence[Prepared]
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
        raise OutputInvalid(expert.id, "its output has NaN or infinity: check its weights")
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
    """Logistic function of the score in units of the threshold, where it is 0.5: each model has a scale of its own."""
    distance = SCALE * (score - threshold) / (abs(threshold) or 1.0)
    return 1 / (1 + math.exp(-distance)) if distance >= 0 else math.exp(distance) / (1 + math.exp(distance))


def _prediction(
    expert: Expert, threshold: float, score: float, where: np.ndarray | None, orientation: int
) -> Prediction:
    good, anomalous = expert.labels
    confidence = certainty(score, threshold)
    if score < threshold:
        return Prediction(good, 1 - confidence, anomaly=Anomaly(score, threshold))
    shown = None if where is None else upright_map(_small(where), orientation)
    return Prediction(anomalous, confidence, anomaly=Anomaly(score, threshold, shown))


def _small(values: np.ndarray) -> AnomalyMap:
    """Reduced map: each pixel is the maximum of the pixels it replaces, so no peak is lost."""
    height, width = values.shape
    shrink = min(1.0, MAP_SIDE_PX / max(height, width))
    size = (max(1, round(height * shrink)), max(1, round(width * shrink)))
    pooled = adaptive_max_pool2d(torch.from_numpy(np.ascontiguousarray(values, np.float32))[None], size)[0].numpy()
    lowest, highest = float(pooled.min()), float(pooled.max())
    grey = np.zeros(size) if highest == lowest else (pooled - lowest) / (highest - lowest) * 255
    return AnomalyMap(*size, lowest, highest, np.round(grey).astype(np.uint8).tobytes())


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts])  # one image's score may lack a dimension


def _answers(session: InferenceSession, synthetic: np.ndarray, at_once: int) -> dict[str, np.ndarray]:
    """Answers to the synthetic images, by output."""
    outputs = zip(session.get_outputs(), zip(*probed(session, synthetic, at_once), strict=True), strict=True)
    return {output.name: _joined(parts)[: len(synthetic)] for output, parts in outputs}


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
            "or both; name them pred_score and anomaly_map where there are more, and export it again",
        )
    return outputs


def _meant(candidates: Sequence[str], known: Sequence[str]) -> str | None:
    named = [name for name in candidates if name in known]
    chosen = named or candidates
    return chosen[0] if len(chosen) == 1 else None
