"""Decodes and prepares images on the cores that computing leaves, under virtual time.

A batch takes K n + B once its images are prepared. CPU executors that compute have their share of the cores, and
decoding has the others, at most one core for an image; an executor that waits for images leaves its share to them.
Where an accelerator's executor waits and all cores compute, one core decodes.

Guarantees: no clock and no thread; awaited images of batches come first, then images by deadline; an image is decoded
again only if no longer kept.
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
    from collections.abc import Container, Mapping, Sequence

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
class _Image:
    """A request's image: the ``forms`` that it is kept in, and its decoding.

    ``left_s``: core seconds; ``batch``: the batch that waits for it.
    """

    forms: frozenset[str]
    due_s: float
    left_s: float
    batch: int | None = None
    is_done: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class Decoders:
    """Decoding of one simulation. ``now``: its virtual time."""

    times: ImageTimes
    executors: Sequence[ExecutorSpec]
    matrix: PerformanceMatrix
    _images: dict[int, _Image] = field(default_factory=dict)
    _waiting: list[tuple[float, int, _Image]] = field(default_factory=list)  # a heap
    _running: list[_Image] = field(default_factory=list)
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
        image = self._images[effect.request] = _Image(forms, effect.due_s, self.times.of(effect.expert))
        self._push(image, effect.due_s)
        self._fill()

    def forget(self, request: int, now: float) -> None:
        """Drops a request's image unless a batch waits for it."""
        if request in self._images:
            self._advance(now)
            self._drop(self._images.pop(request))
            self._fill()

    def drop(self, batches: Container[int]) -> None:
        """Forgets the batches of lost executors; no batch waits for their images then."""
        for image in (*self._images.values(), *self._running):
            if image.batch in batches:
                image.batch = None
        for batch in [each for each in self._batches if each in batches]:
            del self._batches[batch], self._lacking[batch]

    def start(self, batch: Batch, now: float) -> bool:
        """True if all images of a batch are prepared; else the batch waits, and its images come first."""
        self._advance(now)
        lacking = [image for request in batch.requests if not (image := self._image_for(request, batch)).is_done]
        for image in lacking:
            image.batch = batch.id
            if image not in self._running:
                self._push(image, AT_ONCE)
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
        return self._at_s + min((self._left_s(image, rate) for image, rate in self._rates()), default=math.inf)

    def end_next(self) -> list[Batch]:
        """Ends the first image, at ``next_end_s``; batches whose images are now all there."""
        ends_s, (image, _) = self.next_end_s(), min(self._rates(), key=lambda each: self._left_s(*each))
        self._advance(ends_s)
        self._running.remove(image)
        image.is_done = True
        self._fill()
        if image.batch is None:
            return []
        self._lacking[image.batch] -= 1
        if self._lacking[image.batch]:
            return []
        del self._lacking[image.batch]
        return [self._batches.pop(image.batch)]

    def _image_for(self, request: int, batch: Batch) -> _Image:
        """A request's image as a batch takes it."""
        known = self._images.get(request)
        if known is not None and self._form(batch.expert) in known.forms:
            return known
        self._drop(known)
        image = _Image(frozenset(), AT_ONCE, self.times.of(batch.expert), batch.id)  # a later batch decodes it again
        self._images[request] = image
        self._push(image, AT_ONCE)
        return image

    def _push(self, image: _Image, due_s: float) -> None:
        image.due_s = due_s
        heapq.heappush(self._waiting, (due_s, next(self._ticket), image))

    def _drop(self, image: _Image | None) -> None:
        if image is not None and image.batch is None:
            image.is_dropped = True

    def _fill(self) -> None:
        """Starts images up to the number of threads; images that batches wait for have separate threads."""
        while self._waiting:
            due_s, _, image = self._waiting[0]
            if not (image.is_done or image.is_dropped or image in self._running or image.due_s != due_s):
                beside = sum((each.batch is None) == (image.batch is None) for each in self._running)
                if beside >= max(self.times.cores, LEAST_THREADS):
                    return
                self._running.append(image)
            heapq.heappop(self._waiting)

    def _advance(self, now: float) -> None:
        for image, rate in self._rates():
            image.left_s -= (now - self._at_s) * rate
        self._at_s = now

    def _rates(self) -> list[tuple[_Image, float]]:
        """Images being decoded with their share of a core; images that batches wait for come first."""
        awaited = [image for image in self._running if image.batch is not None]
        ahead = [image for image in self._running if image.batch is None]
        free = max(self.times.cores - self._computing * self._executor_cores, 0.0)
        if free < ROUNDING and awaited:
            free = 1.0
        rates: list[tuple[_Image, float]] = []
        for images in (awaited, ahead):
            rate = min(free / len(images), 1.0) if images else 0.0
            rates += [(image, rate) for image in images]
            free = max(free - rate * len(images), 0.0)
        return rates

    @staticmethod
    def _left_s(image: _Image, rate: float) -> float:
        return max(image.left_s, 0.0) / rate if rate > 0.0 else math.inf

    def _form(self, expert: str) -> str:
        """Form of an expert's images; an unknown expert has a separate form."""
        if expert not in self._forms:
            rows = [column[expert] for column in self.matrix.experts.values() if expert in column]
            form = rows[0].prepared if rows else None
            self._forms[expert] = expert if form is None else form.name
        return self._forms[expert]
