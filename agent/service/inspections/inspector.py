"""The agent of a line behind a gate: submits images under keys, and delivers each outcome once.

Guarantees: an image that was being judged when the agent ended is judged alone at the next start, and refused after the
second time (``attempts``). An image cancelled at the gate never reaches the agent. After a crash no image is taken, and
open images have no outcome: the next start offers them again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from agent.core.names import expert_of, line_name, with_line_names
from agent.core.request import CANCELLED, Outcome, Precedence
from agent.deployment.build import Agent, build_agent
from agent.doors.desk import ShadowsView
from agent.faults.errors import DeviceLost, WorkOverdue
from agent.records.attempts import AttemptLog
from agent.runtime.dispatcher import BatchWatch
from agent.runtime.texts import TextSource
from agent.service.inspections.courses import Course, SlowImages, with_line_experts
from agent.service.inspections.drift import UsageDrift
from agent.service.inspections.trust import Trust
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from agent.config import LineConfig
    from agent.core.request import Batch
    from agent.deployment.line_change import LineChange
    from agent.faults.errors import AgentCrashed
    from agent.runtime.executor import RequestSource
    from agent.service.inspections.drift import DriftStatistics
    from agent.subject import Subject

    Progress: TypeAlias = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

ATTEMPTS_MAXIMUM = 2  # an image that was being judged at so many ends of the agent is refused


@dataclass(slots=True, eq=False)
class Submission:
    """Image or text submitted to the agent. ``ended`` runs once, on the agent's thread.

    ``is_counted``: attempts are logged, as the next start offers the subject again.
    """

    subject: Subject
    image: RequestSource
    ended: Callable[[Outcome, Course], None]
    is_counted: bool = True
    precedence: Precedence = Precedence.LINE
    number: int | None = None  # the agent's number; None before admission
    config_sha256: str = ""  # of the line file that judges it, from admission on
    is_cancelled: bool = False
    let_in_s: float = 0.0
    batch_since_s: float | None = None
    queue_s: float | None = None
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JudgedWatch:
    """Callbacks on the loop's thread: a batch ran for so many seconds; a submission was judged; the line is idle."""

    ran: Callable[[Batch, float], None] = lambda *_: None
    judged: Callable[[Submission, Outcome], None] = lambda *_: None
    idle: Callable[[], None] = lambda: None


class Gate:
    """Gate before the agent: a suspect, which was being judged when the agent ended, is judged alone.

    Guarantees: each submission is admitted exactly once, suspects first, in order of arrival within its kind: so the
    image that ends the agent is known. For any thread. ``let_in`` never blocks or raises; True: it will ``leave``.
    """

    def __init__(self, let_in: Callable[[Submission], bool]) -> None:
        self._let_in = let_in
        self._suspects: deque[Submission] = deque()
        self._others: deque[Submission] = deque()
        self._inside = 0
        self._is_alone = False
        self._lock = threading.Lock()

    def admit(self, submission: Submission, *, is_suspect: bool) -> None:
        with self._lock:
            (self._suspects if is_suspect else self._others).append(submission)
        self._open()

    def leave(self) -> None:
        self._left()
        self._open()

    def _left(self) -> None:
        with self._lock:
            self._inside -= 1
            self._is_alone = False

    def _open(self) -> None:
        """Admit all possible submissions; a loop, as any number may be rejected in turn."""
        while (submission := self._next()) is not None:
            if not self._let_in(submission):
                self._left()

    def _next(self) -> Submission | None:
        with self._lock:
            if self._suspects:
                if self._inside:
                    return None
                self._is_alone = True
                self._inside = 1
                return self._suspects.popleft()
            if self._is_alone or not self._others:
                return None
            self._inside += 1
            return self._others.popleft()


class Inspector:
    """Agent of a line, started and stopped by the line, and its gate. For any thread; ``on_crash`` runs on any."""

    def __init__(self, config: LineConfig, progress: Progress, on_crash: Callable[[], None]) -> None:
        self._submissions: dict[int, Submission] = {}
        self._guard = threading.Lock()  # guards _submissions: a request may end before its number is known here
        self._stopping = threading.Event()
        self.agent: Agent = build_agent(config, self._judged, progress)
        self.trust = Trust(self.agent)
        self._models = models_of(self.agent)  # also of earlier lines' experts: their requests may be in flight
        self._drift_guard = threading.Lock()  # the loop's thread takes this lock: compute nothing under it
        self._drift = UsageDrift(self.agent.setup.matrix.usage)
        self._attempts = AttemptLog(config.state / "attempts.log")
        self._gate = Gate(self._let_in)
        self.ended_per_s = 0.0  # recent rate of judged images, for retry hints
        self._rate_since_s, self._ended_since = time.monotonic(), 0
        self._slow = SlowImages()
        self.watch = JudgedWatch()
        self.shadow_counts: Callable[[], ShadowsView] = ShadowsView
        self.agent.loop.watch_batches(
            BatchWatch(
                self._batch_begun,
                self._batch_ended,
                self._preparing,
                self._batch_given,
                ran=lambda batch, seconds: self.watch.ran(batch, seconds),
                idle=lambda: self.watch.idle(),
            )
        )
        self.agent.loop.when_crashed(lambda crash: self._crashed(crash, on_crash))

    @property
    def crash(self) -> AgentCrashed | None:
        return self.agent.loop.crash

    @property
    def takes(self) -> bool:
        """False while the agent stops, and after a crash."""
        return not self._stopping.is_set() and self.crash is None

    @property
    def in_flight(self) -> int:
        return len(self._submissions)

    def attempts(self, key: str) -> int:
        """Number of ends of the agent while this key was being judged."""
        return self._attempts.attempts(key)

    def reason_to_spare(self, keys: Iterable[str], what: str = "it") -> str | None:
        """Reason to refuse an image that, or a part of which, ended the agent; None to judge it."""
        attempts = max(self._attempts.attempts(key) for key in keys)
        if attempts < ATTEMPTS_MAXIMUM:
            return None
        return f"ended the agent: {what} was being judged each of the {attempts} times that the agent was ended"

    def forget_attempts(self, key: str) -> None:
        """Drop the count of a key whose verdict is on the disk."""
        self._attempts.settled(key)

    def submit_subject(self, submission: Submission) -> None:
        is_suspect = self._attempts.attempts(submission.subject.key) > 0
        if is_suspect:
            log.warning("image_judged_alone file=%s: the agent was ended while it judged it", submission.subject.name)
        self._gate.admit(submission, is_suspect=is_suspect)

    def cancel_subject(self, submission: Submission) -> None:
        """End a submission as CANCELLED, unless its last step has run or runs now."""
        with self._guard:
            submission.is_cancelled = True
            number = submission.number
        if number is not None:
            self.agent.loop.cancel(number)

    @contextmanager
    def counted(self, key: str) -> Iterator[None]:
        """Context: an end of the agent inside counts against this key."""
        self._attempts.begun([key])
        try:
            yield
        finally:
            self._attempts.ended([key])

    def model_of(self, expert: str) -> str:
        """sha256 of an expert's weights file, by the Engine's name; empty if unknown."""
        return self._models.get(expert, "")

    def weights_of(self, expert: str) -> str:
        """sha256 of an expert's weights file, by its name in the line file."""
        return self.model_of(self.agent.expert(expert))

    def change_line(self, change: LineChange) -> None:
        """Serve another line; accepted requests finish under the earlier one."""
        models = self._models | models_of(change.agent)
        self._models = models  # both lines' experts may answer now
        self.trust.turn_to(change.agent)
        self.agent.loop.change_line(change.event, change.copies, self._turning_to(change.agent))
        for expert, reason in change.quarantined.items():
            self.agent.loop.quarantine(expert, reason)
        usage = {line_name(expert): share for expert, share in change.agent.setup.matrix.usage.items()}
        self._models = {expert: sha256 for expert, sha256 in models.items() if expert in change.event.graph.experts}
        with self._drift_guard:
            self._drift = UsageDrift(usage)

    @contextmanager
    def _turning_to(self, agent: Agent) -> Iterator[None]:
        """Context: no image is admitted meanwhile; later ones are the new line's, and named by its file."""
        with self._guard:
            yield
            self.agent = agent

    def drift(self) -> DriftStatistics:
        longest = max(map(len, self.agent.setup.graph.routes.values()), default=0)
        return self.usage().statistics(self.in_flight * longest)

    def usage(self) -> UsageDrift:
        """Copy of the experts' usage counted so far."""
        with self._drift_guard:
            return self._drift.sample()

    def take_no_more(self) -> None:
        """Admit nothing more: waiting images remain for the next start."""
        with self._guard:
            self._stopping.set()

    def drain(self, timeout_s: float) -> bool:
        """Finish admitted images; False after ``timeout_s``."""
        self.agent.loop.drain()
        return self.agent.loop.wait_until_drained(timeout_s)

    def forgive(self) -> None:
        """Do not count a requested end against images in flight."""
        if self.crash is None:
            self._attempts.forgive()

    def close(self) -> None:
        self._attempts.close()

    def _let_in(self, submission: Submission) -> bool:
        """True if the agent took the submission; False if the submission was cancelled, and has ended."""
        with self._guard:
            if not self.takes:
                return True  # arrived during the stop: the next start offers it again
            if not submission.is_cancelled:
                submission.let_in_s = time.monotonic()
                submission.config_sha256 = self.agent.config.catalog.sha256
                subject = submission.subject
                expert = None if subject.expert is None else self.agent.expert(subject.expert)
                submission.number = self.agent.loop.submit(
                    submission.image, component=subject.component, expert=expert, precedence=submission.precedence
                )
                self._submissions[submission.number] = submission
                self.agent.loop.record.named(submission.number, subject.key)
                return True
        submission.ended(Outcome(Verdict.UNKNOWN, None, None, (), CANCELLED), Course())
        return False

    @contextmanager
    def _preparing(self, number: int) -> Iterator[None]:
        """Context for decoding ahead of a batch, which may also end the agent."""
        with self._guard:
            submission = self._submissions.get(number)
        is_counted = submission is not None and submission.is_counted
        with self.counted(submission.subject.key) if submission is not None and is_counted else nullcontext():
            yield

    # -- on the loop's thread --

    def _judged(self, number: int, outcome: Outcome) -> None:
        with self._guard:
            submission = self._submissions.pop(number)
        self.watch.judged(submission, outcome)
        models = tuple(self._models.get(step.expert, "") for step in outcome.steps)
        outcome, unproven = self.trust.judged(outcome)
        steps = tuple(replace(step, expert=line_name(step.expert)) for step in outcome.steps)
        outcome = replace(outcome, steps=steps, reason=outcome.reason and with_line_names(outcome.reason))
        if submission.precedence is Precedence.LINE:
            with self._drift_guard:
                self._drift.count(step.expert for step in outcome.steps)
            self._count_ended()
        self._gate.leave()
        seconds = time.monotonic() - submission.let_in_s
        queue_s = seconds if submission.queue_s is None else submission.queue_s
        taken = self._course_to_store(submission, outcome, seconds)
        course = Course(queue_s, submission.compute_s, models, taken, submission.config_sha256, unproven)
        submission.ended(outcome, course)

    def _course_to_store(self, submission: Submission, outcome: Outcome, seconds: float) -> dict[str, Any] | None:
        """Course of an image that is not OK, or slow."""
        if submission.number is None or isinstance(submission.image, TextSource):
            return None
        is_slow = self._slow.is_slow(seconds, self.agent.config.scheduling.max_overtake_s)
        if outcome.verdict is Verdict.OK and not is_slow:
            return None
        course = self.agent.loop.record.course_of(submission.number)
        return None if course is None else with_line_experts(course)

    def _count_ended(self) -> None:
        now_s = time.monotonic()
        self._ended_since += 1
        if now_s - self._rate_since_s >= 1.0:
            self.ended_per_s = self._ended_since / (now_s - self._rate_since_s)
            self._rate_since_s, self._ended_since = now_s, 0

    def _batch_given(self, requests: Sequence[int]) -> None:
        """Called before an executor receives the batch, which may end the agent from then on."""
        self._attempts.begun(
            [submission.subject.key for submission in self._submissions_of(requests) if submission.is_counted]
        )

    def _batch_begun(self, requests: Sequence[int]) -> None:
        submissions, now_s = self._submissions_of(requests), time.monotonic()
        for submission in submissions:
            submission.batch_since_s = now_s
            if submission.queue_s is None:
                submission.queue_s = now_s - submission.let_in_s

    def _batch_ended(self, requests: Sequence[int]) -> None:
        submissions, now_s = self._submissions_of(requests), time.monotonic()
        self._attempts.ended([submission.subject.key for submission in submissions if submission.is_counted])
        for submission in submissions:
            if submission.batch_since_s is not None:
                submission.compute_s += now_s - submission.batch_since_s

    def _submissions_of(self, requests: Sequence[int]) -> list[Submission]:
        with self._guard:
            return [self._submissions[number] for number in requests]

    def _crashed(self, crash: AgentCrashed, notify: Callable[[], None]) -> None:
        if isinstance(crash.error, DeviceLost) or (isinstance(crash.error, WorkOverdue) and not crash.error.is_batch):
            self._attempts.forgive()
        notify()


def models_of(agent: Agent) -> dict[str, str]:
    return {expert_of(copy): packed.source_sha256 for copy, packed in agent.packed.items()}
