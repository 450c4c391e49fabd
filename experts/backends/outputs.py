"""Checks of an expert's raw outputs, and predictions label by label."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from experts.errors import OutputInvalid, WeightsMismatch
from experts.expert import HOLDS_FROM, ONE_LABEL, LabelScore, Prediction, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.expert import Expert


def require_numbers(expert: Expert, *outputs: Tensor) -> None:
    """Raises OutputInvalid for NaN or infinity. Pass raw outputs: an infinite one becomes a score like any other."""
    if not all(is_finite(output) for output in outputs):
        raise OutputInvalid(expert.id, "its output has NaN or infinity: check its weights, or use precision fp32")


def winners(expert: Expert, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Best score of each row of (n, labels), and its label's index. Raises OutputInvalid for an exact tie."""
    best, labels = scores.max(dim=1)
    are_tied = (scores == best.unsqueeze(1)).sum(dim=1) > 1
    if bool(are_tied.any()):
        row = int(are_tied.nonzero()[0])
        tied = [name for name, score in zip(expert.labels, scores[row], strict=False) if score == best[row]]
        equal = f"its scores for {' and '.join(tied)} are equal, {float(best[row]):g}"
        raise OutputInvalid(expert.id, f"{equal}: it does not tell them apart")
    return best, labels


def likeliest(expert: Expert, scores: Tensor) -> tuple[Prediction, ...]:
    """One prediction for each row of (n, labels). Raises OutputInvalid for an exact tie."""
    best, labels = winners(expert, scores)
    found = zip(labels.tolist(), best.tolist(), strict=True)
    predictions = tuple(Prediction(expert.labels[label], score) for label, score in found)
    if not expert.tells_scores:
        return predictions
    every_label = label_by_label(expert, scores.tolist())
    return tuple(replace(each, outputs=of_all.outputs) for each, of_all in zip(predictions, every_label, strict=True))


def require_several_labels(expert: Expert) -> None:
    """Raises WeightsMismatch for a softmax over one label, whose probability is always 1."""
    if len(expert.labels) < 2 and expert.task is not Task.MULTILABEL:
        raise WeightsMismatch(expert.id, ONE_LABEL)


def label_by_label(expert: Expert, rows: Sequence[Sequence[float]]) -> tuple[Prediction, ...]:
    """One prediction for each row of independent probabilities by label."""
    thresholds = dict(expert.thresholds)
    names = [(label, thresholds.get(label, HOLDS_FROM)) for label in expert.labels]
    return tuple(
        _of_outputs(expert, tuple(LabelScore.of(label, p, from_) for (label, from_), p in zip(names, row, strict=True)))
        for row in rows
    )


def _of_outputs(expert: Expert, outputs: tuple[LabelScore, ...]) -> Prediction:
    best = max((each for each in outputs if each.holds), key=lambda each: each.score, default=None)
    if best is not None:
        return Prediction(best.label, best.score, outputs=outputs, otherwise=expert.otherwise)
    none = 1 - max(each.score for each in outputs)
    return Prediction(expert.otherwise, none, outputs=outputs, otherwise=expert.otherwise)


def is_finite(tensor: Tensor) -> bool:
    """Reduce to the extremes, which any NaN or infinity becomes, and read both at once: no copy, one wait for CUDA."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(extreme) for extreme in torch.stack(torch.aminmax(tensor)).tolist())
