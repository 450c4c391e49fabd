"""Debts of a camera: a ledger of its triggers, and delivery of frames and lost triggers, one by one.

Guarantees: each trigger leaves the ledger once, answered or overdue. Frames are requested in the order of triggers, at
most AT_ONCE at a time, so that a camera's process holds few; after a lost connection they are requested again. Frames
and lost triggers are delivered in order, on a thread that may wait for the disk, and counted until then. An error of a
callback costs one frame: a trigger's frame is reported as lost, any other is dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.subject import Subject

NEVER = float("inf")
AT_ONCE = 4  # frames in one process that wait to be encoded
log = logging.getLogger(__name__)
NO_ROOM_S = 0.05  # between two checks for room in the agent
FAILED_S = 1.0  # after an error of a callback
OVERFLOW_MAXIMUM = 1000  # unreported lost triggers that were never admitted


@dataclass(frozen=True, slots=True)
class Trigger:
    """Request for one frame. ``number``: counted from the start; ``asked_s``: monotonic."""

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


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Frame, or trigger without a frame (``content`` None). ``is_overflow``: the trigger was never admitted."""

    subject: Subject
    content: bytes | None
    reason: str = ""
    is_overflow: bool = False


class Delivery:
    """Thread that makes one callback at a time.

    ``offer`` gets a frame's subject and bytes (PNG, or the camera's JPEG), ``refuse`` a trigger without a frame and the
    reason; both return once the record is durable. ``want`` requests a frame in free run, while ``has_room``; None for
    a triggered camera. ``limit``: triggers that wait.
    """

    def __init__(
        self,
        name: str,
        offer: Callable[[Subject, bytes], None],
        refuse: Callable[[Subject, str], None],
        has_room: Callable[[], bool],
        limit: int,
        want: Callable[[], None] | None,
    ) -> None:
        self._name = name
        self._offer = offer
        self._refuse = refuse
        self._has_free_room = has_room
        self._limit = limit
        self._want = want
        self._parcels: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._guard = threading.Lock()  # guards the counts
        self._overflowed = 0
        self.waiting = 0  # admitted triggers that have not ended; in free run, frames
        self.handed = 0  # frames taken or in transit
        self.received = 0
        self.lost = 0
        self.alarm: str | None = None
        self.thread = threading.Thread(target=self._run, name=f"frames-{name}", daemon=True)

    def admit(self) -> bool:
        """Reserve a place for one more trigger until it ends; False without room."""
        with self._guard:
            has_room = self.waiting < self._limit
            self.waiting += has_room
        return has_room

    def put(self, subject: Subject, content: bytes) -> None:
        with self._guard:
            self.handed += 1
            self.waiting += self._want is not None
        self._parcels.put(_Parcel(subject, content))

    def lose(self, subject: Subject, reason: str) -> None:
        """End an admitted trigger without a frame. In free run there is no report."""
        if self._want is None:
            self._parcels.put(_Parcel(subject, None, reason))

    def can_overflow(self) -> bool:
        """True if one more lost trigger can be reported; otherwise make none."""
        with self._guard:
            if self._overflowed >= OVERFLOW_MAXIMUM:
                self.alarm = f"interval_s pauses: {self._overflowed} lost triggers are not stored yet"
                return False
        return True

    def overflow(self, subject: Subject, reason: str) -> None:
        """Report a trigger of the interval as lost, as the queue was full."""
        with self._guard:
            self._overflowed += 1
        self._parcels.put(_Parcel(subject, None, reason, is_overflow=True))

    def stop(self) -> None:
        self._stopping.set()

    def end(self) -> None:
        """End the thread after the queued callbacks."""
        self._parcels.put(None)

    def _run(self) -> None:
        while self._want is None or self._wanted(self._want):
            parcel = self._parcels.get()
            if parcel is None:
                return
            self._hand(parcel)

    def _wanted(self, want: Callable[[], None]) -> bool:
        """Request a frame once there is room; False if the camera ends first."""
        while not self._has_room():
            if self._stopping.wait(NO_ROOM_S):
                return False
        want()
        return True

    def _has_room(self) -> bool:
        try:
            return self._has_free_room()
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: retried
            self._broke(error)
            return False

    def _hand(self, parcel: _Parcel) -> None:
        try:
            if parcel.content is not None:
                self._offer(parcel.subject, parcel.content)
                self.received += 1
            else:
                self.lost += 1
                self._refuse(parcel.subject, parcel.reason)
            self.alarm = None
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: other frames go on
            self._broke(error)
            if parcel.content is not None:
                with self._guard:
                    self.handed -= 1
                    self.waiting -= self._want is not None
                if self._want is None:
                    self._hand(_Parcel(parcel.subject, None, f"its frame was not taken: {error}"))
                return
        with self._guard:
            if parcel.is_overflow:
                self._overflowed -= 1
            else:
                self.waiting -= 1

    def _broke(self, error: Exception) -> None:
        """Log an error of a callback, once until the next taken frame."""
        alarm = f"frames are not taken: {type(error).__name__}: {error}"
        if alarm != self.alarm:
            log.error("camera_frame_not_taken camera=%s", self._name, exc_info=error)
        self.alarm = alarm
        self._stopping.wait(FAILED_S)
