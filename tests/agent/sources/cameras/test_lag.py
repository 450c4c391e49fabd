"""Late frames: their age, the trigger that they answer, and the alarm."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from agent.sources.cameras.pictures.presentation import PresentationClock
from experts.images import read_image
from tests.agent.sources.cameras.stand_ins import WAIT_S
from tests.waiting import until

PERIOD_S = 0.04
BITS, SQUARE = 40, 48  # as rtsp_server.py draws
BACKLOG_S = 1.0
SLACK_S = 0.1  # more than the distance of two clocks that go alike is let grow within a test


class Stream:
    """A camera under virtual time: a frame every PERIOD_S, DELAY_S on its way, read at once or later."""

    DELAY_S = 0.03

    def __init__(self, *, is_one_behind=False, rate=1.0):
        self.clock = PresentationClock(is_one_behind=is_one_behind)
        self.is_one_behind = is_one_behind
        self.rate = rate  # of the camera's clock
        self.ahead_s = 5000.0  # of ours
        self.taken_at = 100.0

    def send(self, late_s=0.0, has_waited=True):
        """Send the next frame, read ``late_s`` after it came; returns the age that the clock gives it."""
        self.taken_at += PERIOD_S
        presented_s = self.taken_at * self.rate + self.ahead_s
        now = self.taken_at + self.DELAY_S + late_s + (PERIOD_S if self.is_one_behind else 0.0)
        self.clock.learn(presented_s, now, has_waited)
        return now - self.clock.came_at(presented_s, now)

    def settle(self):
        until(lambda: self.send() < float("inf"))


@pytest.mark.parametrize("is_one_behind", [False, True])
def test_lag_is_measured_to_the_frame(is_one_behind):
    stream = Stream(is_one_behind=is_one_behind)
    stream.settle()
    own_s = PERIOD_S if is_one_behind else 0.0  # such a stream's frames are all read when the next one begins
    for late_s, has_waited in ((0.0, True), (2.0, False), (1.5, True), (0.7, True), (0.0, True)):
        stream.send(late_s, has_waited)
        assert stream.send(late_s, has_waited) == pytest.approx(late_s + own_s, abs=0.01)


def test_frames_buffered_before_the_start_set_no_lag():
    stream = Stream()
    ages = [stream.send(2.0 - number * 0.8 * PERIOD_S, has_waited=number % 10 == 9) for number in range(62)]
    assert set(ages) == {float("inf")}
    until(lambda: stream.send() < float("inf"))
    assert stream.send() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("jump_s", [-3600.0, -3.0, 3.0, 3600.0, -(2**32) / 90_000])
def test_lag_is_learned_again_after_a_clock_jump(jump_s):
    stream = Stream()
    stream.settle()
    stream.ahead_s += jump_s
    assert stream.send(1.0, has_waited=False) == float("inf")
    assert {stream.send(1.0, has_waited=False) for _ in range(50)} == {float("inf")}  # nothing says how late these are
    stream.settle()
    assert stream.send() == pytest.approx(0.0, abs=0.01)
    assert stream.send(1.0) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("rate", [1 - 3e-4, 1 + 3e-4])
def test_lag_follows_a_slowly_drifting_clock(rate):
    stream = Stream(rate=rate)
    stream.settle()
    for _ in range(int(3600 / PERIOD_S)):
        age_s = stream.send()
    assert age_s == pytest.approx(0.0, abs=0.01)
    assert stream.send(1.0) == pytest.approx(1.0, abs=0.01)


def test_late_frames_raise_an_alarm_and_keep_their_true_age(watched, failing):
    taker = watched(failing.url, stall_timeout_s=WAIT_S)
    until(lambda: taker.frames)
    failing.say("lag")
    assert "more than max_lag_s 2 late" in until(lambda: taker.now.alarm)
    assert (taker.now.state, taker.now.reconnects) == ("STREAMING", 0)
    assert (taker.now.frame_age_s or 0) >= 3.0
    failing.say("stream")
    until(lambda: taker.now.alarm is None)
    known = len(taker.frames)
    until(lambda: len(taker.frames) > known)


def test_late_frame_from_before_a_trigger_does_not_answer_it(watched, failing):
    taker = watched(failing.url, mode="triggered", stall_timeout_s=2.0, max_lag_s=WAIT_S)
    taker.until_state("STREAMING")
    failing.say("lag")
    until(lambda: (taker.now.frame_age_s or 0) > 2.9)
    taker.camera.trigger("serial-1")
    assert "no frame came within stall_timeout_s 2" in until(lambda: taker.lost)[0][1]
    assert taker.now.state == "STREAMING"
    failing.say("stream")
    taker.camera.trigger("serial-2")
    assert until(lambda: taker.frames)[0].subject.board == "serial-2"


@pytest.fixture
def busy():
    """Keep every core busy."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            one = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(one.kill)
        yield


def drawn_at(frame):
    """Time shown in the picture, by ``time.monotonic``."""
    picture = read_image(frame.image, frame.subject.key)
    assert picture.shape == (1080, 1920, 3)
    middles = picture[SQUARE // 2, SQUARE // 2 : BITS * SQUARE : SQUARE, 0]
    return sum(1 << bit for bit, level in enumerate(middles) if level > 127) / 1000


def came_at(frame):
    """Time given by the agent, by ``time.monotonic``."""
    return frame.subject.arrived_at.timestamp() - time.time() + time.monotonic()


def test_triggered_frame_shows_the_scene_after_the_trigger(watched, rtsp, busy):
    taker = watched(f"{rtsp}/drawn", mode="triggered", stall_timeout_s=WAIT_S, max_lag_s=WAIT_S)
    process = taker.streaming()
    taker.camera.trigger()
    first = until(lambda: taker.frames)[0]
    delay_s = came_at(first) - drawn_at(first)  # of this camera, when nothing holds it up
    os.kill(process, signal.SIGSTOP)
    stopped_at = time.monotonic()
    until(lambda: time.monotonic() > stopped_at + BACKLOG_S)
    board_placed_at = time.monotonic()
    until(lambda: time.monotonic() > board_placed_at + delay_s + SLACK_S)
    taker.camera.trigger()
    os.kill(process, signal.SIGCONT)
    until(lambda: len(taker.frames) > 1)
    second = taker.frames[1]
    assert drawn_at(second) >= board_placed_at
    assert came_at(second) - drawn_at(second) <= delay_s + SLACK_S
