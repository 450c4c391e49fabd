"""Gradient descent: the learning rate rises for a quarter of the steps, then falls to nothing.

Several trainings run beside one another, each on one thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

Each = TypeVar("Each")
Trained = TypeVar("Trained")

RISING_FRACTION = 0.25
MAX_GRADIENT = 10.0
WEIGHT_DECAY = 0.05


def descend(
    parameters: Iterable[Tensor], batches: Sequence[Each], loss: Callable[[Each], Tensor], learning_rate: float
) -> None:
    """AdamW on these parameters, one step for each batch. ``learning_rate``: the highest on the way."""
    trained = list(parameters)
    optimizer = AdamW(trained, learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    total_steps = len(batches) + 1  # the last of the schedule has a rate of almost nothing
    rising = max(RISING_FRACTION, 1.5 / total_steps)  # the schedule divides by zero at a rise of exactly one step
    schedule = OneCycleLR(optimizer, learning_rate, total_steps=total_steps, pct_start=rising)
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        clip_grad_norm_(trained, MAX_GRADIENT)
        optimizer.step()
        schedule.step()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def beside_one_another(train: Callable[[Each], Trained], given: Iterable[Each]) -> Iterator[Trained]:
    """Results of ``train``, in order: as many at a time as torch has threads, each on one of them.

    On a busy machine that is several times faster than one after the other on all threads, which wait for each other.
    ``train`` draws from no shared generator.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(train, given)
    torch.set_num_threads(threads)  # a thread's own number is every later thread's, too
