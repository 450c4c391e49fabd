"""Courses of requests: seconds, weights, what each step waited for; and which of them are stored with the result."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.core.names import line_name
from agent.runtime.flight_record import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping

LATEST = 1_000  # images that a slow one is compared with
RENEWED = 100  # the limit is computed after so many images


@dataclass(frozen=True, slots=True)
class Course:
    """Seconds before the first batch and in batches. ``models``: sha256 of the weights file of each step.

    ``steps``: the flight record's course, to store with the result; None for a quick OK. ``config_sha256``: of the line
    file that judged; empty for an image that was not judged. ``unproven``: which steps are of unproven experts.
    """

    queue_s: float = 0.0
    compute_s: float = 0.0
    models: tuple[str, ...] = ()
    steps: Mapping[str, Any] | None = None
    config_sha256: str = ""
    unproven: tuple[bool, ...] = ()


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


def with_line_experts(course: dict[str, Any]) -> dict[str, Any]:
    """The flight record's course under the line file's names."""
    for step in course["steps"]:
        step["expert"] = line_name(step["expert"])
        if step["load"] is not None:
            step["load"]["evicted"] = [line_name(each) for each in step["load"]["evicted"]]
    return course
