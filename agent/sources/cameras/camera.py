"""A camera as a source: supervises its process, keeps its triggers, offers its frames one by one.

Guarantees: in free run the latest frame is offered whenever there is room; other frames are counted as dropped. In
triggered mode each accepted trigger, and each of the interval, ends once: with a later frame, or as lost with the
reason, which is UNKNOWN part by part. The next frame waits until the last is durable. A call to the camera can hang
only in the camera's process, which is killed then.
Structure: one thread decides (supervision, takes) and acts, one offers and waits for the disk (delivery), one listens
to the process.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, TypeAlias

from agent.environment import read_secret
from agent.faults.errors import OrderRefused, Reason
from agent.sources.base import Arrival, Source, local_time
from agent.sources.cameras import wire
from agent.sources.cameras.delivery import NEVER, Delivery, Interval, Takes, Trigger
from agent.sources.cameras.process import CameraProcess, Received, connection_of, stall_timeout_s
from agent.sources.cameras.supervision import (
    CameraSignal,
    CameraState,
    FramesCame,
    ProcessEnded,
    ProcessOrder,
    Report,
    Supervisor,
)
from agent.subject import CAMERA_PREFIX, SourceStatus, Subject, asked_sha256, checked_name
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from agent.config import LineConfig
    from agent.line_file.intake import CameraSection
    from agent.sources.base import Line
    from agent.sources.cameras.process import Heard
    from agent.sources.cameras.supervision import Event
    from experts.expert import Verdict

log = logging.getLogger(__name__)

CALLERS_PREFIX = f"{CAMERA_PREFIX}key/"  # of callers' keys of triggers: no camera's name has a slash
FRAMES_UNDER_WAY = 2  # of one camera: one is judged while the next is fetched
LOOK_S = 0.2  # between two checks for a stop, while a thread waits for the disk
STEP_FAILED_S = 1.0  # after a fault of the program
LONGEST_WAIT_S = 3600.0
ENCODE_S = 10.0  # for delivery of a requested frame; the stall timeout if longer
RETRY_S = 1.0  # advised to a caller whose trigger is refused


@dataclass(frozen=True, slots=True)
class _FromProcess:
    """Message of the camera process with this number."""

    number: int
    heard: Heard


_Item: TypeAlias = "Trigger | _FromProcess | None"  # None: check the time and the stop flag


def camera_sources(config: LineConfig, line: Line) -> Sequence[Source]:
    """Raises SecretMissing."""
    return [
        CameraSource(each, None if each.password is None else read_secret(each.password), line)
        for each in config.intake.cameras
    ]


class CameraSource(Source):
    def __init__(self, section: CameraSection, password: str | None, line: Line) -> None:
        super().__init__(section.name)
        self._section = section
        self._line = line
        self._connection = connection_of(section, password)
        self._is_triggered = section.mode == "triggered"
        self._stall_timeout_s = stall_timeout_s(section)
        self._supervisor = Supervisor(section.open_timeout_s, self._stall_timeout_s, section.max_lag_s, random.random)
        self._takes = Takes(self._stall_timeout_s)
        self._interval = Interval(section.interval_s)
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._child: CameraProcess | None = None
        self._guard = threading.Lock()  # guards the number, and the admission of triggers
        self._number = 0
        self._stopping = threading.Event()
        self._seen_before = wire.Seen(0, 0)  # by earlier connections
        self._seen = wire.Seen(0, 0)  # by all connections
        self._came_at: float | None = None
        self._has_changed = threading.Condition()  # guards the two sets
        self._unaccepted: set[str] = set()  # keys of frames that are not durable
        self._unjudged: set[str] = set()  # keys of frames, and of lost triggers, without a committed verdict
        self._delivery = Delivery(
            section.name, self._offer_frame, self._refuse_trigger, self._has_room, section.queue,
            want=None if self._is_triggered else self._want,
        )  # fmt: skip
        self._threads = (
            threading.Thread(target=self._watch, name=f"camera-{section.name}", daemon=True),
            self._delivery.thread,
        )

    # -- the contract --

    def start(self) -> None:
        """Connect, and reconnect after each loss."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop: triggers without a frame are lost; taken frames are offered until the timeout."""
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._delivery.stop()
        self._inbox.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def check(self, config: LineConfig) -> None:
        """Raises ConfigError for a line without the layout that cuts the frames."""
        board_type = self._section.board_type or next(iter(self._line.config.layouts), None)
        if self._section.component is None and board_type not in config.layouts:
            raise ConfigError(
                f"the layout of board type {board_type!r} cuts the frames of camera {self.name}, which runs until the "
                "next start - keep it until then, or start again"
            )

    def trigger(self, board: str | None = None, board_type: str | None = None, key: str | None = None) -> str:
        """Take one frame, unless the key was used before. For any thread; does not wait.

        The trigger ends once, with a frame or as lost, while this agent lives.
        """
        config = self._line.config
        if board_type is not None and board_type not in config.boards:
            raise OrderRefused(
                Reason.NOT_FOUND, f"no board type {board_type!r} - the line has {', '.join(config.boards)}"
            )
        if board_type is not None and self._section.component is None and board_type not in config.layouts:
            message = f"board type {board_type!r} has no layout to cut frames of camera {self.name} by"
            raise OrderRefused(Reason.INVALID, message)
        checked_name(board, "board")
        if checked_name(key, "key") is None:
            return self._admit_trigger(board, board_type)
        named, asked = f"{CALLERS_PREFIX}{key}", asked_sha256(self.name, board, board_type)
        if self._line.reserve_key(named, asked):
            try:
                self._admit_trigger(board, board_type, named, asked)
            except BaseException:
                self._line.release_key(named)
                raise
        return named

    def status(self) -> SourceStatus:
        seen, came_at, delivery = self._seen, self._came_at, self._delivery
        return SourceStatus(
            name=self.name,
            kind="camera",
            state=str(self._supervisor.state),
            received=delivery.received,
            dropped=0 if self._is_triggered else max(seen.frames - delivery.handed, 0),
            lost=delivery.lost,
            waiting=delivery.waiting,
            broken=seen.broken,
            reconnects=max(self._supervisor.connections - 1, 0),
            alarm=self._supervisor.alarm or delivery.alarm,
            frame_age_s=None if came_at is None else time.monotonic() - came_at,
        )

    def image_accepted(self, subject: Subject) -> None:
        with self._has_changed:
            self._unaccepted.discard(subject.key)
            self._has_changed.notify_all()

    def verdict_committed(self, subject: Subject, verdict: Verdict, reason: str | None) -> None:
        with self._has_changed:
            self._unjudged.discard(subject.key)
        self.image_accepted(subject)

    # -- triggers --

    def _admit_trigger(
        self, board: str | None, board_type: str | None, key: str | None = None, asked: str | None = None
    ) -> str:
        """Admit a trigger; returns the prefix of its results' keys. Raises OrderRefused."""
        if not self._is_triggered:
            message = f"camera {self.name} runs freely - `mode: triggered` in the line file has it wait"
            raise OrderRefused(Reason.NOT_NOW, message)
        state, alarm = self._supervisor.state, self._supervisor.alarm
        with self._guard:
            if self._stopping.is_set():
                raise OrderRefused(Reason.STOPPING, f"camera {self.name} ends: the next agent will answer")
            if state is not CameraState.STREAMING:
                because = f" ({alarm})" if alarm else ""
                message = f"camera {self.name} is {state}{because} - try again later"
                raise OrderRefused(Reason.NOT_NOW, message, RETRY_S)
            if not self._delivery.admit():
                raise OrderRefused(Reason.QUEUE_FULL, f"camera {self.name}: {self._full()}", RETRY_S)
            trigger = self._new_trigger(time.monotonic(), board, board_type, key, asked)
            self._inbox.put(trigger)
        return trigger.subject.key

    def _full(self) -> str:
        return f"{self._section.queue} triggers wait, which is all that `queue` permits"

    def _new_trigger(
        self,
        asked_s: float,
        board: str | None = None,
        board_type: str | None = None,
        key: str | None = None,
        asked: str | None = None,
    ) -> Trigger:
        """New trigger; call under the guard."""
        self._number += 1
        subject = self._subject(local_time(), self._number, board_type or self._section.board_type)
        key, board = key or subject.key, board or subject.board
        subject = replace(subject, key=key, image=key, board=board, asked_sha256=asked)
        return Trigger(subject, self._number, asked_s)

    def _subject(self, at: datetime, number: int, board_type: str | None) -> Subject:
        """Subject of a frame taken now. A frame of one component is the part named after the camera."""
        name, component, moment = self.name, self._section.component, at.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        key, board = f"{CAMERA_PREFIX}{name}@{moment}#{number}", f"{name}-{moment}"
        return Subject(key, name, key, at, component, None, board, board_type, None if component is None else name)

    def _want(self) -> None:
        with self._guard:
            self._inbox.put(self._new_trigger(NEVER))

    # -- on the delivery thread --

    def _has_room(self) -> bool:
        return self._line.has_room(self) and len(self._unjudged) < FRAMES_UNDER_WAY

    def _offer_frame(self, subject: Subject, content: bytes) -> None:
        """Offer a frame; one that waits for room while the agent stops remains for the next start."""
        with self._has_changed:
            while not (self._has_room() or self._stopping.is_set()):
                self._has_changed.wait(LOOK_S)
        with self._under_way(subject, self._unaccepted):
            self._line.offer_image(Arrival(self._completed(subject), content, self._section.max_pixels), self)

    def _refuse_trigger(self, subject: Subject, reason: str) -> None:
        with self._under_way(subject, self._unjudged):
            self._line.refuse_subject(self._completed(subject), f"camera {self.name}: {reason}", self)

    @contextmanager
    def _under_way(self, subject: Subject, awaited: set[str]) -> Iterator[None]:
        """Register the subject, then wait until its key has left ``awaited``; an error removes it."""
        with self._has_changed:
            self._unjudged.add(subject.key)
            awaited.add(subject.key)
        try:
            yield
        except BaseException:
            self._unjudged.discard(subject.key)
            awaited.discard(subject.key)
            raise
        with self._has_changed:
            while subject.key in awaited and not self._stopping.is_set():
                self._has_changed.wait(LOOK_S)
        self._line.release_key(subject.key)

    def _completed(self, subject: Subject) -> Subject:
        """Subject with the type of the board that its frame shows."""
        if subject.component is not None:
            return subject
        return replace(subject, board_type=subject.board_type or next(iter(self._line.config.boards), ""))

    # -- on the deciding thread --

    def _watch(self) -> None:
        self._inbox.put(None)
        while not self._supervisor.is_over:
            try:
                self._handle(self._next())
            except Exception:  # boundary of the thread
                log.exception("camera_step_failed camera=%s", self.name)
                time.sleep(STEP_FAILED_S)
        self._lose(self._takes.clear(), "the agent ended")
        with self._guard:  # later triggers are refused
            while not self._inbox.empty():
                if isinstance(item := self._inbox.get(), Trigger):
                    self._lose([item], "the agent ended")
        self._delivery.end()

    def _next(self) -> _Item:
        ledgers = (self._supervisor.deadline, self._takes.deadline, self._interval.deadline)
        pause_s = min(*ledgers, self._answer_deadline()) - time.monotonic()
        try:
            return self._inbox.get(timeout=min(max(pause_s, 0.0), LONGEST_WAIT_S))
        except queue.Empty:
            return None

    def _answer_deadline(self) -> float:
        return self._takes.asked_since + max(self._stall_timeout_s, ENCODE_S)

    def _handle(self, item: _Item) -> None:
        if not self._supervisor.connections:
            self._act(CameraSignal.START)
        if self._stopping.is_set() and not self._supervisor.is_stopped:
            self._act(CameraSignal.STOP)
        if isinstance(item, Trigger):
            self._takes.add(item)
        elif item is not None and item.number == self._supervisor.connections:
            self._hear(item.heard)
        now = time.monotonic()
        self._act(CameraSignal.TIME_PASSED)
        if self._supervisor.state is not CameraState.STREAMING:
            self._takes.disconnect()
        elif now >= self._answer_deadline():
            self._act(CameraSignal.UNANSWERED)
        self._fire(now)
        because = f": {self._supervisor.alarm}" if self._supervisor.alarm else ""
        patience = f"within stall_timeout_s {self._stall_timeout_s:g} of the trigger"
        self._lose(self._takes.overdue(now), f"no frame came {patience} ({self._supervisor.state}{because})")
        if self._supervisor.state is CameraState.STREAMING and self._child is not None:
            for trigger in self._takes.ask(now):
                self._child.ask(wire.Take(trigger.number, since=trigger.asked_s if self._is_triggered else None))

    def _hear(self, heard: Heard) -> None:
        match heard:
            case wire.Ready():
                self._act(CameraSignal.READY)
            case wire.Opened():
                self._act(CameraSignal.CONNECTED)
            case wire.Seen():
                self._see(heard)
            case wire.Failed():
                self._act(heard)
            case Received(taken, content):
                self._receive(taken, content)
            case ProcessEnded():
                self._child = None
                self._seen_before = self._seen
                self._takes.disconnect()
                self._act(heard)

    def _see(self, seen: wire.Seen) -> None:
        before = self._seen_before
        total = wire.Seen(before.frames + seen.frames, before.broken + seen.broken, seen.lag_s)
        is_more = total.frames > self._seen.frames
        self._seen = total
        if is_more:
            self._came_at = time.monotonic() - seen.lag_s
            self._act(FramesCame(seen.lag_s))

    def _receive(self, taken: wire.Taken, content: bytes) -> None:
        trigger = self._takes.answer(taken.number)
        if trigger is None:
            return
        at = local_time() - timedelta(seconds=taken.age_s)
        subject = replace(trigger.subject, arrived_at=at)
        if not self._is_triggered:  # the request preceded the frame
            subject = self._subject(at, trigger.number, subject.board_type)
        self._delivery.put(subject, content)

    def _act(self, event: Event) -> None:
        for action in self._supervisor.decide(time.monotonic(), event):
            match action:
                case ProcessOrder.START:
                    self._start_process()
                case ProcessOrder.CLOSE if self._child is not None:
                    self._child.close()
                case ProcessOrder.KILL if self._child is not None:
                    self._child.kill()
                case Report(state, reason):
                    level = logging.WARNING if self._supervisor.alarm else logging.INFO
                    log.log(level, "camera_state camera=%s state=%s reason=%s", self.name, state, reason)

    def _start_process(self) -> None:
        number = self._supervisor.connections
        try:
            self._child = CameraProcess(self._connection, lambda heard: self._inbox.put(_FromProcess(number, heard)))
        except Exception as error:  # noqa: BLE001 - an end must come, or the camera is never tried again
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._inbox.put(_FromProcess(number, ProcessEnded(f"no process can be started: {reason}")))

    def _fire(self, now: float) -> None:
        """Fire the interval. A trigger at a full queue is reported as lost."""
        is_streaming = self._supervisor.state is CameraState.STREAMING and not self._stopping.is_set()
        if not (self._interval.is_due(now, is_streaming) and self._delivery.can_overflow()):
            return
        with self._guard:
            trigger = self._new_trigger(now)
        if self._delivery.admit():
            self._takes.add(trigger)
        else:
            self._delivery.overflow(trigger.subject, self._full())

    def _lose(self, triggers: list[Trigger], reason: str) -> None:
        for trigger in triggers:
            self._delivery.lose(trigger.subject, reason)
