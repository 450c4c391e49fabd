"""Gradient descent: the learning rate rises for a quarter of the steps, then falls to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

Each = TypeVar("Each")

RISING_FRACTION = 0.25
MAX_GRADIENT = 10.0
WEIGHT_DECAY = 0.05


class GradientDescent:
    """AdamW on these parameters for so many steps. ``learning_rate``: the highest on the way."""

    def __init__(self, parameters: Iterable[Tensor], steps: int, learning_rate: float) -> None:
        self._parameters = list(parameters)
        self._optimizer = AdamW(self._parameters, learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
        total_steps = steps + 1  # the last of the schedule has a rate of almost nothing
        rising = max(RISING_FRACTION, 1.5 / total_steps)  # the schedule divides by zero at a rise of exactly one step
        self._schedule = OneCycleLR(self._optimizer, learning_rate, total_steps=total_steps, pct_start=rising)

    def step(self, norm: Tensor | None = None) -> None:
        """Follow the parameters' gradients, and drop them. ``norm``: of all ranks' gradients; None without ranks."""
        for parameter in self._parameters:
            if parameter.grad is not None:  # torch 2.14's fused AdamW takes a gradient's numbers in their stored order
                parameter.grad = parameter.grad.contiguous()
        if norm is None:
            clip_grad_norm_(self._parameters, MAX_GRADIENT)
        else:
            clip_grads_with_norm_(self._parameters, MAX_GRADIENT, norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()


def descend(
    parameters: Iterable[Tensor], batches: Sequence[Each], loss: Callable[[Each], Tensor], learning_rate: float
) -> None:
    """One step for each batch."""
    descent = GradientDescent(parameters, len(batches), learning_rate)
    for batch in batches:
        loss(batch).backward()
        descent.step()
