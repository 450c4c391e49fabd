"""Courses of requests: what each step waited for, as values for JSON; and which of them are stored with the result."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.deployment.line_change import line_name
from agent.runtime.flight_record import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.runtime.flight_record import CourseStep, LoadSpan, RequestCourse

LATEST = 1_000  # images that a slow one is compared with
RENEWED = 100  # the limit is computed after so many images


@dataclass(frozen=True, slots=True)
class Course:
    """Seconds before the first batch and in batches. ``models``: sha256 of the weights file of each step.

    ``steps``: the course to store with the result, as of ``course_values``; None for a quick OK.
    """

    queue_s: float = 0.0
    compute_s: float = 0.0
    models: tuple[str, ...] = ()
    steps: Mapping[str, Any] | None = None


UNJUDGED = Course()


class SlowImages:
    """Finds images that took longer than a bound, and longer than 99 % of the latest ones: few on any line."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._limit_s = 0.0
        self._since = 0

    def is_slow(self, seconds: float, bound_s: float) -> bool:
        is_slow = seconds > max(bound_s, self._limit_s)
        self._latest.append(seconds)
        self._since += 1
        if self._since >= RENEWED:
            self._limit_s, self._since = percentile(self._latest, 0.99) or 0.0, 0
        return is_slow


def course_values(course: RequestCourse) -> dict[str, Any]:
    """Values for JSON, under the line file's names; seconds since the image's arrival at the agent."""
    return {"steps": [_step(step) for step in course.steps], "total_s": _rounded(course.total_s)}


def _step(step: CourseStep) -> dict[str, Any]:
    batch = step.batch
    return {
        "expert": line_name(step.expert),
        "executor": step.executor,
        "processor": step.processor,
        "joined": step.joined,
        "candidates": [
            {"executor": each.executor, "queue_s": _rounded(each.queue_s), "addition_s": _rounded(each.addition_s)}
            for each in step.candidates
        ],
        "queued_s": _rounded(step.queued_s),
        "load": None if step.load is None else _load(step.load),
        "batch": None
        if batch is None
        else {"images": batch.requests, "began_s": _rounded(batch.began_s), "seconds": _rounded(batch.seconds)},
    }


def _load(load: LoadSpan) -> dict[str, Any]:
    """``claim``, ``stages``: why the evicted ones had to leave."""
    return {
        "from": load.source,
        "to": load.pool,
        "seconds": None if load.ended_s is None else _rounded(load.ended_s - load.began_s),
        "evicted": [line_name(each.expert) for each in load.evicted],
        "claim": load.evicted[0].claim if load.evicted else None,
        "stages": [each.stage for each in load.evicted],
        "failure": load.failure,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
