"""One camera: supervises its process, keeps its triggers, hands its frames over one by one.

Guarantees: in free run the latest frame is handed over whenever there is room; other frames are counted as dropped. In
triggered mode each accepted trigger, and each of the interval, ends once: with a later frame, or as lost with the
reason. A call to the camera can hang only in the camera's process, which is killed then.
Structure: one thread decides (supervision, takes) and acts, one hands over and waits for the disk, one listens to the
process.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, TypeAlias

from agent.sources.base import local_time
from agent.sources.cameras import wire
from agent.sources.cameras.delivery import Delivery
from agent.sources.cameras.pictures.source import CameraConnection
from agent.sources.cameras.process import ChildProcess, Received
from agent.sources.cameras.supervision import (
    CameraSignal,
    CameraState,
    FramesCame,
    ProcessEnded,
    ProcessOrder,
    Supervisor,
    Tell,
)
from agent.sources.cameras.takes import NEVER, Interval, Takes, Trigger
from agent.subject import CAMERA_PREFIX, SourceStatus, Subject
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from datetime import datetime

    from agent.line_file.intake import CameraSection
    from agent.sources.cameras.delivery import CameraDoors
    from agent.sources.cameras.process import Heard
    from agent.sources.cameras.supervision import Event

log = logging.getLogger(__name__)

STEP_FAILED_S = 1.0  # after a fault of the program
LONGEST_WAIT_S = 3600.0
SLOW_FRAMES = 2.0  # periods of a slowly played clip, before it counts as stalled
ENCODE_S = 10.0  # for a requested frame to be handed over; the stall timeout if that is longer
RETRY_S = 1.0  # told to a caller whose trigger is refused


@dataclass(frozen=True, slots=True)
class _FromProcess:
    """Message of the process with this number."""

    number: int
    heard: Heard


_Item: TypeAlias = "Trigger | _FromProcess | None"  # None: look at the time, or at whether to stop


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def stall_timeout_s(config: CameraSection) -> float:
    """Seconds without a frame before a camera counts as stalled; longer for a slowly played clip."""
    return max(config.stall_timeout_s, SLOW_FRAMES / config.frames_per_s if config.frames_per_s else 0.0)


def connection_of(config: CameraSection, password: str | None) -> CameraConnection:
    """Parameters with which the camera's process connects."""
    return CameraConnection(
        url=config.url,
        open_timeout_s=config.open_timeout_s,
        stall_timeout_s=stall_timeout_s(config),
        max_pixels=config.max_pixels,
        user=config.user,
        password=password,
        loop=config.loop,
        frames_per_s=config.frames_per_s,
        rtsp_transport=config.rtsp_transport,
        ca=None if config.ca is None else str(config.ca),
        insecure_ok=config.insecure_ok,
    )


class Camera:
    """Call ``start`` once; ``stop`` may be repeated."""

    def __init__(self, config: CameraSection, password: str | None, doors: CameraDoors) -> None:
        self.name = config.name
        self._config = config
        self._connection = connection_of(config, password)
        self._is_triggered = config.mode == "triggered"
        self._stall_timeout_s = stall_timeout_s(config)
        self._supervisor = Supervisor(config.open_timeout_s, self._stall_timeout_s, config.max_lag_s, random.random)
        self._takes = Takes(self._stall_timeout_s)
        self._interval = Interval(config.interval_s)
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._child: ChildProcess | None = None
        self._guard = threading.Lock()  # over the number, and over whether triggers are admitted
        self._number = 0
        self._stopping = threading.Event()
        self._seen_before = wire.Seen(0, 0)  # by earlier connections
        self._seen = wire.Seen(0, 0)  # by all
        self._came_at: float | None = None
        self._delivery = Delivery(config.name, doors, config.queue, None if self._is_triggered else self._want)
        self._threads = (
            threading.Thread(target=self._watch, name=f"camera-{config.name}", daemon=True),
            self._delivery.thread,
        )

    def start(self) -> None:
        """Connect, and reconnect after each loss. Does not wait."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop within ``timeout_s``; True once all threads have ended.

        Triggers without a frame are lost; frames that were taken are handed over while there is time.
        """
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._delivery.stop()
        self._inbox.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def trigger(
        self,
        board: str | None = None,
        board_type: str | None = None,
        key: str | None = None,
        asked_sha256: str | None = None,
    ) -> str:
        """Ask for one frame; returns the key that its results begin with. Any thread; does not wait.

        Raises OrderRefused. Otherwise the trigger ends once, with a frame or as lost, while this agent lives.
        """
        if not self._is_triggered:
            raise OrderRefused(
                Refusing.NOT_NOW,
                f"camera {self.name} runs freely - `mode: triggered` in the line file has it wait",
            )
        state, alarm = self._supervisor.state, self._supervisor.alarm
        with self._guard:
            if self._stopping.is_set():
                raise OrderRefused(Refusing.STOPPING, f"camera {self.name} ends: the next agent will answer")
            if state is not CameraState.STREAMING:
                because = f" ({alarm})" if alarm else ""
                message = f"camera {self.name} is {state}{because} - try again later"
                raise OrderRefused(Refusing.NOT_NOW, message, RETRY_S)
            if not self._delivery.admit():
                raise OrderRefused(Refusing.QUEUE_FULL, self._full(), RETRY_S)
            trigger = self._new_trigger(time.monotonic(), board, board_type, key=key, asked_sha256=asked_sha256)
            self._inbox.put(trigger)
        return trigger.subject.key

    def status(self) -> SourceStatus:
        """A snapshot, from any thread."""
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

    def _full(self) -> str:
        return f"camera {self.name}: {self._config.queue} triggers wait, which is all that `queue` permits"

    def _new_trigger(
        self,
        asked_s: float,
        board: str | None = None,
        board_type: str | None = None,
        key: str | None = None,
        asked_sha256: str | None = None,
    ) -> Trigger:
        """Under the guard."""
        self._number += 1
        subject = self._subject(local_time(), self._number, board_type or self._config.board_type)
        key, board = key or subject.key, board or subject.board
        subject = replace(subject, key=key, image=key, board=board, asked_sha256=asked_sha256)
        return Trigger(subject, self._number, asked_s)

    def _subject(self, at: datetime, number: int, board_type: str | None) -> Subject:
        """Subject of a frame of this moment. A frame of one component is the part named as the camera."""
        name, component = self.name, self._config.component
        key, board = f"{CAMERA_PREFIX}{name}@{_moment(at)}#{number}", f"{name}-{_moment(at)}"
        return Subject(key, name, key, at, component, None, board, board_type, None if component is None else name)

    def _want(self) -> None:
        with self._guard:
            self._inbox.put(self._new_trigger(NEVER))

    # -- the thread that decides --

    def _watch(self) -> None:
        self._inbox.put(None)
        while not self._supervisor.is_over:
            try:
                self._handle(self._next())
            except Exception:  # the boundary of the thread
                log.exception("camera_step_failed camera=%s", self.name)
                time.sleep(STEP_FAILED_S)
        self._lose(self._takes.clear(), "the agent ended")
        with self._guard:  # later triggers are refused
            while not self._inbox.empty():
                if isinstance(item := self._inbox.get(), Trigger):
                    self._lose([item], "the agent ended")
        self._delivery.end()

    def _next(self) -> _Item:
        try:
            return self._inbox.get(timeout=self._pause_s())
        except queue.Empty:
            return None

    def _pause_s(self) -> float:
        deadline = min(
            self._supervisor.deadline, self._takes.deadline, self._interval.deadline, self._answer_deadline()
        )
        return min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT_S)

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
        self._lose(self._takes.overdue(now), self._why_lost())
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
                self._gone(heard)

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
        if not self._is_triggered:  # the request came before the frame
            subject = self._subject(at, trigger.number, subject.board_type)
        self._delivery.put(subject, content)

    def _gone(self, ended: ProcessEnded) -> None:
        self._child = None
        self._seen_before = self._seen
        self._takes.disconnect()
        self._act(ended)

    def _act(self, event: Event) -> None:
        for action in self._supervisor.decide(time.monotonic(), event):
            match action:
                case ProcessOrder.START:
                    self._begin()
                case ProcessOrder.CLOSE if self._child is not None:
                    self._child.close()
                case ProcessOrder.KILL if self._child is not None:
                    self._child.kill()
                case Tell(state, reason):
                    level = logging.WARNING if self._supervisor.alarm else logging.INFO
                    log.log(level, "camera_state camera=%s state=%s reason=%s", self.name, state, reason)

    def _begin(self) -> None:
        number = self._supervisor.connections
        try:
            self._child = ChildProcess(self._connection, lambda heard: self._inbox.put(_FromProcess(number, heard)))
        except Exception as error:  # noqa: BLE001 - an end must come, or the camera is never tried again
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._inbox.put(_FromProcess(number, ProcessEnded(f"no process can be started: {reason}")))

    def _fire(self, now: float) -> None:
        """Fire the interval. A trigger that meets a full queue is reported as lost."""
        is_streaming = self._supervisor.state is CameraState.STREAMING and not self._stopping.is_set()
        if not (self._interval.is_due(now, is_streaming) and self._delivery.can_overflow()):
            return
        with self._guard:
            trigger = self._new_trigger(now)
        if self._delivery.admit():
            self._takes.add(trigger)
        else:
            self._delivery.overflow(trigger.subject, self._full())

    def _why_lost(self) -> str:
        state, alarm = self._supervisor.state, self._supervisor.alarm
        because = f": {alarm}" if alarm else ""
        patience = f"within stall_timeout_s {self._stall_timeout_s:g} of the trigger"
        return f"camera {self.name}: no frame came {patience} ({state}{because})"

    def _lose(self, triggers: list[Trigger], reason: str) -> None:
        for trigger in triggers:
            self._delivery.lose(trigger.subject, reason)
