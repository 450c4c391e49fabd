"""ShadowSource: offers judged images to the shadows of their experts while the line is idle, and keeps the answers.

A shadow is another version of an expert, on no route. Its requests have idle precedence, one at a time.

Guarantees: no verdict is changed or delayed. Each image judged by an expert with a shadow counts exactly once: as
compared, with both answers and times; as failed, with the reason; or as dropped. At most WAITING_MAXIMUM images and
MOST_BYTES wait, cut to the part of a frame: beyond that the oldest are dropped. A
shadow that ran at ENDINGS_MAXIMUM endings of the agent gets no more requests. All methods but the constructor,
``refuse_enders``, ``counts`` and ``flush`` run on the loop's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agent.core.names import line_name, with_line_names
from agent.core.request import CANCELLED, GAVE_WAY, NO_SPARE_ROOM, Precedence
from agent.deployment.line_change import pair_sha256
from agent.doors.desk import ShadowsView
from agent.records.truth.shadow_answers import Pair, Side, SideBySide, count_dropped, write_answer
from agent.runtime.images.sources import EncodedImage, FramePart, ImageFile, decoded
from agent.runtime.texts import TextSource
from agent.service.inspections.inspector import JudgedWatch, Submission
from experts.expert import Verdict
from experts.image_files.depth import deep_png

if TYPE_CHECKING:
    from agent.core.request import Batch, Outcome
    from agent.records.result_writer import ResultStore
    from agent.runtime.images.sources import ImageSource
    from agent.service.inspections.courses import Course
    from agent.service.inspections.inspector import Inspector
    from agent.subject import Subject
    from experts.expert import Prediction
    from experts.graph import ExpertGraph

log = logging.getLogger(__name__)

ENDINGS_MAXIMUM = 2
DROPS_TOGETHER = 100  # counted in one write: a line without idle time drops as many images as it judges
WAITING_MAXIMUM = 64  # arbitrary
MOST_BYTES = 64 * 1024 * 1024  # arbitrary: 64 crops take a tenth of it


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Judged image. ``expert``, ``shadow``: the Engine's names; ``side``: the expert's answer, on these terms."""

    subject: Subject
    image: ImageSource
    size_bytes: int
    expert: str
    shadow: str
    side: Side
    terms_sha256: str


class ShadowSource:
    """Shadows of one line. Construct before the agent starts."""

    def __init__(self, inspector: Inspector, store: ResultStore) -> None:
        self._inspector = inspector
        self._store = store
        self._waiting: deque[_Waiting] = deque()  # oldest first
        self._waiting_bytes = 0
        self._asked: _Waiting | None = None
        self._submitted: Submission | None = None
        self._lacks_room = False  # pause until the line has judged another image
        self._ran_on: dict[int, dict[str, tuple[float, int]]] = {}  # request -> expert -> seconds and executor
        self._unwritten: Counter[Pair] = Counter()  # dropped images
        self._counts = ShadowsView()
        self._terms: dict[tuple[str, str], str] = {}  # by line file and expert
        inspector.watch = JudgedWatch(self._ran, self._judged, self._offer)
        inspector.shadow_counts = self.counts
        self.refuse_enders()

    def refuse_enders(self) -> None:
        """Quarantine shadows of the line that ended the agent too often."""
        for shadow in sorted(self._graph.in_shadow):
            endings = self._inspector.attempts(self._key(shadow))
            if endings >= ENDINGS_MAXIMUM:
                reason = f"it ran when the agent was ended, {endings} times - give it other weights, or take it away"
                self._inspector.agent.loop.quarantine(shadow, reason)

    def counts(self) -> ShadowsView:
        return replace(self._counts, waiting=len(self._waiting), running=int(self._asked is not None))

    def flush(self) -> None:
        """Drop waiting images and write the counts, after the loop has ended."""
        if self._asked is not None:
            self._waiting.append(self._asked)
            self._asked = None
        while self._waiting:
            self._drop(self._waiting.popleft())
        for pair in tuple(self._unwritten):
            self._write_dropped(pair)

    @property
    def _graph(self) -> ExpertGraph:
        return self._inspector.agent.setup.graph

    def _key(self, shadow: str) -> str:
        return f"shadow {line_name(shadow)} {self._inspector.model_of(shadow)}"

    # -- judged images --

    def _ran(self, batch: Batch, seconds: float) -> None:
        """Record each image's share of its batch's seconds."""
        if batch.quantum_s is None and (batch.expert in self._graph.shadows or self._asked is not None):
            for request in batch.requests:
                ran = (seconds / len(batch.requests), batch.executor)
                self._ran_on.setdefault(request, {})[batch.expert] = ran

    def _judged(self, submission: Submission, outcome: Outcome) -> None:
        ran_on = {} if submission.number is None else self._ran_on.pop(submission.number, {})
        if submission.precedence is Precedence.IDLE:
            if submission is self._submitted:
                self._answered(outcome, ran_on)
            return
        self._lacks_room = False
        if isinstance(submission.image, TextSource):
            return
        shadows = self._graph.shadows
        for step in outcome.steps:
            if step.expert in shadows and step.expert in ran_on:
                side = self._side(step.expert, submission.subject.component, step.prediction, ran_on[step.expert])
                self._keep(submission.subject, submission.image, step.expert, side)

    def _keep(self, subject: Subject, source: ImageSource, expert: str, side: Side) -> None:
        """Keep an image; of a frame only the part: the frame may be a hundred times as large."""
        image = _part(source) if isinstance(source, FramePart) else source
        shadow, terms = self._graph.shadows[expert], self._terms_sha256(expert)
        self._waiting.append(_Waiting(subject, image, _size_bytes(image), expert, shadow, side, terms))
        self._waiting_bytes += self._waiting[-1].size_bytes
        while len(self._waiting) > WAITING_MAXIMUM or self._waiting_bytes > MOST_BYTES:
            self._drop(self._take_first())

    def _take_first(self) -> _Waiting:
        first = self._waiting.popleft()
        self._waiting_bytes -= first.size_bytes
        return first

    # -- requests --

    def _offer(self) -> None:
        """Submit the oldest image to its shadow; images of removed pairs, and of other terms, are dropped."""
        if self._asked is not None or self._lacks_room:
            return
        while self._waiting:
            waiting = self._take_first()
            is_paired = self._graph.shadows.get(waiting.expert) == waiting.shadow
            if is_paired and self._terms_sha256(waiting.expert) == waiting.terms_sha256:
                self._asked = waiting
                shadow, subject = waiting.shadow, waiting.subject
                asked = replace(subject, key=self._key(shadow), component=None, expert=line_name(shadow), box=None)
                self._submitted = Submission(asked, waiting.image, _nothing, precedence=Precedence.IDLE)
                self._inspector.submit_subject(self._submitted)
                return
            self._drop(waiting)

    def _answered(self, outcome: Outcome, ran_on: dict[str, tuple[float, int]]) -> None:
        waiting, self._asked = self._asked, None
        assert waiting is not None, "one image is asked at a time"
        if outcome.reason in (GAVE_WAY, NO_SPARE_ROOM, CANCELLED):
            self._lacks_room = outcome.reason == NO_SPARE_ROOM
            self._waiting.appendleft(waiting)
            self._waiting_bytes += waiting.size_bytes
            return
        answer = None
        if outcome.steps and waiting.shadow in ran_on:
            component, prediction = waiting.subject.component, outcome.steps[0].prediction
            answer = self._side(waiting.expert, component, prediction, ran_on[waiting.shadow])
        self._write(waiting, answer, None if answer is not None else outcome.reason and with_line_names(outcome.reason))

    def _side(self, expert: str, component: str | None, prediction: Prediction, ran: tuple[float, int]) -> Side:
        """Judge a prediction by the expert's step of the route. ``ran``: seconds and executor."""
        steps = () if component is None else self._graph.routes.get(component, ())
        number = next((index for index, step in enumerate(steps) if step.expert == expert), None)
        processor = next(each.processor for each in self._inspector.agent.setup.executors if each.id == ran[1])
        if component is None or number is None:
            return Side(prediction.label, prediction.score, None, *ran, processor)
        judgement = self._graph.judge(component, number, prediction)
        return Side(judgement.label, judgement.score, judgement.verdict is not Verdict.NG, *ran, processor)

    # -- rows --

    def _pair(self, waiting: _Waiting) -> Pair:
        expert, shadow, model_of = waiting.expert, waiting.shadow, self._inspector.model_of
        versions = model_of(expert), model_of(shadow)
        return Pair(line_name(expert), line_name(shadow), *versions, waiting.terms_sha256)

    def _terms_sha256(self, expert: str) -> str:
        agent = self._inspector.agent
        key = agent.config.catalog.sha256, expert
        if key not in self._terms:
            if len(self._terms) > len(agent.setup.graph.shadows):
                self._terms.clear()  # of earlier line files
            shadow = agent.setup.graph.shadows[expert]
            self._terms[key] = pair_sha256(agent.config, line_name(expert), line_name(shadow))
        return self._terms[key]

    def _write(self, waiting: _Waiting, answer: Side | None, reason: str | None) -> None:
        pair, subject, counts = self._pair(waiting), waiting.subject, self._counts
        self._write_dropped(pair)
        row = SideBySide(
            subject.key, subject.name, subject.component, pair, waiting.side, answer, datetime.now(UTC), reason
        )
        self._store.write(lambda database: write_answer(database, row))
        if answer is not None:
            self._counts = replace(counts, ran=counts.ran + 1)
        else:
            self._counts = replace(counts, failed=counts.failed + 1)
            log.debug("shadow_said_nothing shadow=%s image=%s reason=%s", pair.shadow, row.image, reason)

    def _drop(self, waiting: _Waiting) -> None:
        pair = self._pair(waiting)
        self._counts = replace(self._counts, dropped=self._counts.dropped + 1)
        self._unwritten[pair] += 1
        if self._unwritten[pair] >= DROPS_TOGETHER:
            self._write_dropped(pair)

    def _write_dropped(self, pair: Pair) -> None:
        count = self._unwritten.pop(pair, 0)
        if count:
            self._store.write(lambda database: count_dropped(database, pair, count))


def _nothing(_: Outcome, __: Course) -> None:
    """Ignore the ending: the judged watch has the outcome with the Engine's names."""


def _part(source: FramePart) -> ImageSource:
    part = decoded(source, source.name)
    if part.pixels.dtype == np.uint8:
        return part.pixels
    values = part.pixels[:, :, 0] if part.pixels.shape[2] == 1 else part.pixels
    return EncodedImage(deep_png(values, part.bits), source.name, part.height * part.width)


def _size_bytes(image: ImageSource) -> int:
    """Bytes of memory of a kept image; a file takes none."""
    if isinstance(image, np.ndarray):
        return image.nbytes
    if isinstance(image, bytes):
        return len(image)
    if isinstance(image, EncodedImage):
        return len(image.content)
    assert isinstance(image, Path | ImageFile), "parts of frames were cut"
    return 0
