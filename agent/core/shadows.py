"""Shadows: begins background work and ends it; what waits, and where it may not run for now, is BackgroundWork's.

Guarantees: one batch of one image or one load at a time on the whole box; each request that was offered ends in one
Complete or Fail whose outcome decides nothing; those end that wait for a shadow which is not to be asked.
Assumes: ``begin`` is called only while nothing else has work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.background import DROPPED
from agent.core.effects import Complete, Fail, StartBatch
from agent.core.placement import Answer
from agent.core.prefetch import Wish
from agent.core.request import Batch, Outcome, StepResult
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.core.background import BackgroundWork
    from agent.core.batches import Batches
    from agent.core.effects import Effect
    from agent.core.performance import ExpertProfile
    from agent.core.placement import Placement
    from agent.core.queue import ExecutorQueue
    from agent.core.served_line import ServedLine
    from agent.core.standing import Standings
    from experts.expert import Prediction


@dataclass(slots=True, eq=False)
class Shadows:
    _background: BackgroundWork
    _queues: Mapping[int, ExecutorQueue]
    _placement: Placement
    _standings: Standings
    _batches: Batches
    batch_count: int = 0

    def begin(self, line: ServedLine, now: float, effects: list[Effect]) -> None:
        if self._background.batch is not None or self._placement.loads:
            return
        for expert in self._background.awaited:
            self._end_refused(expert, line, now, effects)
        awaited = self._background.awaited
        if not any(self._runs(expert, line, now, effects) for expert in awaited):
            any(self._loads(expert, awaited, line, now, effects) for expert in awaited)

    def batch_over(self, batch: Batch, now: float) -> None:
        self._batches.end(batch, now)
        self._background.batch = self._background.request = None
        self._placement.background_runs_in = None

    def ran(self, request: int, expert: str, prediction: Prediction, effects: list[Effect]) -> None:
        steps, reason = (StepResult(expert, prediction),), "asked in the shadow of another expert"
        outcome = Outcome(Verdict.UNKNOWN, prediction.label, prediction.score, steps, reason)
        self._background.ran += 1
        self._end(Complete(request, outcome), effects)

    def failed(self, request: int, reason: str, effects: list[Effect]) -> None:
        self._background.failed += 1
        self._end(Fail(request, _unanswered(reason)), effects)

    def drop(self, request: int, reason: str, effects: list[Effect]) -> None:
        self._background.leave(request)
        self._background.dropped += 1
        self._end(Fail(request, _unanswered(reason)), effects)

    def drop_all_but(self, experts: frozenset[str], effects: list[Effect]) -> None:
        for request in tuple(self._background.requests):
            if self._background.expert_of(request) not in experts:
                self.drop(request, DROPPED, effects)

    def _end(self, effect: Complete | Fail, effects: list[Effect]) -> None:
        self._standings.request_ended(effect.request)
        effects.append(effect)

    def _end_refused(self, expert: str, line: ServedLine, now: float, effects: list[Effect]) -> None:
        for request in self._background.waiting_for(expert):
            reason = self._standings.refusal(request, expert, now) or _unfit(expert, line)
            if reason is not None:
                self._background.leave(request)
                self.failed(request, reason, effects)

    def _homes(self, expert: str, line: ServedLine, now: float) -> Iterator[tuple[ExecutorQueue, ExpertProfile]]:
        specs = [queue.spec for queue in self._queues.values()]
        for spec, profile in self._background.homes(expert, specs, line.matrix.experts, now):
            yield self._queues[spec.id], profile

    def _runs(self, expert: str, line: ServedLine, now: float, effects: list[Effect]) -> bool:
        """Start a batch of one where a shadow is, if it is anywhere."""
        for queue, profile in self._homes(expert, line, now):
            pool, needed_bytes = self._placement.pools[queue.spec.pool], profile.performance.workspace_for(1)
            if pool.is_resident(profile.copy) and pool.workspace_for(queue.spec.id) >= needed_bytes:
                self._start(queue, expert, profile, now, effects)
                return True
        return False

    def _start(
        self, queue: ExecutorQueue, expert: str, profile: ExpertProfile, now: float, effects: list[Effect]
    ) -> None:
        request = self._background.waiting_for(expert)[0]
        self._background.leave(request)
        self._standings.let_through(request, expert)
        self.batch_count += 1
        performance, number = profile.performance, self._batches.next_number()
        batch = Batch(number, queue.spec.id, expert, profile.copy, (request,), performance.workspace_for(1))
        self._background.batch, self._background.request = batch.id, request
        self._placement.background_runs_in = queue.spec.pool
        self._batches.begin(batch, (profile,), performance.latency_s(1), now)
        effects.append(StartBatch(batch))

    def _loads(self, expert: str, awaited: Sequence[str], line: ServedLine, now: float, effects: list[Effect]) -> bool:
        """Begin to load a shadow where there is room that nobody else has a use for."""
        for queue, profile in self._homes(expert, line, now):
            wish = Wish(queue.spec, expert, profile, now, now)
            if self._placement.bring_in_background(wish, awaited, now, effects) is Answer.STARTED:
                return True
        return False


def _unfit(expert: str, line: ServedLine) -> str | None:
    rows = [column[expert] for column in line.matrix.experts.values() if expert in column]
    if not rows:
        return f"no executor of this box can run {expert}"
    is_of_texts = any(row.performance.runs_in_quanta for row in rows)
    return f"{expert} counts in tokens, and only images are shown to a shadow" if is_of_texts else None


def _unanswered(reason: str) -> Outcome:
    return Outcome(Verdict.UNKNOWN, None, None, (), reason)
