"""Writes answers of shadows into the store, and quarantines shadows that ended the agent.

Guarantees: no verdict is changed or delayed; a shadow that ran at ENDINGS_MAXIMUM endings is asked no more.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.deployment.line_change import line_name, with_line_names
from agent.records.shadow_answers import Pair, Side, SideBySide, count_dropped, write_answer
from agent.runtime.shadows import ShadowWatch
from agent.subject import Subject
from experts.expert import Verdict

if TYPE_CHECKING:
    from agent.records.result_writer import ResultStore
    from agent.runtime.shadows import Said, ShadowAnswer
    from agent.service.inspections.inspector import Inspector
    from experts.graph import ExpertGraph

log = logging.getLogger(__name__)

ENDINGS_MAXIMUM = 2
DROPS_TOGETHER = 100  # that are written at once: a line without time to spare drops as many images as it judges


class ShadowRecorder:
    """Make it before the agent starts. Callbacks run on the loop's thread."""

    def __init__(self, inspector: Inspector, store: ResultStore) -> None:
        self._inspector = inspector
        self._store = store
        self._dropped: Counter[Pair] = Counter()  # not written yet
        inspector.agent.loop.watch_shadows(ShadowWatch(self._answered, self._begun, self._ended))
        self.refuse_enders()

    def refuse_enders(self) -> None:
        """Quarantine shadows of the line that ended the agent too often."""
        for shadow in sorted(self._graph.in_shadow):
            endings = self._inspector.attempts(self._key(shadow))
            if endings >= ENDINGS_MAXIMUM:
                reason = f"it ran when the agent was ended, {endings} times - give it other weights, or take it away"
                self._inspector.agent.loop.quarantine(shadow, reason)

    @property
    def _graph(self) -> ExpertGraph:
        return self._inspector.agent.setup.graph

    def _key(self, shadow: str) -> str:
        return f"shadow {line_name(shadow)} {self._inspector.model_of(shadow)}"

    def _begun(self, shadow: str) -> None:
        self._inspector.begun(self._key(shadow))

    def _ended(self, shadow: str) -> None:
        self._inspector.ended(self._key(shadow))

    def _answered(self, answer: ShadowAnswer) -> None:
        expert, shadow, model_of = answer.expert, answer.shadow, self._inspector.model_of
        pair = Pair(line_name(expert), line_name(shadow), model_of(expert), model_of(shadow))
        if answer.is_dropped:
            self._dropped[pair] += 1
            if self._dropped[pair] >= DROPS_TOGETHER:
                self._write_dropped(pair)
            return
        self._write_dropped(pair)
        row = self._row(pair, answer)
        self._store.write(lambda database: write_answer(database, row))
        if row.reason is not None:
            log.debug("shadow_said_nothing shadow=%s image=%s reason=%s", pair.shadow, row.image, row.reason)

    def flush(self) -> None:
        """Write the counts; after the loop has ended."""
        for pair in tuple(self._dropped):
            self._write_dropped(pair)

    def _write_dropped(self, pair: Pair) -> None:
        count = self._dropped.pop(pair, 0)
        if count:
            self._store.write(lambda database: count_dropped(database, pair, count))

    def _row(self, pair: Pair, answer: ShadowAnswer) -> SideBySide:
        subject = answer.about
        assert isinstance(subject, Subject), "so the inspector submits it"
        reason = answer.reason and with_line_names(answer.reason)
        said = self._side(answer.expert, subject.component, answer.said)
        other = None if answer.shadow_said is None else self._side(answer.expert, subject.component, answer.shadow_said)
        return SideBySide(subject.key, subject.name, subject.component, pair, said, other, datetime.now(UTC), reason)

    def _side(self, expert: str, component: str | None, said: Said) -> Side:
        """Judge a prediction by the expert's step of the route."""
        prediction = said.prediction
        steps = () if component is None else self._graph.routes.get(component, ())
        number = next((index for index, step in enumerate(steps) if step.expert == expert), None)
        processor = next(each.processor for each in self._inspector.agent.setup.executors if each.id == said.executor)
        ran = (said.seconds, said.executor, processor)
        if component is None or number is None:
            return Side(prediction.label, prediction.score, None, *ran)
        judgement = self._graph.judge(component, number, prediction)
        return Side(judgement.label, judgement.score, judgement.verdict is not Verdict.NG, *ran)
