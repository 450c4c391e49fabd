"""Scores of an anomaly expert, by the serving backend on the CPU in fp32.

Guarantees: scores equal the agent's, with any threshold or none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experts.backends import backend_for
from experts.expert import Precision

if TYPE_CHECKING:
    import numpy as np

    from experts.expert import Expert


class Meter:
    """Anomaly expert, loaded to score images. The constructor raises as packing does."""

    def __init__(self, expert: Expert) -> None:
        self._backend = backend_for(expert.architecture)
        packable = self._backend.pack(expert, Precision.FP32)
        self._skeleton = self._backend.skeleton(expert, Precision.FP32, packable.program, "cpu")
        self._skeleton.bind(packable.tensors)
        self._expert = replace(expert, threshold=0.0)  # arbitrary: scores do not depend on it

    def score(self, image: np.ndarray) -> float:
        """Score of an image, uint8 RGB (height, width, 3). Raises OutputInvalid for NaN or infinity."""
        (prediction,) = self._skeleton.infer(self._expert, [self._backend.prepare(self._expert, image)])
        assert prediction.anomaly is not None, "an anomaly expert's program measures"
        return prediction.anomaly.score
