"""Jobs through the engine that an executor has: as it schedules them, and as static batching would.

Both are the same forward pass, so that what scheduling brings is told apart from what the forward pass brings.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.line_file.texts import LONE_QUANTUM_S
from experts.llm.serving.engine import LlmEngine, Turn
from experts.llm.serving.extents import ExtentArena
from experts.llm.serving.generation import GREEDY, Generation, Refused, TextRequest
from experts.llm.serving.iteration import IterationLimits
from experts.llm.serving.kv import KvLayout
from proof.llm.text_jobs import TextJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from experts.llm.model import Model
    from experts.llm.serving.engine import EngineStatistics
    from experts.llm.serving.generation import Sampled


@dataclass(slots=True)
class Collected:
    """Keeps ``experts.llm.serving.generation.Writer``: the tokens as they come."""

    tokens: list[int] = field(default_factory=list)

    def write(self, sampled: Sampled) -> bool:
        self.tokens.append(sampled.token)
        return False


class OurEngine:
    """An engine whose iterations have at most so many rows; it learns from run to run how long they take."""

    def __init__(self, model: Model, slots: int) -> None:
        self._model = model
        self._slots = slots
        layout = KvLayout.of(model.spec, model.dtype)
        arena = ExtentArena(slots * layout.positions * layout.token_bytes, keeps_prefixes=False)
        self._engine = LlmEngine(arena, IterationLimits(rows=slots))
        self._begun = 0

    @property
    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def continuous(self, jobs: Sequence[TextJob], quantum_s: float = LONE_QUANTUM_S) -> list[list[int]]:
        """Each job's tokens. A finished job leaves its row at once and ends the quantum, so another job may begin."""
        waiting = deque(self._turns(jobs))
        going: dict[int, Turn] = {}
        written = [turn.text.writer for turn in waiting]
        while waiting or going:
            while waiting and len(going) < self._slots:
                turn = waiting.popleft()
                going[turn.request] = turn
            for request in self._finished(going.values(), quantum_s):
                del going[request]
        return _tokens(written)

    def static(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        """Each job's tokens, batch by batch: a batch begins together, and ends when its longest job does."""
        tokens: list[list[int]] = []
        for start in range(0, len(jobs), self._slots):
            batch = jobs[start : start + self._slots]
            longest = max(job.output for job in batch)
            turns = list(self._turns([TextJob(job.prompt, longest) for job in batch]))
            going = {turn.request: turn for turn in turns}
            while going:
                for request in self._finished(going.values(), 3600.0):
                    del going[request]
            written = _tokens(turn.text.writer for turn in turns)
            tokens += [one[: job.output] for one, job in zip(written, batch, strict=True)]
        return tokens

    def _finished(self, turns: Iterable[Turn], quantum_s: float) -> Iterator[int]:
        for request, result in self._engine.run(list(turns), quantum_s).finished:
            if isinstance(result, Refused):
                raise ValueError(f"request {request}: {result.reason}")
            yield request

    def _turns(self, jobs: Iterable[TextJob]) -> Iterator[Turn]:
        for job in jobs:
            self._begun += 1
            generation = Generation(job.prompt, job.output, GREEDY)
            yield Turn(self._begun, "bench", self._model, TextRequest(generation, Collected()))


def _tokens(writers: Iterable[object]) -> list[list[int]]:
    return [writer.tokens for writer in writers if isinstance(writer, Collected)]
