"""Texts of requests: their tokens across executors, and their remaining work.

Each executor has an engine (``experts.llm.serving``). This module keeps each request's running text, so that the
request can continue on another executor. A text begins with a lease for its prompt and its expert's
median output; a text that fills its lease requests a larger one at the end of the quantum.

Guarantees: a writer receives each token once, over all quanta, failures and executors; ``forget`` releases all memory
of a request. ``begin``, ``take`` and ``forget`` may be called from any thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.core.events import Progressed
from agent.core.names import expert_of
from agent.core.request import IMAGE, Work
from experts.errors import BackendUnavailable, CoServeError
from experts.expert import Rejected
from experts.llm.serving.engine import FORGOTTEN
from experts.llm.serving.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from agent.core.request import Batch
    from agent.runtime.expert_copy import ExpertCopy
    from experts.expert import Prediction
    from experts.llm.model import LanguageModel
    from experts.llm.serving.engine import LlmEngine, TextEngineStatistics
    from experts.llm.serving.generation import TextRequest
    from experts.llm.serving.iteration import OutputLengths
    from experts.llm.serving.texts import RunningText

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TextSource:
    """Texts of one request for its experts, and its progress, which RunningTexts keeps.

    ``text_for``: text for an expert, by the expert's name in the line file. ``AgentLoop.submit`` calls ``text_for`` on
    the caller's thread for every reachable expert; an executor calls it again when an expert begins, so a source caches
    its tokens. An error ends the request with its reason.
    """

    text_for: Callable[[str], TextRequest]
    work: Work = IMAGE
    rounding: Mapping[str, Callable[[int], int]] = field(default_factory=dict)  # as in TextExpert
    expert: str = ""  # current expert, by the Engine's name
    executor: int = 0  # that has the running text
    running: RunningText | None = None  # at the current expert


@dataclass(frozen=True, slots=True)
class TextExpert:
    """Expert that a request may reach. ``name``: the Engine's. ``tokens_for``: rounds up as an arena does."""

    expert: str
    name: str
    tokens_for: Callable[[int], int]


class RunningTexts:
    """``engines`` by executor; ``lengths``: record of output lengths."""

    def __init__(self, engines: Mapping[int, LlmEngine], lengths: OutputLengths) -> None:
        self._engines = engines
        self._lengths = lengths
        self._sources: dict[int, TextSource] = {}
        self._lost: frozenset[int] = frozenset()  # executors whose device is lost: their engines may hang

    # -- any thread --

    def begin(self, source: TextSource, reached: Sequence[TextExpert]) -> None:
        """Set the work of a new request at each of the experts that it may reach.

        Raises as the source does for the first expert; an error for a later expert ends the request at that step.
        """
        works: list[tuple[str, Work]] = []
        for place, each in enumerate(reached):
            try:
                works.append((each.name, self._work(each, source.text_for(each.expert))))
            except CoServeError:
                if not place:
                    raise
        first = works[0][1] if works else IMAGE
        source.work = replace(first, steps=tuple(works)) if len(works) > 1 else first
        source.rounding = {each.expert: each.tokens_for for each in reached}

    def take(self, request: int, source: TextSource) -> None:
        self._sources[request] = source

    def forget(self, request: int) -> None:
        """Idempotent."""
        source = self._sources.pop(request, None)
        if source is not None and source.running is not None:
            self._leave(source, source.running)

    # -- the loop's thread --

    def preempt(self, request: int, executor: int) -> None:
        if executor not in self._lost:
            self._engines[executor].preempt(request)

    def lose(self, executors: Collection[int]) -> None:
        """Let texts leave these executors without their engines: leases there are gone with the device."""
        self._lost = self._lost.union(executors)

    def end_quantum(self, executor: int) -> None:
        engine = self._engines.get(executor)
        if engine is not None:
            engine.end_quantum()

    # -- an executor's thread --

    def run(self, batch: Batch, copies: Sequence[ExpertCopy], models: Mapping[str, LanguageModel]) -> Progressed:
        """Run one quantum. ``copies``: one per request; ``models`` by copy name. Raises as a model does, and
        BackendUnavailable on a lost executor."""
        self._check_present(batch.executor)
        finished: list[tuple[int, Prediction | Rejected]] = []
        unfinished: list[tuple[int, Work]] = []
        texts: list[RunningText] = []
        sources, text_models = [], []
        for request, copy in zip(batch.requests, copies, strict=True):
            source = self._sources.get(request)
            if source is None:
                reason = f"{copy.expert.id} takes texts, and request {request} is an image"
                finished.append((request, Rejected(reason)))
                continue
            text = self._text(source, request, copy, batch.executor)
            if isinstance(text, Rejected):
                finished.append((request, text))
                continue
            texts.append(text)
            sources.append(source)
            text_models.append(models[copy.name])
        if texts:
            self._run_on(batch, texts, text_models)
        self._check_present(batch.executor)  # the quantum may have hung until its device was given up
        for source, text in zip(sources, texts, strict=True):
            result = text.result
            if result is None:
                unfinished.append((text.request, self._left(source, text)))
            else:
                source.running = None
                finished.append((text.request, result))
        return Progressed(batch.id, tuple(finished), tuple(unfinished))

    def _run_on(self, batch: Batch, texts: Sequence[RunningText], models: Sequence[LanguageModel]) -> None:
        assert batch.quantum_s is not None, "texts have a quantum"
        engine = self._engines.get(batch.executor)
        if engine is None:
            raise BackendUnavailable("texts", f"executor {batch.executor} has no memory for keys and values")
        lacking = engine.run(texts, models, batch.quantum_s, batch.undisturbed_s)
        if lacking:  # ledger and arena disagree
            logger.error("texts_lack_room executor=%d requests=%s", batch.executor, lacking)

    def _check_present(self, executor: int) -> None:
        if executor in self._lost:
            raise BackendUnavailable("texts", f"executor {executor} is lost: its texts run elsewhere")

    def _leave(self, source: TextSource, text: RunningText) -> None:
        """Drop a text where it ran last. A lost engine that still waits for its device writes no more of it."""
        if source.executor in self._lost:
            text.refuse(FORGOTTEN)
        else:
            self._engines[source.executor].forget(text.request)

    def statistics(self, executor: int) -> TextEngineStatistics | None:
        engine = self._engines.get(executor)
        return None if engine is None else engine.statistics()

    def _text(self, source: TextSource, request: int, copy: ExpertCopy, executor: int) -> RunningText | Rejected:
        """Text of a request: the same object each time, unless the request moved from another executor."""
        name, text = expert_of(copy.name), source.running
        if text is None or source.expert != name:
            try:
                asked = source.text_for(copy.expert.id)
            except Exception as error:  # noqa: BLE001 - the boundary to the caller's source
                return Rejected(_reason(request, copy, error))
            if asked.program is not None and asked.program != copy.packed.program_sha256:
                return Rejected(f"{copy.expert.id} was replaced by a reload after the text came: send the text again")
            lease = source.work.at(name).leased
            text = text_of(request, copy.expert.id, asked, weights_name(copy), lease)
        elif source.executor != executor:
            before, text = text, text.moved(weights_name(copy))
            self._leave(source, before)
        source.expert, source.executor, source.running = name, executor, text
        return text

    def _left(self, source: TextSource, text: RunningText) -> Work:
        asked, output = text.asked, 1
        if asked.choices is None:
            output = self._lengths.left(text.expert, text.written, asked.most_new_tokens)
        rounded = source.rounding.get(text.expert, int)
        if text.held >= text.leased:
            text.lease = max(rounded(len(text.tokens) + output), text.leased + 1)
        most = max(source.work.at(source.expert).most, rounded(text.most_tokens))  # the expert may be unforeseen
        return Work(text.left_to_read, output, most, text.lease, text.held)

    def _work(self, reached: TextExpert, text: TextRequest) -> Work:
        prompt, most = len(text.prompt), reached.tokens_for(text.most_tokens)
        if text.choices is not None:
            return Work(prompt + sum(len(tokens) for tokens in text.choices.values()), 0, most, most)
        output = self._lengths.left(reached.expert, 0, text.most_new_tokens)
        return Work(prompt, output, most, reached.tokens_for(prompt + output))


def _reason(request: int, copy: ExpertCopy, error: Exception) -> str:
    if isinstance(error, CoServeError):
        return str(error)
    logger.error("text_broke expert=%s request=%d", copy.expert.id, request, exc_info=error)
    return f"request {request}: it cannot be asked of {copy.expert.id}: {type(error).__name__}: {error}"


def weights_name(copy: ExpertCopy) -> str:
    """Name of weights and program, equal only where both are equal."""
    return " ".join((copy.packed.program_sha256 or "", *(segment.sha256 for segment in copy.packed.segments)))
