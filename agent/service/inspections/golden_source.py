"""GoldenSource: has proven experts of a running line answer the images of their `check` again, at the line's interval.

Its requests have idle precedence, one at a time, on the agent's own loop, so what serves is what is compared.

Guarantees: no verdict is delayed beyond a batch of one image. The disk is read and written by ``step`` alone, never on
the loop's thread. Each comparison ends as a proof, which ``Trust`` reads. An expert that answers otherwise has an alarm
until it is verified; one that could not be compared for an interval has one, too. One that ran at ENDINGS_MAXIMUM
endings of the agent is not compared again.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING

from agent.core.names import form_of
from agent.core.request import CANCELLED, GAVE_WAY, NO_SPARE_ROOM, Precedence
from agent.deployment.packed_copies import keep_proof
from agent.line_file.proofs import NAMED
from agent.records.station.alarms import Alarm
from agent.records.station.shifts import Shifts
from agent.service.inspections.inspector import Submission
from agent.subject import Subject
from experts.errors import CoServeError
from experts.proving.comparing import answers_of, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.config import LineConfig
    from agent.core.request import Batch, Outcome
    from agent.line_file.records import GoldenSection
    from agent.service.inspections.courses import Course
    from agent.service.inspections.inspector import Inspector
    from experts.expert import Expert, Prediction
    from experts.proving.answers import KnownAnswer

log = logging.getLogger(__name__)

BY = "golden"  # of its proofs
ENDINGS_MAXIMUM = 2


@dataclass(slots=True, eq=False)
class _Run:
    """One expert's comparison. ``name``: the Engine's; ``sha256``: the answering weights'; ``forms``: those that
    ran."""

    expert: Expert
    name: str
    sha256: str
    known: tuple[KnownAnswer, ...]
    predictions: list[Prediction] = field(default_factory=list)
    forms: set[str] = field(default_factory=set)
    trouble: str | None = None

    @property
    def key(self) -> str:
        return f"golden {self.expert.id} {self.sha256}"

    @property
    def has_ended(self) -> bool:
        return self.trouble is not None or len(self.predictions) == len(self.known)


class GoldenSource:
    """Construct after the line's ShadowSource. ``step`` is called from one thread. ``wall``: dates of intervals."""

    def __init__(self, inspector: Inspector, wall: Callable[[], datetime]) -> None:
        self._inspector = inspector
        self._wall = wall
        self._since = wall()
        self._run: _Run | None = None
        self._asked: Submission | None = None
        self._lock = threading.Lock()  # guards both
        self._judged = 0  # images of the line
        self._no_room: dict[str, int] = {}  # expert -> ``_judged`` when no memory had room to spare for it
        self._troubles: dict[str, tuple[datetime, str]] = {}  # expert -> when and why it was not compared
        shadows = inspector.watch
        inspector.watch = replace(shadows, ran=self._ran, judged=self._ended)
        self._shadows = shadows

    @property
    def _config(self) -> LineConfig:
        return self._inspector.agent.config

    def step(self) -> None:
        """Keep the proof of a run that has ended, begin one that is due, and ask for its next image."""
        with self._lock:
            run, is_free = self._run, self._asked is None
        if run is not None and is_free and (run.has_ended or self._inspector.agent.expert(run.expert.id) != run.name):
            if run.has_ended:
                self._conclude(run)
            run = self._run = None
        if run is None and (golden := self._config.golden) is not None:
            run = self._run = self._begun(golden)
        if run is not None and is_free:
            self._ask(run)

    def alarms(self) -> Iterator[Alarm]:
        config, now = self._config, self._wall()
        if config.golden is None:
            return
        lacks = self._inspector.trust.lacks
        verify = f"coserve experts verify {config.document.file}"
        for name, lack in lacks.items():
            if lack.differs:
                stops = "; its OK is UNKNOWN" if config.golden.on_difference == "stop" else ""
                yield Alarm(
                    f"golden/{name}", f"expert {name} answers otherwise than proven: {lack.why}{stops} - {verify}"
                )
        for name, (_, why) in self._troubles.items():
            if name in config.catalog.experts and name not in lacks:
                yield Alarm(f"golden/{name}", f"expert {name} was not compared with its known answers: {why}")
        late = [name for name, at in self._proven() if max(at, self._since) < _periods(config, config.golden, now)[1]]
        if late:
            why = "the line had no idle time, or no memory to spare"
            named = f"{', '.join(late[:NAMED])} ({len(late)} in all)"
            yield Alarm("golden", f"known answers were not compared in the last interval: {named}: {why}")

    # -- of step's thread --

    def _proven(self) -> Iterator[tuple[str, datetime]]:
        """Proven experts with known answers, and when they were compared."""
        trust, experts = self._inspector.trust, self._config.catalog.experts
        for name, at in trust.compared_at.items():
            if experts[name].check is not None and name not in trust.lacks:
                yield name, at

    def _begun(self, golden: GoldenSection) -> _Run | None:
        began, _ = _periods(self._config, golden, self._wall())
        for name, at in sorted(self._proven(), key=lambda each: each[1]):
            tried = self._troubles.get(name)
            is_tried = tried is not None and tried[0] >= began
            if at < began and not is_tried and self._no_room.get(name) != self._judged:
                return self._read(self._config.catalog.experts[name])
        return None

    def _read(self, expert: Expert) -> _Run | None:
        name = self._inspector.agent.expert(expert.id)
        run = _Run(expert, name, self._inspector.model_of(name), ())
        try:
            run.known = answers_of(expert, self._config.catalog.components)
        except (CoServeError, OSError) as error:
            run.trouble = str(error)
        if self._inspector.attempts(run.key) >= ENDINGS_MAXIMUM:
            run.trouble = f"it ran when the agent was ended, {ENDINGS_MAXIMUM} times - look at {expert.check}"
        return run

    def _conclude(self, run: _Run) -> None:
        name = run.expert.id
        self._troubles.pop(name, None)
        if run.trouble is not None:
            log.warning("golden_not_compared expert=%s reason=%s", name, run.trouble)
            self._troubles[name] = (self._wall(), run.trouble)
            return
        comparison = compare(run.expert, run.known, run.predictions)
        for form in sorted(run.forms):
            proof = keep_proof(self._config, name, (form, run.sha256), comparison, (BY, ""), self._wall())
            if not proof.holds:
                worst = "; ".join(f"{each.known.image.name}: {each.why}" for each in comparison.worst(1))
                log.error("golden_differs expert=%s %s %s", name, proof.text, worst)
        self._inspector.trust.step()

    def _ask(self, run: _Run) -> None:
        if run.has_ended:
            return
        known = run.known[len(run.predictions)]
        subject = Subject(run.key, BY, known.image.name, self._wall(), expert=run.expert.id)
        with self._lock:
            self._asked = asked = Submission(subject, known.image, self._answered, precedence=Precedence.IDLE)
        self._inspector.submit_subject(asked)

    # -- on the loop's thread --

    def _ran(self, batch: Batch, seconds: float) -> None:
        self._shadows.ran(batch, seconds)
        asked, run = self._asked, self._run
        if asked is not None and run is not None and asked.number in batch.requests:
            run.forms.add(form_of(batch.copy))

    def _ended(self, submission: Submission, outcome: Outcome) -> None:
        self._judged += submission.precedence is Precedence.LINE
        self._shadows.judged(submission, outcome)

    def _answered(self, outcome: Outcome, _: Course) -> None:
        with self._lock:
            run, self._asked = self._run, None
        if run is None:
            return
        if outcome.steps:
            run.predictions.append(outcome.steps[0].prediction)
            self._ask(run)
        elif outcome.reason == NO_SPARE_ROOM:
            self._no_room[run.expert.id] = self._judged
            self._run = None
        elif outcome.reason not in (GAVE_WAY, CANCELLED):  # these are asked again by the next step
            run.trouble = outcome.reason


def _periods(config: LineConfig, golden: GoldenSection, now: datetime) -> tuple[datetime, datetime]:
    """When the present interval began, and the one before."""
    if isinstance(golden.every, timedelta):
        return now - golden.every, now - 2 * golden.every
    shifts = Shifts(config.records.shifts if golden.every == "shift" else (time(0),))
    began = shifts.began_at(now)
    return began, shifts.began_at(began - timedelta(seconds=1))
