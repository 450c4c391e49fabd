"""An expert outside its line: packed and bound on the CPU in fp32, asked through the agent's own path.

Guarantees: an answer equals the agent's in fp32; of an anomaly expert also without a threshold, whose label then means
nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experts.backends import backend_for, prepare
from experts.expert import Precision, Task

if TYPE_CHECKING:
    from experts.expert import Expert, Prediction
    from experts.images import Decoded

ANY_THRESHOLD = 0.0  # scores do not depend on it


class Judge:
    """The constructor raises as packing does."""

    def __init__(self, expert: Expert) -> None:
        backend = backend_for(expert.architecture)
        packable = backend.pack(expert, Precision.FP32)
        self._expert = expert
        self._skeleton = backend.skeleton(expert, Precision.FP32, packable.program, "cpu")
        self._skeleton.bind(packable.tensors)

    def answer(self, image: Decoded, expert: Expert | None = None) -> Prediction:
        """``expert``: the same with another input or other labels. Raises OutputInvalid for NaN or infinity."""
        asked = expert or self._expert
        if asked.task is Task.ANOMALY and asked.threshold is None:
            asked = replace(asked, threshold=ANY_THRESHOLD)
        (prediction,) = self._skeleton.infer(asked, [prepare(asked, image)])
        return prediction
