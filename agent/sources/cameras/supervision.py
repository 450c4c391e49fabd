"""State machine, with time as a parameter, that starts, kills and restarts a camera's process.

Guarantees: at most one process at a time; the next starts only after the last has ended. A process that does not
connect within ``open_timeout_s``, or sends no frame for ``stall_timeout_s``, is killed. Retries back off up to 30 s,
with jitter; the backoff is reset after HEALTHY_S of frames. An absent camera is logged at most
REPORTS_MAXIMUM times in REPEAT_S. Frames later than ``max_lag_s`` are an alarm; a process whose frames stay late for
``stall_timeout_s`` is killed, so that the next begins without a backlog.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, TypeAlias

from agent.faults.backoff import Backoff
from agent.sources.cameras.wire import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER = float("inf")
START_S = 30.0  # for a process to begin, on a busy box
CLOSE_S = 0.7  # for a process to release its camera, before it is killed
END_S = 5.0  # for a killed process to end; after that it hangs in the kernel
BACKOFF = Backoff(0.5, 30.0)
JITTER = 0.25  # of a pause, up or down: cameras behind one switch must not reconnect at once
HEALTHY_S = 10.0
REPEAT_S = 600.0
UNANSWERED = "frames come, and none is handed over: its process hangs"
IMMORTAL = "its process was killed and does not end: it hangs in a driver - if that stays, restart the box"
REPORTS_MAXIMUM = 4  # of different reasons, within REPEAT_S


class CameraState(StrEnum):
    CONNECTING = "CONNECTING"  # a process runs, without a frame yet
    STREAMING = "STREAMING"  # frames come
    STALLED = "STALLED"  # frames stopped without an end; reconnecting
    OFFLINE = "OFFLINE"  # no connection; retried, unless ended or stopped


class CameraSignal(Enum):
    """Events without data."""

    START = auto()
    TIME_PASSED = auto()  # check the deadline
    READY = auto()  # the process runs, and begins to connect
    CONNECTED = auto()  # the camera answered
    UNANSWERED = auto()  # frames arrive, but none is sent
    STOP = auto()  # final end


@dataclass(frozen=True, slots=True)
class FramesCame:
    """Frames have arrived since the last event; the latest was late by ``lag_s``."""

    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process has ended; ``how`` as text."""

    how: str


Event: TypeAlias = CameraSignal | FramesCame | Failed | ProcessEnded


class ProcessOrder(Enum):
    """Actions on the process."""

    START = auto()  # answered by exactly one ProcessEnded
    CLOSE = auto()  # ask the process to end
    KILL = auto()


@dataclass(frozen=True, slots=True)
class Report:
    """Write a log line."""

    state: CameraState
    reason: str


Action: TypeAlias = ProcessOrder | Report


class _Phase(Enum):
    RESTING = auto()  # no process
    STARTING = auto()
    OPENING = auto()
    AWAITING = auto()  # the first frame
    STREAMING = auto()
    CLOSING = auto()
    KILLED = auto()
    OVER = auto()


@dataclass
class _Reports:
    """Log lines about a camera. ``reported``: reasons with their times."""

    reported: dict[str, float] = field(default_factory=dict)
    is_silent: bool = True  # the current failure was not logged
    has_streamed: bool = False

    def trouble(self, state: CameraState, reason: str, now: float) -> list[Action]:
        self.reported = {each: at for each, at in self.reported.items() if now - at < REPEAT_S}
        if reason in self.reported or len(self.reported) >= REPORTS_MAXIMUM:
            return []
        self.reported[reason] = now
        self.is_silent = False
        return [Report(state, reason)]

    def recovery(self) -> list[Action]:
        """Line on a recovery: at the first connection, and after a logged failure."""
        is_due = not self.has_streamed or not self.is_silent
        self.has_streamed, self.is_silent = True, True
        return [Report(CameraState.STREAMING, "frames come")] if is_due else []


class Supervisor:
    """Supervises one camera's process. ``random``: uniform in 0 to 1."""

    def __init__(
        self, open_timeout_s: float, stall_timeout_s: float, max_lag_s: float, random: Callable[[], float]
    ) -> None:
        self._open_timeout_s = open_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._max_lag_s = max_lag_s
        self._late_since = NEVER
        self._random = random
        self._phase = _Phase.RESTING
        self._reports = _Reports()
        self._tries = 0  # failed attempts since the camera was healthy
        self._streaming_since = NEVER
        self._is_final = False
        self.is_stopped = False
        self.state = CameraState.OFFLINE
        self.alarm: str | None = "it has not been started"
        self.deadline = NEVER  # time of the next TimePassed
        self.connections = 0  # processes begun so far

    @property
    def is_over(self) -> bool:
        return self._phase is _Phase.OVER

    def decide(self, now: float, event: Event) -> list[Action]:
        """Actions for an event. A late event of an earlier process changes nothing."""
        match event:
            case CameraSignal.START:
                return self._connect(now)
            case CameraSignal.TIME_PASSED if now >= self.deadline:
                return self._time_is_up(now)
            case CameraSignal.READY if self._phase is _Phase.STARTING:
                return self._enter(_Phase.OPENING, now + self._open_timeout_s)
            case CameraSignal.CONNECTED if self._phase is _Phase.OPENING:
                return self._enter(_Phase.AWAITING, now + self._stall_timeout_s)
            case FramesCame(lag_s) if self._phase in {_Phase.OPENING, _Phase.AWAITING, _Phase.STREAMING}:
                return self._came(lag_s, now)
            case Failed(reason, is_final) if self._has_process:
                self._is_final = is_final
                reported = self._trouble(CameraState.OFFLINE, reason, now)
                return self._enter(_Phase.CLOSING, now + CLOSE_S, *reported, ProcessOrder.CLOSE)
            case CameraSignal.UNANSWERED if self._phase is _Phase.STREAMING:
                return self._lose(CameraState.STALLED, UNANSWERED, now)
            case ProcessEnded(how):
                return self._ended(how, now)
            case CameraSignal.STOP:
                return self._stop(now)
        return []

    @property
    def _has_process(self) -> bool:
        return self._phase in {_Phase.STARTING, _Phase.OPENING, _Phase.AWAITING, _Phase.STREAMING}

    def _enter(self, phase: _Phase, deadline: float, *actions: Action) -> list[Action]:
        self._phase, self.deadline = phase, deadline
        return list(actions)

    def _connect(self, now: float) -> list[Action]:
        self.connections += 1
        self.state = CameraState.CONNECTING
        if self.connections == 1:
            self.alarm = None
        return self._enter(_Phase.STARTING, now + START_S, ProcessOrder.START)

    def _came(self, lag_s: float, now: float) -> list[Action]:
        reported: list[Action] = []
        if self._phase is not _Phase.STREAMING:
            self._streaming_since, self._late_since = now, NEVER
        elif now - self._streaming_since >= HEALTHY_S:
            self._tries = 0
        if lag_s > self._max_lag_s:
            reason = f"its frames come more than max_lag_s {self._max_lag_s:g} late - look at the network and the load"
            self._late_since = min(self._late_since, now)
            if now - self._late_since >= self._stall_timeout_s:
                return self._lose(CameraState.STALLED, reason, now)
            reported = self._trouble(CameraState.STREAMING, reason, now)
        elif self._phase is not _Phase.STREAMING or self.alarm is not None:
            self.state, self.alarm, self._late_since = CameraState.STREAMING, None, NEVER
            reported = self._reports.recovery()
        return self._enter(_Phase.STREAMING, now + self._stall_timeout_s, *reported)

    def _time_is_up(self, now: float) -> list[Action]:
        match self._phase:
            case _Phase.RESTING:
                return self._connect(now)
            case _Phase.STARTING:
                return self._lose(CameraState.OFFLINE, f"its process did not begin within {START_S:g} s", now)
            case _Phase.OPENING:
                reason = f"no connection within open_timeout_s {self._open_timeout_s:g}"
                return self._lose(CameraState.OFFLINE, reason, now)
            case _Phase.AWAITING | _Phase.STREAMING:
                reason = f"no frame within stall_timeout_s {self._stall_timeout_s:g}, though nothing ended"
                return self._lose(CameraState.STALLED, reason, now)
            case _Phase.CLOSING:
                return self._enter(_Phase.KILLED, now + END_S, ProcessOrder.KILL)
            case _Phase.KILLED:
                return self._enter(_Phase.KILLED, NEVER, *self._trouble(self.state, IMMORTAL, now))
        return []

    def _trouble(self, state: CameraState, reason: str, now: float) -> list[Action]:
        self.state, self.alarm = state, reason
        return self._reports.trouble(state, reason, now)

    def _lose(self, state: CameraState, reason: str, now: float) -> list[Action]:
        reported = self._trouble(state, reason, now)
        return self._enter(_Phase.KILLED, now + END_S, *reported, ProcessOrder.KILL)

    def _ended(self, how: str, now: float) -> list[Action]:
        reported = self._trouble(CameraState.OFFLINE, how, now) if self._has_process else []
        if self.is_stopped:
            return self._enter(_Phase.OVER, NEVER)
        if self._is_final:
            return self._enter(_Phase.RESTING, NEVER, *reported)
        self._tries += 1
        pause_s = min(BACKOFF.pause_s(self._tries) * (1 - JITTER + 2 * JITTER * self._random()), BACKOFF.longest_s)
        return self._enter(_Phase.RESTING, now + pause_s, *reported)

    def _stop(self, now: float) -> list[Action]:
        has_process = self._has_process
        self.is_stopped = True
        self.state, self.alarm = CameraState.OFFLINE, None
        if has_process:
            return self._enter(_Phase.CLOSING, now + CLOSE_S, ProcessOrder.CLOSE)
        if self._phase is _Phase.RESTING:
            return self._enter(_Phase.OVER, NEVER)
        return []
