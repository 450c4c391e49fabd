"""Training of a model's tensors in place: with a teacher's soft labels until a step, without them from there on.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 4.2.1: a small student cannot follow both its texts and its teacher to
the end. Deterministic: equal tensors, batches and number of threads give equal weights on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.llm.training.descent import GradientDescent
from experts.llm.training.step import loss_and_gradients, predictions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from experts.llm.files.config import ArchSpec
    from experts.llm.model import LanguageModel
    from experts.llm.training.step import Losses, TextBatch

STOP_FRACTION = 0.7  # of the steps, where no other stop is given


@dataclass(frozen=True, slots=True)
class Schedule:
    """``alpha``: weight of the soft labels before step ``stop_at``; 0: there is no teacher."""

    steps: int
    learning_rate: float
    alpha: float = 0.0
    stop_at: int | None = None

    @property
    def stop_step(self) -> int:
        return round(STOP_FRACTION * self.steps) if self.stop_at is None else self.stop_at

    def alpha_at(self, step: int) -> float:
        """Weight in this step; steps count from 0."""
        return self.alpha if step < self.stop_step else 0.0


class Training:
    """A model in training in one process. ``trained``: the tensors that a step changes, which require gradients."""

    def __init__(self, spec: ArchSpec, tensors: Mapping[str, Tensor]) -> None:
        self._spec = spec
        self._tensors = tensors
        self.trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}

    def share(self, batch: TextBatch) -> TextBatch:
        """Texts of a batch that this process computes."""
        return batch

    def loss_and_gradients(
        self, batch: TextBatch, alpha: float = 0.0, soft_labels: Tensor | None = None
    ) -> tuple[Losses, dict[str, Tensor]]:
        return loss_and_gradients(self._spec, self._tensors, batch, alpha, soft_labels)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor | None:
        """Norm of the whole model's gradients; None if these are all."""
        return None

    def whole(self) -> Mapping[str, Tensor]:
        """All tensors of the model as it is now."""
        return self._tensors


def train(
    training: Training,
    batch_of: Callable[[int], TextBatch],
    schedule: Schedule,
    teacher: LanguageModel | None = None,
    report: Callable[[int, Losses], None] = lambda step, losses: None,
) -> None:
    """Change the trained tensors. ``batch_of``: a step's; ``report``: a step and its losses."""
    trained = training.trained
    descent = GradientDescent(trained.values(), schedule.steps, schedule.learning_rate)
    for step in range(schedule.steps):
        batch, alpha = training.share(batch_of(step)), schedule.alpha_at(step)
        soft_labels = None
        if teacher is not None and alpha:
            with torch.no_grad():
                soft_labels, _ = predictions(teacher, batch)
        losses, gradients = training.loss_and_gradients(batch, alpha, soft_labels)
        for name, gradient in gradients.items():
            trained[name].grad = gradient
        descent.step(training.norm(gradients))
        report(step, losses)
