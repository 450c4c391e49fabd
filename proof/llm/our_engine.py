"""Jobs through the engine that an executor has, scheduled as it does and in static batches: one forward pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.line_file.texts import LONE_QUANTUM_S
from experts.expert import Rejected
from experts.llm.arenas.extents import ExtentArena
from experts.llm.arenas.key_values import KvLayout
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.generation import GREEDY, TextRequest
from experts.llm.serving.iteration import IterationLimits
from experts.llm.serving.lookup import PromptLookup
from experts.llm.serving.texts import RunningText
from proof.llm.random_models import TextJob
from proof.llm.text_times import TimedTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from experts.llm.model import LanguageModel
    from experts.llm.serving.engine import TextEngineStatistics
    from experts.llm.serving.generation import Token
    from proof.llm.text_times import TokenTimes

ENDLESS_S = 3600.0  # a quantum that no batch of jobs reaches


@dataclass(slots=True)
class Collected:
    """A ``Writer`` that keeps tokens as they come. ``is_over``: asked after each, whether the text ends with it."""

    tokens: list[int] = field(default_factory=list)
    is_over: Callable[[], bool] = lambda: False

    def write(self, token: Token) -> bool:
        self.tokens.append(token.id)
        return self.is_over()


class _NoLookup(PromptLookup):
    @property
    def share(self) -> float:
        return 0.0


class OurEngine:
    """An engine with at most ``slots`` rows an iteration; it learns from run to run how long they take.

    ``is_drafting``: random models soon repeat themselves, and would gain more by drafts than trained ones.
    """

    def __init__(self, model: LanguageModel, slots: int, *, is_drafting: bool = False) -> None:
        self._is_drafting = is_drafting
        self._model = model
        self._slots = slots
        layout = KvLayout.of(model.spec, model.dtype)
        arena = ExtentArena(slots * layout.positions * layout.token_bytes, keeps_prefixes=False)
        self._engine = LlmEngine(arena, IterationLimits(rows=slots))
        self._texts = 0

    @property
    def statistics(self) -> TextEngineStatistics:
        return self._engine.statistics()

    def continuous(self, jobs: Iterable[TextJob], quantum_s: float = LONE_QUANTUM_S) -> list[list[int]]:
        """Each job's tokens. A finished job leaves its row at once and ends the quantum, so another job may begin."""
        writers = [Collected() for _ in jobs]
        self._run(deque(self._text(job, writer) for job, writer in zip(jobs, writers, strict=True)), quantum_s)
        return [writer.tokens for writer in writers]

    def timed(self, jobs: Sequence[TextJob], late: TextJob | None = None) -> list[TokenTimes]:
        """Times of each text. The late one ends the quantum as it comes, as a request does in an agent."""
        waiting: deque[RunningText] = deque()

        def begin(number: int, job: TextJob) -> None:
            waiting.append(self._text(job, Collected(is_over=lambda: course.wrote(number))))
            if number == len(jobs):
                self._engine.end_quantum()

        course = TimedTexts(jobs, late, begin)
        self._run(waiting, LONE_QUANTUM_S)
        return course.times

    def _run(self, waiting: deque[RunningText], quantum_s: float) -> None:
        running: list[RunningText] = []
        while waiting or running:
            while waiting and len(running) < self._slots:
                running.append(waiting.popleft())
            self._engine.run(running, [self._model] * len(running), quantum_s)
            for text in running:
                if isinstance(text.result, Rejected):
                    raise ValueError(f"request {text.request}: {text.result.reason}")
            running = [text for text in running if text.result is None]

    def static(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        """Each job's tokens, batch by batch: a batch begins together, and ends when its longest job does."""
        tokens: list[list[int]] = []
        for start in range(0, len(jobs), self._slots):
            batch = jobs[start : start + self._slots]
            longest = max(job.output for job in batch)
            written = self.continuous([TextJob(job.prompt, longest) for job in batch], ENDLESS_S)
            tokens += [one[: job.output] for one, job in zip(written, batch, strict=True)]
        return tokens

    def _text(self, job: TextJob, writer: Collected) -> RunningText:
        self._texts += 1
        text = RunningText(self._texts, "bench", TextRequest(job.prompt, job.output, GREEDY, writer))
        text.lookup = text.lookup if self._is_drafting else _NoLookup()
        return text
