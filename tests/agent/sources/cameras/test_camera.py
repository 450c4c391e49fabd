"""A camera as the agent sees it: real processes, real sockets, and cameras that misbehave on command."""

import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from agent.faults.errors import OrderRefused, Reason
from agent.sources.cameras import wire
from agent.sources.cameras.process import CameraProcess, Received, connection_of, probe
from experts.images import read_image
from tests.agent.sources.cameras.stand_ins import WAIT_S, section
from tests.waiting import is_alive, until

STALL_S = 1.0  # as short as a busy machine lets a camera be


def brightness(frame):
    """Number of a stand-in's picture: each is brighter than the one before."""
    return int(read_image(frame.image, frame.subject.key)[0, 0, 0])


def children():
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if status.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(status.parent.name)
    return found


def refused(taker):
    """Reason, pause and text of a refused trigger."""
    with pytest.raises(OrderRefused) as told:
        taker.camera.trigger()
    return told.value.reason, told.value.retry_s, str(told.value)


def triggered(watched, failing, *, stalls=False, **given):
    """A triggered camera that streams, or has begun to stall."""
    taker = watched(failing.url, mode="triggered", **given)
    taker.until_state("STREAMING")
    if stalls:
        failing.say("stall")
        until(lambda: (taker.now.frame_age_s or 0) > 0.2)
    return taker


class TestFreeRun:
    def test_frames_without_room_are_dropped_and_counted_and_the_latest_is_taken(self, watched, failing):
        taker = watched(failing.url, has_room=False)
        until(lambda: taker.now.dropped >= 20)
        after_twenty = datetime.now(UTC)
        until(lambda: taker.now.dropped >= 40)
        assert (taker.now.received, taker.now.state) == (0, "STREAMING")
        taker.is_free = True
        until(lambda: taker.frames)
        assert taker.frames[0].subject.arrived_at > after_twenty  # none of those that had waited for longest

    def test_free_running_camera_refuses_triggers(self, watched, failing):
        *why, text = refused(watched(failing.url))
        assert (why, "mode: triggered" in text) == ([Reason.NOT_NOW, None], True)


class TestTriggered:
    def test_each_trigger_gets_its_own_frame_from_after_it(self, watched, failing):
        taker = triggered(watched, failing, board_type="main")
        began = datetime.now(UTC) - timedelta(milliseconds=1)
        keys = [taker.camera.trigger("serial-1"), taker.camera.trigger("serial-2", "other"), taker.camera.trigger()]
        until(lambda: len(taker.frames) == 3)
        subjects = [frame.subject for frame in taker.frames]
        assert [subject.key for subject in subjects] == keys
        assert [subject.board[:8] for subject in subjects] == ["serial-1", "serial-2", f"top-{began:%Y}"]
        assert [subject.board_type for subject in subjects] == ["main", "other", "main"]
        assert len({brightness(frame) for frame in taker.frames}) == 3
        assert all(subject.arrived_at >= began for subject in subjects)
        assert (taker.now.received, taker.now.dropped, taker.now.lost, taker.now.waiting) == (3, 0, 0, 0)

    def test_trigger_is_not_answered_by_an_earlier_frame(self, watched, failing):
        taker = triggered(watched, failing, stalls=True, stall_timeout_s=WAIT_S)
        triggered_at = datetime.now(UTC)
        taker.camera.trigger()
        failing.say("stream")
        until(lambda: taker.frames)
        assert taker.frames[0].subject.arrived_at > triggered_at

    def test_no_trigger_is_dropped_when_the_queue_is_full(self, watched, failing):
        taker = triggered(watched, failing, queue=2, is_open=False)
        keys = [taker.camera.trigger(), taker.camera.trigger()]
        *why, text = refused(taker)
        assert (why, "2 triggers wait" in text) == ([Reason.QUEUE_FULL, 1.0], True)
        taker.door.set()
        until(lambda: taker.now.received == 2 and taker.now.waiting == 0)
        keys.append(taker.camera.trigger())
        until(lambda: len(taker.frames) == 3)
        assert [frame.subject.key for frame in taker.frames] == keys

    def test_interval_trigger_that_meets_a_full_queue_is_stored_as_lost(self, watched, failing):
        taker = watched(failing.url, mode="triggered", interval_s=0.05, queue=2)
        until(lambda: len(taker.frames) >= 3)
        taker.door.clear()
        until(lambda: taker.now.waiting == 2)
        time.sleep(0.3)
        taker.door.set()
        until(lambda: taker.lost)
        taker.camera.stop(WAIT_S)
        assert "2 triggers wait" in taker.lost[0][1]
        subjects = [frame.subject for frame in taker.frames] + [lost for lost, _ in taker.lost]
        ended = sorted(int(subject.key.rpartition("#")[2]) for subject in subjects)
        assert ended == list(range(1, len(ended) + 1))

    def test_lost_triggers_are_bounded_and_the_pause_raises_an_alarm(self, watched, failing, monkeypatch):
        monkeypatch.setattr("agent.sources.cameras.delivery.OVERFLOW_MAXIMUM", 3)
        taker = watched(failing.url, mode="triggered", interval_s=0.02, queue=1, is_open=False)
        until(lambda: "interval_s pauses: 3 lost triggers" in (taker.now.alarm or ""))
        taker.door.set()
        until(lambda: len(taker.lost) >= 3 and taker.now.alarm is None)

    def test_frame_that_cannot_be_delivered_is_lost_alone(self, watched, failing, monkeypatch, caplog):
        monkeypatch.setattr("agent.sources.cameras.delivery.FAILED_S", 0.01)
        taker = triggered(watched, failing, is_open=False)
        taker.faults = 3  # of the frame, then of its loss, then of the next frame
        keys = [taker.camera.trigger() for _ in range(4)]
        taker.door.set()
        until(lambda: taker.now.waiting == 0)
        assert [lost.key for lost, _ in taker.lost] == [keys[1]]
        assert taker.lost[0][1] == "camera top: its frame was not taken: no space"
        assert [frame.subject.key for frame in taker.frames] == keys[2:]
        assert (taker.now.received, taker.now.lost, taker.now.alarm) == (2, 2, None)
        assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1

    def test_triggers_of_a_stalled_camera_are_lost_with_the_reason(self, watched, failing):
        taker = triggered(watched, failing, stall_timeout_s=2.0)
        failing.say("stall")  # one picture may be on its way
        keys = [taker.camera.trigger(f"serial-{number}") for number in range(4)]
        until(lambda: len(taker.frames) + len(taker.lost) == 4)
        assert [frame.subject.key for frame in taker.frames] + [lost.key for lost, _ in taker.lost] == keys
        assert taker.lost[-1][0].board == "serial-3"
        assert "no frame came within stall_timeout_s 2 of the trigger" in taker.lost[-1][1]
        assert taker.now.lost == len(taker.lost) >= 3
        assert until(lambda: taker.now.waiting == 0)

    def test_trigger_waiting_when_the_camera_process_dies_is_answered_by_the_next(self, watched, failing):
        taker = triggered(watched, failing, stalls=True, stall_timeout_s=30.0)
        key = taker.camera.trigger()
        os.kill(taker.process, signal.SIGKILL)
        failing.say("stream")
        until(lambda: taker.frames)
        assert taker.frames[0].subject.key == key

    def test_trigger_waiting_when_the_agent_ends_is_stored_as_lost(self, watched, failing):
        taker = triggered(watched, failing, stalls=True, stall_timeout_s=30.0)
        key = taker.camera.trigger()
        assert taker.camera.stop(WAIT_S)
        assert [(lost.key, reason) for lost, reason in taker.lost] == [(key, "camera top: the agent ended")]
        assert refused(taker)[0] is Reason.STOPPING

    def test_trigger_of_a_camera_that_does_not_stream_is_refused_with_the_reason(self, watched, failing):
        failing.say("refuse")
        taker = watched(failing.url, mode="triggered")
        until(lambda: taker.now.alarm)
        *why, text = refused(taker)
        assert (why, "the camera refuses" in text) == ([Reason.NOT_NOW, 1.0], True)


class TestFaults:
    @pytest.mark.parametrize("word", ["stall", "hang"])
    def test_stalled_or_hanging_stream_is_killed_and_reconnected(self, watched, failing, word):
        taker = watched(failing.url, stall_timeout_s=STALL_S)
        before = taker.streaming()
        failing.say(word)
        assert "no frame within stall_timeout_s 1" in (taker.until_state("STALLED").alarm or "")
        until(lambda: not is_alive(before))
        failing.say("stream")
        assert taker.streaming() != before
        assert taker.now.reconnects >= 1
        taken = len(taker.frames)
        until(lambda: len(taker.frames) > taken)

    def test_shutdown_with_a_hanging_camera_takes_less_than_five_seconds(self, watched, failing):
        taker = watched(failing.url, stall_timeout_s=600.0)
        before = taker.streaming()
        failing.say("hang")
        until(lambda: (taker.now.frame_age_s or 0) > 0.3)
        assert not taker.camera.stop(0.0)
        assert taker.camera.stop(5.0)
        assert not is_alive(before)
        assert (taker.now.state, taker.process) == ("OFFLINE", None)

    def test_agent_without_a_free_descriptor_receives_frames(self, watched, failing):
        taker = watched(failing.url, has_room=False)
        before = taker.streaming()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with ExitStack() as ending:
            ending.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # what is open stays so
            taker.is_free = True
            until(lambda: taker.frames)
        assert taker.process == before

    def test_unforeseen_error_of_the_camera_process_becomes_the_alarm(self, watched, failing):
        failing.say("break")
        taker = watched(failing.url)
        until(lambda: taker.now.alarm == "KeyError: 'of this name'")

    @pytest.mark.parametrize("mode", ["free_run", "triggered"])
    def test_garbage_is_never_a_frame_and_not_taken_for_streaming(self, watched, failing, mode):
        taker = watched(failing.url, mode=mode, stall_timeout_s=STALL_S)
        taker.until_state("STREAMING")
        failing.say("garble")
        if mode == "triggered":
            taker.camera.trigger()
            until(lambda: len(taker.frames) + len(taker.lost) == 1)
        taker.until_state("STALLED")
        assert taker.now.broken > 0
        assert all(frame.image.startswith(b"\x89PNG") for frame in taker.frames)

    def test_password_of_a_camera_is_never_shown(self, watched, mjpeg, failing, caplog):
        failing.say("leak")
        leaking = watched(failing.url, user="line", password="s3cret")
        assert until(lambda: leaking.now.alarm) == "cannot go on with line:***@camera"
        caplog.set_level(logging.DEBUG)
        mjpeg.word = "lock"
        taker = watched(mjpeg.url, user="line", password="s3cret/word")
        process = taker.streaming()
        for name in ("cmdline", "environ"):
            assert b"s3cret" not in Path(f"/proc/{process}/{name}").read_bytes()
        mjpeg.word = "refuse"
        os.kill(process, signal.SIGKILL)
        until(lambda: "404" in (taker.now.alarm or ""))
        assert "s3cret" not in f"{caplog.text}{taker.now}{taker.camera._connection!r}"


def test_restarted_camera_processes_leave_no_descriptor_thread_or_process(failing):
    def once(end):
        heard = queue.SimpleQueue()
        failing.say("stream")
        process = CameraProcess(connection_of(section(failing.url), None), heard.put)
        for number in range(3):
            process.ask(wire.Take(number, since=0.0))
        while not isinstance(heard.get(timeout=WAIT_S), Received):
            continue
        failing.say(end)
        if end == "stream":
            process.close()
        elif end == "hang":
            process.kill()
        assert process.join(WAIT_S)

    def left():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), children()

    once("stream")
    before = left()
    for end in ("stream", "hang", "end", "die") * 2:
        once(end)
    assert left() == before


AGENT = """
import sys
from tests.agent.sources.cameras.stand_ins import Taker, section
taker = Taker(section(sys.argv[1], stall_timeout_s=600.0))
print(taker.streaming(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("word", ["stream", "hang"])
def test_camera_processes_end_with_a_killed_agent(failing, word):
    command = [sys.executable, "-c", AGENT, failing.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        process = int(agent.stdout.readline())
        assert is_alive(process)
        failing.say(word)
        agent.kill()
    until(lambda: not is_alive(process))


@pytest.mark.parametrize(
    ("word", "timeout_s", "reason"),
    [("stream", WAIT_S, "None"), ("hang", 1.0, "no frame within 1 s"), ("die", WAIT_S, "SIGSEGV")],
)
def test_probe_names_the_fault_of_a_camera(failing, word, timeout_s, reason):
    failing.say(word)
    assert reason in str(probe(section(failing.url), None, timeout_s))
