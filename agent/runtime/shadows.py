"""Shadows: what is kept of a request so that the shadows of its experts can be shown the same image later.

Guarantees: for each step of a judged request whose expert has a shadow, whoever watches is told exactly once, while the
loop runs: what both said and how long each took, or why the shadow said nothing. An image is kept until its shadow ran
or was dropped, of parts of a frame the part alone, and all of them together take ``most_bytes`` at most: the oldest are
dropped beyond that. Nothing is kept while nobody watches. On the loop's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agent.core import events
from agent.core.background import DROPPED
from agent.core.request import CANCELLED
from agent.runtime.image_sources import EncodedImage, FramePart, ImageFile, pixels_of
from agent.runtime.text_sources import TextSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.core.request import Batch, Outcome
    from agent.runtime.executor import RequestSource
    from agent.runtime.image_sources import ImageSource
    from experts.expert import Prediction

MOST_BYTES = 64 * 1024 * 1024  # of images that wait for shadows; arbitrary: as many crops as may wait take a tenth


@dataclass(frozen=True, slots=True)
class Said:
    """What an expert said of an image. ``seconds``: those of its batch, shared evenly among the images in it.

    ``executor``: the number of the one that ran it.
    """

    prediction: Prediction
    seconds: float
    executor: int


@dataclass(frozen=True, slots=True)
class ShadowAnswer:
    """An expert and its shadow side by side. ``about``: what the request was submitted with.

    ``shadow_said`` is None where the shadow said nothing, for ``reason``; ``is_dropped``: it was never asked.
    """

    about: object
    expert: str
    shadow: str
    said: Said
    shadow_said: Said | None
    reason: str | None = None
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class ShadowWatch:
    """Who is told of shadows, on the loop's thread: what they answer, and when one is about to run and has run."""

    answered: Callable[[ShadowAnswer], None]
    begun: Callable[[str], None]
    ended: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Kept:
    answer: ShadowAnswer  # as far as it is known
    image: ImageSource
    size_bytes: int


class Shadows:
    """Of one loop. ``pairs``: expert -> shadow, by the Engine's names."""

    def __init__(self, pairs: Mapping[str, str], most_bytes: int = MOST_BYTES) -> None:
        self.pairs = dict(pairs)
        self.watch: ShadowWatch | None = None
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by background request, the oldest first
        self._cancelled: set[int] = set()
        self._held_bytes = 0
        self._since_s: dict[int, float] = {}  # batch -> when it began
        self._saying: dict[int, dict[str, Callable[[Prediction], Said]]] = {}  # request -> expert

    def __contains__(self, request: int) -> bool:
        return request in self._kept

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def image(self, request: int) -> ImageSource:
        return self._kept[request].image

    def batch_begun(self, batch: Batch, now: float) -> None:
        if self.watch is None or not (self.pairs or self._kept):
            return
        self._since_s[batch.id] = now
        if batch.requests[0] in self._kept:
            self.watch.begun(batch.expert)

    def batch_ended(self, batch: Batch, now: float) -> None:
        since_s = self._since_s.pop(batch.id, None)
        if self.watch is None or since_s is None:
            return
        if batch.requests[0] in self._kept:
            self.watch.ended(batch.expert)
        elif batch.expert not in self.pairs:
            return
        saying = partial(Said, seconds=(now - since_s) / len(batch.requests), executor=batch.executor)
        for request in batch.requests:
            self._saying.setdefault(request, {})[batch.expert] = saying

    def show(
        self, request: int, source: RequestSource, outcome: Outcome, about: object, number: Callable[[], int]
    ) -> list[events.Event]:
        """A request of the line has its outcome: what the Engine is to be asked of the shadows of its experts.

        ``number``: that of another request.
        """
        saying = self._saying.pop(request, {})
        if self.watch is None or isinstance(source, TextSource):
            return []
        asked: list[events.Event] = []
        for step in outcome.steps:
            if step.expert in self.pairs and step.expert in saying:
                said = saying[step.expert](step.prediction)
                answer = ShadowAnswer(about, step.expert, self.pairs[step.expert], said, None)
                asked += self._keep(answer, source, number)
        return asked

    def end(self, request: int, outcome: Outcome) -> None:
        kept = self._kept.pop(request)
        self._held_bytes -= kept.size_bytes
        self._cancelled.discard(request)
        answer, saying = kept.answer, self._saying.pop(request, {}).get(kept.answer.shadow)
        said = saying(outcome.steps[0].prediction) if outcome.steps and saying is not None else None
        is_dropped = outcome.reason in (DROPPED, CANCELLED)
        self._tell(answer, said, None if said is not None else outcome.reason, is_dropped=is_dropped)

    def change_line(self, pairs: Mapping[str, str]) -> None:
        """Other pairs from now on; what waits for a shadow that is none any more, the Engine drops."""
        self.pairs = dict(pairs)

    def clear(self) -> None:
        self._kept.clear()
        self._held_bytes = 0

    def _keep(self, answer: ShadowAnswer, source: ImageSource, number: Callable[[], int]) -> list[events.Event]:
        """Keep its image, and ask for the shadow; those that have to give way are cancelled."""
        image = _to_keep(source)
        size_bytes = _size_bytes(image)
        if size_bytes > self._most_bytes:
            self._tell(answer, None, f"its image takes {size_bytes} bytes", is_dropped=True)
            return []
        request = number()
        self._kept[request] = _Kept(answer, image, size_bytes)
        self._held_bytes += size_bytes
        return [*self._give_way(), events.Offered(request, answer.shadow)]

    def _give_way(self) -> list[events.Event]:
        """Cancel the oldest until the rest is within the bound; what they take is free once they have ended."""
        leaving = sum(self._kept[request].size_bytes for request in self._cancelled)
        cancelled: list[events.Event] = []
        for request, kept in self._kept.items():
            if self._held_bytes - leaving <= self._most_bytes:
                break
            if request not in self._cancelled:
                self._cancelled.add(request)
                leaving += kept.size_bytes
                cancelled.append(events.Cancelled(request))
        return cancelled

    def _tell(self, answer: ShadowAnswer, said: Said | None, reason: str | None, *, is_dropped: bool) -> None:
        if self.watch is not None:
            told = ShadowAnswer(answer.about, answer.expert, answer.shadow, answer.said, said, reason, is_dropped)
            self.watch.answered(told)


def _to_keep(source: ImageSource) -> ImageSource:
    """A part of a frame alone: its frame may be a hundred times as large. It was decoded when the part was judged."""
    return pixels_of(source, source.name) if isinstance(source, FramePart) else source


def _size_bytes(image: ImageSource) -> int:
    """What keeping it takes of memory; a file's bytes stay where they are."""
    if isinstance(image, np.ndarray):
        return image.nbytes
    if isinstance(image, bytes):
        return len(image)
    if isinstance(image, EncodedImage):
        return len(image.content)
    assert isinstance(image, Path | ImageFile), "parts of frames were cut"
    return 0
