"""Texts of requests: their tokens across executors, and their remaining work.

Each executor has an engine (``experts.llm.serving``). This module keeps each request's current step and written
tokens, so that the request can continue on another executor. A text begins with a lease for its prompt and its expert's
median output; a text that fills its lease requests a larger one at the end of the quantum.

Guarantees: a writer receives each token once, over all quanta, failures and executors; ``forget`` releases all memory
of a request. ``begin``, ``take`` and ``forget`` may be called from any thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.core.events import Progressed
from agent.core.request import IMAGE, Rejected, Work
from experts.errors import BackendUnavailable, CoServeError
from experts.llm.serving.generation import RefusedText
from experts.llm.serving.texts import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.core.request import Batch
    from agent.runtime.expert_copy import ExpertCopy
    from experts.expert import Prediction
    from experts.llm.model import LanguageModel
    from experts.llm.serving.engine import Left, LlmEngine, TextEngineStatistics
    from experts.llm.serving.generation import TextRequest, Token, Writer
    from experts.llm.serving.iteration import OutputLengths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextSource:
    """``text_for``: text for an expert, by the expert's name in the line file.

    ``AgentLoop.submit`` calls ``text_for`` on the caller's thread for every reachable expert; an executor calls it
    again when an expert begins, so a source caches its tokens. An error ends the request with its reason.
    """

    text_for: Callable[[str], TextRequest]


class RecordingWriter:
    def __init__(self, target: Writer) -> None:
        self.target = target
        self.tokens: list[int] = []

    def write(self, token: Token) -> bool:
        self.tokens.append(token.id)
        return self.target.write(token)


@dataclass(slots=True)
class TextProgress:
    """Texts of one request for its experts, and its progress at the current one."""

    source: TextSource
    texts: dict[str, TextRequest]  # by the expert's name in the line file; filled on demand
    work: Work
    expert: str | None = None  # current expert, by the Engine's name
    executor: int | None = None  # executor that has begun the text
    writer: RecordingWriter | None = None
    running: TextRequest | None = None  # as passed to the executor
    read: int = 0  # tokens of its prompt, as passed to the executor
    lease: int = 0  # tokens that the request may hold for now
    rounding: Mapping[str, Callable[[int], int]] = field(default_factory=dict)  # as in Reached

    def text_for(self, expert: str) -> TextRequest:
        """Text for an expert. Raises as its source does."""
        if expert not in self.texts:
            self.texts[expert] = self.source.text_for(expert)
        return self.texts[expert]

    def rounded(self, tokens: int, expert: str) -> int:
        return self.rounding[expert](tokens) if expert in self.rounding else tokens

    def give(self, text: TextRequest, executor: int) -> None:
        self.writer = RecordingWriter(text.writer)
        self.running = replace(text, writer=self.writer)
        self.executor, self.read = executor, len(text.generation.prompt)

    def leave(self) -> None:
        self.expert = self.executor = self.running = self.writer = None


@dataclass(frozen=True, slots=True)
class Reached:
    """Expert that a request may reach. ``name``: the Engine's. ``tokens_for``: rounds up as an arena does."""

    expert: str
    name: str
    tokens_for: Callable[[int], int]


class RunningTexts:
    """``engines`` by executor; ``lengths``: record of output lengths."""

    def __init__(self, engines: Mapping[int, LlmEngine], lengths: OutputLengths) -> None:
        self._engines = engines
        self._lengths = lengths
        self._progress: dict[int, TextProgress] = {}

    # -- any thread --

    def begin(self, source: TextSource, reached: Sequence[Reached]) -> TextProgress:
        """Progress of a new request that may reach these experts, with its work at each.

        Raises as its source does for the first expert; an error for a later expert ends the request at that step.
        """
        texts: dict[str, TextRequest] = {}
        works: list[tuple[str, Work]] = []
        for place, each in enumerate(reached):
            try:
                texts[each.expert] = source.text_for(each.expert)
            except CoServeError:
                if not place:
                    raise
                continue
            works.append((each.name, self._work(each, texts[each.expert])))
        first = works[0][1] if works else IMAGE
        work = replace(first, steps=tuple(works)) if len(works) > 1 else first
        rounding = {each.expert: each.tokens_for for each in reached}
        return TextProgress(source, texts, work, rounding=rounding)

    def take(self, request: int, progress: TextProgress) -> None:
        self._progress[request] = progress

    def forget(self, request: int) -> None:
        """Idempotent."""
        progress = self._progress.pop(request, None)
        if progress is not None and progress.executor is not None:
            self._engines[progress.executor].forget(request)

    # -- the loop's thread --

    def preempt(self, request: int, executor: int) -> None:
        self._engines[executor].preempt(request)

    def hurry(self) -> None:
        for engine in self._engines.values():
            engine.hurry()

    # -- an executor's thread --

    def run(self, batch: Batch, copies: Sequence[ExpertCopy], models: Mapping[str, LanguageModel]) -> Progressed:
        """Run one quantum. ``copies``: one per request; ``models`` by copy name. Raises as a model does."""
        assert batch.quantum_s is not None, "texts have a quantum"
        refused: list[tuple[int, Prediction | Rejected]] = []
        turns: list[Turn] = []
        for request, copy in zip(batch.requests, copies, strict=True):
            text = self._text(request, copy, batch)
            if isinstance(text, Rejected):
                refused.append((request, text))
            else:
                lease = self._progress[request].lease
                turns.append(Turn(request, copy.expert.id, models[copy.name], text, weights_name(copy), lease))
        if not turns:
            return Progressed(batch.id, tuple(refused), ())
        engine = self._engines.get(batch.executor)
        if engine is None:
            raise BackendUnavailable("texts", f"executor {batch.executor} has no memory for keys and values")
        quantum = engine.run(turns, batch.quantum_s)
        if quantum.lacking:  # ledger and arena disagree
            logger.error("texts_lack_room executor=%d requests=%s", batch.executor, quantum.lacking)
        finished: list[tuple[int, Prediction | Rejected]] = refused
        for request, result in quantum.finished:
            self._progress[request].leave()
            finished.append((request, Rejected(result.reason) if isinstance(result, RefusedText) else result))
        experts = {request: copy.expert.id for request, copy in zip(batch.requests, copies, strict=True)}
        unfinished = [(request, self._left(request, experts[request], left)) for request, left in quantum.unfinished]
        return Progressed(batch.id, tuple(finished), tuple(unfinished))

    def statistics(self, executor: int) -> TextEngineStatistics | None:
        engine = self._engines.get(executor)
        return None if engine is None else engine.statistics()

    def _text(self, request: int, copy: ExpertCopy, batch: Batch) -> TextRequest | Rejected:
        """Text of a request: the same object each time, unless the request moved from another executor."""
        progress = self._progress.get(request)
        if progress is None:
            return Rejected(f"{copy.expert.id} takes texts, and request {request} is an image")
        if progress.expert != expert_name(copy):
            try:
                text = progress.text_for(copy.expert.id)
            except Exception as error:  # noqa: BLE001 - the boundary to the caller's source
                return Rejected(_reason(request, copy, error))
            progress.expert = expert_name(copy)
            progress.lease = progress.work.at(progress.expert).leased
            progress.give(text, batch.executor)
        elif progress.executor != batch.executor:
            self._come_along(request, progress, batch.executor)
        assert progress.running is not None, "it is at an expert"
        return progress.running

    def _come_along(self, request: int, progress: TextProgress, executor: int) -> None:
        """Continue on another executor, which reads the written tokens as part of the prompt."""
        assert progress.running is not None
        assert progress.executor is not None
        assert progress.writer is not None
        self._engines[progress.executor].forget(request)
        generation, written = progress.running.generation, tuple(progress.writer.tokens)
        further = replace(
            generation,
            prompt=generation.prompt + written,
            most_new_tokens=generation.most_new_tokens - len(written),
            written=generation.written + len(written),
        )
        progress.give(replace(progress.running, generation=further, writer=progress.writer.target), executor)

    def _left(self, request: int, expert: str, left: Left) -> Work:
        progress = self._progress[request]
        assert progress.writer is not None
        if left.held >= progress.lease:
            expected = progress.rounded(progress.read + len(progress.writer.tokens) + left.output, expert)
            progress.lease = max(expected, progress.lease + 1)
        foreseen = progress.work if progress.expert is None else progress.work.at(progress.expert)
        most = max(foreseen.most, progress.rounded(left.most, expert))  # the expert may be unforeseen
        return Work(left.prompt, left.output, most, progress.lease, left.held)

    def _work(self, reached: Reached, text: TextRequest) -> Work:
        generation = text.generation
        prompt, most = len(generation.prompt), reached.tokens_for(generation.most_tokens)
        if generation.choices is not None:
            return Work(prompt + sum(len(tokens) for tokens in generation.choices.values()), 0, most, most)
        output = self._lengths.left(reached.expert, 0, generation.most_new_tokens)
        return Work(prompt, output, most, reached.tokens_for(prompt + output))


def _reason(request: int, copy: ExpertCopy, error: Exception) -> str:
    if isinstance(error, CoServeError):
        return str(error)
    logger.error("text_broke expert=%s request=%d", copy.expert.id, request, exc_info=error)
    return f"request {request}: it cannot be asked of {copy.expert.id}: {type(error).__name__}: {error}"


def expert_name(copy: ExpertCopy) -> str:
    """Engine's name of a copy's expert; the expert's id is the line file's name."""
    return copy.name.rpartition("@")[0]


def weights_name(copy: ExpertCopy) -> str:
    """Name of weights and program, equal only where both are equal."""
    return " ".join((copy.packed.program_sha256 or "", *(segment.sha256 for segment in copy.packed.segments)))
