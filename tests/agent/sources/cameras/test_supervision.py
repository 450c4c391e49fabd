"""A camera's process in virtual time: when it is started and killed, its interval, and its messages."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.cameras import supervision, wire
from agent.sources.cameras.delivery import NEVER, Interval
from agent.sources.cameras.supervision import (
    CameraSignal,
    CameraState,
    FramesCame,
    ProcessEnded,
    ProcessOrder,
    Report,
    Supervisor,
)
from agent.sources.cameras.wire import Failed

OPEN_S, STALL_S, MAX_LAG_S = 10.0, 5.0, 2.0
REFUSED = Failed("connection refused", is_final=False)
ENDED = ProcessEnded("its process ended")
STREAMING = (CameraSignal.READY, CameraSignal.CONNECTED, FramesCame())


class Desk:
    """A supervisor, a clock, and the actions so far."""

    def __init__(self, evenly=0.5):
        self.now = 0.0
        self.one = Supervisor(OPEN_S, STALL_S, MAX_LAG_S, lambda: evenly)
        self.done = []
        self.say(CameraSignal.START)

    def say(self, *events):
        """Actions that the events lead to."""
        actions = [action for event in events for action in self.one.decide(self.now, event)]
        self.done += actions
        return actions

    def wait(self):
        self.now = self.one.deadline
        return self.say(CameraSignal.TIME_PASSED)

    def fail(self):
        """Let the process fail and end; the pause until the next start."""
        self.say(CameraSignal.READY, REFUSED, ENDED)
        began = self.now
        assert ProcessOrder.START in self.wait()
        return self.now - began

    @property
    def reports(self):
        return [action for action in self.done if isinstance(action, Report)]


def shown(actions):
    return [Report if isinstance(action, Report) else action for action in actions]


def test_late_frames_raise_an_alarm_and_reconnect_the_camera_if_they_persist():
    desk = Desk()
    desk.say(*STREAMING)
    assert shown(desk.say(FramesCame(MAX_LAG_S + 0.1))) == [Report]
    assert (desk.one.state, "max_lag_s 2" in (desk.one.alarm or "")) == (CameraState.STREAMING, True)
    desk.now = STALL_S - 0.1
    assert desk.say(FramesCame(MAX_LAG_S + 1.0)) == []
    assert desk.say(FramesCame(MAX_LAG_S)) == [Report(CameraState.STREAMING, "frames come")]
    assert desk.one.alarm is None
    for lag_s, told in ((9.0, []), (9.0, [ProcessOrder.KILL])):  # the same trouble is not told twice
        assert shown(desk.say(FramesCame(lag_s))) == told
        desk.now += STALL_S
    assert desk.one.state is CameraState.STALLED
    desk.say(ENDED)
    assert desk.wait() == [ProcessOrder.START]
    desk.say(*STREAMING)
    assert (desk.one.state, desk.one.alarm) == (CameraState.STREAMING, None)


@pytest.mark.parametrize(
    ("said", "state", "reason"),
    [
        ((), CameraState.OFFLINE, "its process did not begin within 30 s"),
        ((CameraSignal.READY,), CameraState.OFFLINE, "no connection within open_timeout_s 10"),
        (STREAMING[:2], CameraState.STALLED, "no frame within stall_timeout_s 5, though nothing ended"),
        ((*STREAMING, CameraSignal.UNANSWERED), CameraState.STALLED, supervision.UNANSWERED),
    ],
)
def test_late_camera_process_is_killed_and_its_messages_ignored(said, state, reason):
    desk = Desk()
    desk.say(*said)
    if ProcessOrder.KILL not in desk.done:
        desk.wait()
    assert ProcessOrder.KILL in desk.done
    assert desk.say(*STREAMING, REFUSED, CameraSignal.UNANSWERED) == []
    assert (desk.one.state, desk.one.alarm) == (state, reason)


def test_reconnect_pauses_double_to_half_a_minute_and_reset_after_ten_healthy_seconds():
    assert [Desk(evenly).fail() for evenly in (0.0, 1.0)] == [0.375, 0.625]  # jittered
    desk = Desk()
    assert [desk.fail() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    desk.say(*STREAMING)
    desk.now += 1.0
    desk.say(FramesCame())
    assert desk.fail() == 30.0  # it had not been healthy
    desk.say(*STREAMING)
    for _ in range(5):
        desk.now += 2.0
        desk.say(FramesCame())
    assert desk.fail() == 0.5


@pytest.mark.parametrize(("reasons", "most"), [(1, 1), (1000, supervision.REPORTS_MAXIMUM)])
def test_absent_camera_is_logged_at_a_bounded_rate(reasons, most):
    desk, number = Desk(), 0
    while desk.now < 86_400:
        number += 1
        desk.say(CameraSignal.READY, Failed(f"refused by port {number % reasons}", is_final=False), ENDED)
        desk.wait()
    spans = 86_400 / supervision.REPEAT_S
    assert (spans - 2) * most <= len(desk.reports) <= (spans + 1) * most


def test_stop_asks_the_camera_process_first_and_then_kills_it():
    desk = Desk()
    desk.say(*STREAMING)
    assert desk.say(CameraSignal.STOP) == [ProcessOrder.CLOSE]
    assert desk.wait() == [ProcessOrder.KILL]
    assert desk.say(ENDED) == []
    assert (desk.one.is_over, desk.one.deadline) == (True, supervision.NEVER)


SIGNALS = [signal for signal in CameraSignal if signal is not CameraSignal.START]
EVENTS = st.sampled_from([*SIGNALS, FramesCame(), REFUSED, Failed("ended", is_final=True), ENDED])


@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=60))
def test_at_most_one_camera_process_runs_and_a_stop_ends_it_after_any_events(said):
    desk, processes, is_stopped = Desk(), 1, False
    for event, later_s in said:
        desk.now += later_s
        if isinstance(event, ProcessEnded):
            if not processes:
                continue
            processes -= 1
        is_stopped |= event is CameraSignal.STOP
        started = shown(desk.say(event)).count(ProcessOrder.START)
        processes += started
        assert processes <= 1
        assert not (started and is_stopped)
        assert desk.one.is_over == (is_stopped and not processes)
        assert desk.one.alarm is None or desk.one.state is not CameraState.STREAMING
    desk.say(CameraSignal.STOP)
    while processes and not desk.one.is_over:
        if ProcessOrder.KILL in desk.wait() or desk.one.deadline == supervision.NEVER:
            desk.say(ENDED)
            processes -= 1
    assert desk.one.is_over


def test_interval_fires_only_while_frames_come_and_makes_up_for_no_missed_one():
    interval = Interval(2.0)
    assert not interval.is_due(0.0, is_streaming=False)
    assert interval.deadline == NEVER
    fired = [now for now in (100.0, 101.0, 102.0, 109.0, 110.9, 111.0) if interval.is_due(now, is_streaming=True)]
    assert fired == [100.0, 102.0, 109.0, 111.0]
    assert not Interval(None).is_due(0.0, is_streaming=True)


def test_frame_message_travels_whole_and_a_malformed_one_is_refused():
    content = os.urandom(3_000_000)
    assert wire.decode(wire.encode(wire.Taken(1, 0.5), content)) == (wire.Taken(1, 0.5), content)
    for other in (b"", b"torn", wire.encode(wire.Taken(1, 0.5), content)[:20]):
        with pytest.raises((ValueError, KeyError, TypeError)):
            wire.decode(other)
