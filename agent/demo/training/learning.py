"""Gradient descent at a pace: the learning rate rises for a quarter of the steps, then falls to nothing.

Several trainings run beside one another, each on one thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Parameter

Each = TypeVar("Each")
Trained = TypeVar("Trained")

RISING_FRACTION = 0.25
MAX_GRADIENT = 10.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Number of training steps, and the highest learning rate on the way."""

    steps: int
    learning_rate: float


class Descent:
    """AdamW on some parameters; exactly ``pace.steps`` steps."""

    def __init__(self, parameters: Iterable[Parameter], pace: Pace, weight_decay: float) -> None:
        self._parameters = list(parameters)
        self._optimizer = AdamW(self._parameters, pace.learning_rate, weight_decay=weight_decay, fused=True)
        total_steps = pace.steps + 1  # the last of the schedule has a rate of almost nothing
        rising = max(RISING_FRACTION, 1.5 / total_steps)  # the schedule divides by zero at a rise of exactly one step
        self._schedule = OneCycleLR(self._optimizer, pace.learning_rate, total_steps=total_steps, pct_start=rising)

    def step(self, loss: Tensor) -> None:
        """Learn from one batch's loss."""
        self._optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self._parameters, MAX_GRADIENT)
        self._optimizer.step()
        self._schedule.step()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def beside_one_another(
    stage: str, train: Callable[[Each], Trained], given: Sequence[Each], progress: Callable[[str, int, int], None]
) -> tuple[Trained, ...]:
    """What is trained of each, in their order: as many at a time as torch has threads, each on one of them.

    On a busy machine that is several times faster than one after the other on all threads, which wait for each other.
    ``train`` draws from a generator of its own alone.
    """
    trained, threads = [], torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for each in pool.map(train, given):
            trained.append(each)
            progress(stage, len(trained), len(given))
    torch.set_num_threads(threads)  # a thread's own number is every later thread's, too
    return tuple(trained)
