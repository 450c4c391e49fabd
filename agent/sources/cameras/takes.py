"""Ledger of a camera's triggers, with time as a parameter.

Guarantees: each trigger leaves the ledger once, answered or overdue. Frames are requested in the order of triggers, at
most AT_ONCE at a time, so that a camera's process holds few; after a lost connection they are requested again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.subject import Subject

NEVER = float("inf")
AT_ONCE = 4  # frames in one process that wait to be encoded


@dataclass(frozen=True, slots=True)
class Trigger:
    """Request for one frame. ``number``: of this run; ``asked_s``: monotonic."""

    subject: Subject
    number: int
    asked_s: float


class Takes:
    """A trigger older than ``patience_s`` is overdue."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._wanted: dict[int, Trigger] = {}  # in order
        self._asked: dict[int, float] = {}  # number -> time of the request; triggers with a requested frame

    def add(self, trigger: Trigger) -> None:
        self._wanted[trigger.number] = trigger

    def ask(self, now: float) -> list[Trigger]:
        """Triggers whose frames must be requested now."""
        free = AT_ONCE - len(self._asked)
        found = [trigger for number, trigger in self._wanted.items() if number not in self._asked][:free]
        self._asked |= {trigger.number: now for trigger in found}
        return found

    def answer(self, number: int) -> Trigger | None:
        """Trigger that a frame answers; None if it was overdue."""
        self._asked.pop(number, None)
        return self._wanted.pop(number, None)

    def disconnect(self) -> None:
        self._asked.clear()

    def overdue(self, now: float) -> list[Trigger]:
        """Remove and return triggers that have waited too long; their later frames are dropped."""
        found = [trigger for trigger in self._wanted.values() if now - trigger.asked_s >= self._patience_s]
        for trigger in found:
            del self._wanted[trigger.number]
        return found

    def clear(self) -> list[Trigger]:
        """Remove and return all triggers."""
        found = list(self._wanted.values())
        self._wanted.clear()
        self._asked.clear()
        return found

    @property
    def deadline(self) -> float:
        return min((trigger.asked_s for trigger in self._wanted.values()), default=NEVER) + self._patience_s

    @property
    def asked_since(self) -> float:
        return min(self._asked.values(), default=NEVER)


class Interval:
    """Triggers at fixed intervals, while a camera streams. Missed triggers are not made up for."""

    def __init__(self, every_s: float | None) -> None:
        self._every_s = every_s
        self.deadline = NEVER

    def is_due(self, now: float, is_streaming: bool) -> bool:
        """True if a trigger fires now; the first fires with the first frames."""
        if self._every_s is None or not is_streaming:
            self.deadline = NEVER
            return False
        if self.deadline == NEVER:
            self.deadline = now
        if now < self.deadline:
            return False
        following = self.deadline + self._every_s
        self.deadline = following if following > now else now + self._every_s
        return True
