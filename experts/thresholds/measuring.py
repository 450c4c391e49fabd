"""Scores of an anomaly expert, by the serving backend on the CPU in fp32.

Guarantees: scores equal the agent's, with any threshold or none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experts.images import Decoded
from experts.proving.judging import Judge

if TYPE_CHECKING:
    import numpy as np

    from experts.expert import Expert


class Meter:
    """Anomaly expert, loaded to score images. The constructor raises as packing does."""

    def __init__(self, expert: Expert) -> None:
        self._judge = Judge(replace(expert, threshold=None))

    def score(self, image: np.ndarray) -> float:
        """Score of an image, uint8 RGB (height, width, 3). Raises OutputInvalid for NaN or infinity."""
        anomaly = self._judge.answer(Decoded(image, *image.shape[:2])).anomaly
        assert anomaly is not None, "an anomaly expert's program measures"
        return anomaly.score
