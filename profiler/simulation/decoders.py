"""Decodes and prepares images on the cores that computing leaves, under virtual time.

A batch takes K n + B once its images are there. CPU executors that compute have their share of the cores, and decoding
has the others, at most one core for an image; an executor that waits for images leaves its share to them. Where an
accelerator's executor waits and all cores compute, one core decodes.

Guarantees: no clock and no thread; images that a batch waits for come first, then by deadline; an image is decoded
again only where it is no longer kept.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import TYPE_CHECKING

from agent.runtime.machine.box import torch_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.effects import Prepare
    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch

LEAST_THREADS = 2  # of ``agent.runtime.images.preparation``
AT_ONCE = -math.inf
ROUNDING = 1e-9  # cores: fewer count as none


@dataclass(frozen=True, slots=True)
class ImageTimes:
    """Core seconds to prepare an image, by expert, for one at least; experts without samples take the mean."""

    cores: int
    image_s: Mapping[str, float]

    def of(self, expert: str) -> float:
        return self.image_s[expert] if expert in self.image_s else fmean(self.image_s.values())


def core_share(cores: int, cpu_executors: int) -> float:
    """Cores that one of these CPU executors computes on: its threads, within its share of the box."""
    executors = max(cpu_executors, 1)
    return min(max(cores // executors, 1), cores / executors)


@dataclass(slots=True, eq=False)
class _Task:
    """Decoding of an image. ``left_s``: core seconds; ``batch``: the batch that waits for it."""

    due_s: float
    left_s: float
    batch: int | None = None
    is_done: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class _Image:
    """A request's image: the forms that it is kept in, and the task that makes it."""

    forms: frozenset[str]
    task: _Task


@dataclass(slots=True)
class Decoders:
    """Decoding of one simulation. ``now``: its virtual time."""

    times: ImageTimes
    executors: Sequence[ExecutorSpec]
    matrix: PerformanceMatrix
    _images: dict[int, _Image] = field(default_factory=dict)
    _waiting: list[tuple[float, int, _Task]] = field(default_factory=list)  # a heap
    _running: list[_Task] = field(default_factory=list)
    _lacking: dict[int, int] = field(default_factory=dict)  # images by batch that waits for them
    _batches: dict[int, Batch] = field(default_factory=dict)
    _computing: int = 0  # executors of the CPU
    _at_s: float = 0.0
    _ticket: count[int] = field(default_factory=count)
    _forms: dict[str, str] = field(default_factory=dict)
    _executor_cores: float = 0.0

    def __post_init__(self) -> None:
        on_cpu = sum(torch_device(spec.processor) == "cpu" for spec in self.executors)
        self._executor_cores = core_share(self.times.cores, on_cpu)

    def prepare(self, effect: Prepare, now: float) -> None:
        self._advance(now)
        form = self._form(effect.expert)
        forms = frozenset((form, *map(self._form, effect.later)))
        known = self._images.get(effect.request)
        if known is not None and form in known.forms:
            known.forms = forms
            return
        self._drop(known)
        task = _Task(effect.due_s, self.times.of(effect.expert))
        self._images[effect.request] = _Image(forms, task)
        self._push(task, effect.due_s)
        self._fill()

    def forget(self, request: int, now: float) -> None:
        """Drops a request's image unless a batch waits for it."""
        self._advance(now)
        self._drop(self._images.pop(request, None))
        self._fill()

    def start(self, batch: Batch, now: float) -> bool:
        """True where all images of a batch are there; else the batch waits, and its images come first."""
        self._advance(now)
        lacking = [task for request in batch.requests if not (task := self._task_for(request, batch)).is_done]
        for task in lacking:
            task.batch = batch.id
            if task not in self._running:
                self._push(task, AT_ONCE)
        if lacking:
            self._lacking[batch.id] = len(lacking)
            self._batches[batch.id] = batch
        self._fill()
        return not lacking

    def computes(self, processor: str, executors: int, now: float) -> None:
        """``executors`` more of this processor compute from now on; fewer where negative."""
        if torch_device(processor) == "cpu":
            self._advance(now)
            self._computing += executors

    def next_end_s(self) -> float:
        """End of the next image at the present pace; infinity when none is being decoded."""
        return self._at_s + min((self._left_s(task, rate) for task, rate in self._rates()), default=math.inf)

    def end_next(self) -> list[Batch]:
        """Ends the first image, at ``next_end_s``; batches whose images are now all there."""
        ends_s, (task, _) = self.next_end_s(), min(self._rates(), key=lambda each: self._left_s(*each))
        self._advance(ends_s)
        self._running.remove(task)
        task.is_done = True
        self._fill()
        if task.batch is None:
            return []
        self._lacking[task.batch] -= 1
        if self._lacking[task.batch]:
            return []
        del self._lacking[task.batch]
        return [self._batches.pop(task.batch)]

    def _task_for(self, request: int, batch: Batch) -> _Task:
        """Task that makes a request's image as a batch is shown it."""
        known = self._images.get(request)
        if known is not None and self._form(batch.expert) in known.forms:
            return known.task
        self._drop(known)
        task = _Task(AT_ONCE, self.times.of(batch.expert), batch.id)
        self._push(task, AT_ONCE)
        self._images[request] = _Image(frozenset(), task)  # for this batch alone: a later one decodes it again
        return task

    def _push(self, task: _Task, due_s: float) -> None:
        task.due_s = due_s
        heapq.heappush(self._waiting, (due_s, next(self._ticket), task))

    def _drop(self, image: _Image | None) -> None:
        if image is not None and image.task.batch is None:
            image.task.is_dropped = True

    def _fill(self) -> None:
        """Starts tasks up to the number of threads; images that batches wait for have separate threads."""
        while self._waiting:
            due_s, _, task = self._waiting[0]
            if not (task.is_done or task.is_dropped or task in self._running or task.due_s != due_s):
                beside = sum((each.batch is None) == (task.batch is None) for each in self._running)
                if beside >= max(self.times.cores, LEAST_THREADS):
                    return
                self._running.append(task)
            heapq.heappop(self._waiting)

    def _advance(self, now: float) -> None:
        for task, rate in self._rates():
            task.left_s -= (now - self._at_s) * rate
        self._at_s = now

    def _rates(self) -> list[tuple[_Task, float]]:
        """Images being decoded with their share of a core; images that batches wait for come first."""
        awaited = [task for task in self._running if task.batch is not None]
        ahead = [task for task in self._running if task.batch is None]
        free = max(self.times.cores - self._computing * self._executor_cores, 0.0)
        if free < ROUNDING and awaited:
            free = 1.0
        rates: list[tuple[_Task, float]] = []
        for tasks in (awaited, ahead):
            rate = min(free / len(tasks), 1.0) if tasks else 0.0
            rates += [(task, rate) for task in tasks]
            free = max(free - rate * len(tasks), 0.0)
        return rates

    @staticmethod
    def _left_s(task: _Task, rate: float) -> float:
        return max(task.left_s, 0.0) / rate if rate > 0.0 else math.inf

    def _form(self, expert: str) -> str:
        """Form of an expert's images; an unknown expert has a separate form."""
        if expert not in self._forms:
            rows = [column[expert] for column in self.matrix.experts.values() if expert in column]
            form = rows[0].prepared if rows else None
            self._forms[expert] = expert if form is None else form.name
        return self._forms[expert]
