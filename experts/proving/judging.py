"""An expert outside its line: packed and bound in one form, asked through the agent's own path.

Guarantees: an answer equals the agent's in this form; of an anomaly expert also without a threshold, whose label then
means nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experts.backends import backend_for, prepare
from experts.errors import OutputInvalid
from experts.expert import Precision, Task
from experts.images import decode_image
from experts.proving.comparing import compare

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from experts.expert import Expert, Prediction
    from experts.images import Decoded
    from experts.proving.answers import KnownAnswer
    from experts.proving.comparing import AnswerComparison

ANY_THRESHOLD = 0.0  # scores do not depend on it


def compared(
    expert: Expert, known: Sequence[KnownAnswer], form: Precision = Precision.FP32, device: str = "cpu"
) -> AnswerComparison:
    """An expert's answers in a form beside known ones. Raises as packing does, and ImageError."""
    judge = Judge(expert, form, device)
    return compare(expert, known, [judge.answer_known(each.image) for each in known])


class Judge:
    """``device``: torch's. The constructor raises as packing does."""

    def __init__(self, expert: Expert, form: Precision = Precision.FP32, device: str = "cpu") -> None:
        backend = backend_for(expert.architecture)
        packable = backend.pack(expert, form)
        self.remark = packable.remark
        self._expert = expert
        self._skeleton = backend.skeleton(expert, form, packable.program, device)
        self._skeleton.bind({name: tensor.to(device) for name, tensor in packable.tensors.items()})

    def answer(self, image: Decoded, expert: Expert | None = None) -> Prediction:
        """``expert``: the same with another input or other labels. Raises OutputInvalid for NaN or infinity."""
        asked = expert or self._expert
        if asked.task is Task.ANOMALY and asked.threshold is None:
            asked = replace(asked, threshold=ANY_THRESHOLD)
        return self._skeleton.infer(asked, [prepare(asked, image)])[0]

    def answer_known(self, file: Path, expert: Expert | None = None, image: Decoded | None = None) -> Prediction:
        """The answer with the scores of all labels. ``image``: the file's content. Raises ImageError, and
        OutputInvalid."""
        asked = replace(expert or self._expert, tells_scores=True)
        try:
            return self.answer(image or decode_image(file, str(file)), asked)
        except OutputInvalid as error:
            raise OutputInvalid(asked.id, f"{file.name}: {error.message}") from error
