"""Children as their parents see them: they end with them whatever happens, are reaped, and say why they ended."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from experts.children.bounded import BoundedProcess, BoundedWork, ResourceLimits
from experts.children.child import BROKEN, Child, parent
from experts.children.messages import PIECE_BYTES, packed, unpacked
from experts.errors import LoadError, ModelUnsupported, WeightsCorrupt, WeightsRefused
from tests.heaps import count_heaps
from tests.waiting import is_alive, until

WAIT_S = 60.0


# -- what a child does: this module is one, too --


def echo(channel):
    while (message := channel.receive()) is not None:
        channel.send(message)


def hold_the_interpreter(channel):
    channel.send(packed(os.getpid()))
    re.match("(a*)*b", "a" * 64)


def fork(channel):
    if os.fork():
        os.wait()
    channel.send(packed(os.getpid()))
    threading.Event().wait()


def break_down(_):
    {}["of this name"]


def tell_signals(channel):
    channel.send(packed([signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)]))


def tell_path(channel):
    channel.send(packed([sys.path, dict(os.environ)]))


def say_heaps(channel):
    channel.send(packed(count_heaps()))


def fail(kind):
    if kind == "memory":
        return len(bytearray(10**10))
    if kind == "ours":
        raise ModelUnsupported("there", "field", "is new")
    raise {"disk": OSError(28, "no space"), "unforeseen": KeyError("x")}[kind]


def turn_for_ever():
    while True:
        pass


def wait_for_ever():
    threading.Event().wait()


def done_by():
    return os.getppid()


def bounded(run, processor_s=60, clock_s=60):
    limits = ResourceLimits(10**9, 10**6, processor_s, clock_s)
    return BoundedWork(run, limits, "is too large", lambda code: f"ended by {-code}", "cannot be read: ")


def child(work, **given):
    return Child(__name__, work.__name__, **given)


def received(one):
    return unpacked(one.receive())[0]


# -- the tests --


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 5 * PIECE_BYTES + 3])
def test_messages_arrive_whole_and_in_order(size):
    messages = [packed(number, b"x" * size, b"") for number in range(3)]
    with closing(child(echo)) as one:
        sender = threading.Thread(target=one.send, args=messages)
        sender.start()
        assert [one.receive() for _ in messages] == messages
        sender.join()
        one.finish()
        assert (one.receive(), one.wait(WAIT_S)) == (None, 0)


def test_killed_child_is_reaped_at_once_and_its_sent_messages_are_received():
    ended = queue.SimpleQueue()
    with closing(child(hold_the_interpreter, on_end=ended.put)) as one:
        assert one.is_readable(WAIT_S)
        one.kill()
        assert received(one) == one.pid
        assert ended.get(timeout=WAIT_S) is one
        assert one.code == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(one.pid, 0)
        one.kill()
        with pytest.raises(OSError, match="pipe"):
            one.send(b"")


PARENT = """
import sys
from tests.experts.children import test_child
one = test_child.child(getattr(test_child, sys.argv[1]))
print(test_child.received(one), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("work", [hold_the_interpreter, fork])
def test_child_that_hangs_in_c_and_its_fork_end_with_a_killed_parent(work):
    command = [sys.executable, "-c", PARENT, work.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ours:
        pid = int(ours.stdout.readline())
        assert is_alive(pid)
        ours.kill()
    until(lambda: not is_alive(pid))


def test_fork_ends_with_a_killed_child():
    with closing(child(fork)) as one:
        pid = received(one)
        os.kill(one.pid, signal.SIGKILL)
        until(lambda: not is_alive(pid))


def test_unforeseen_error_is_the_last_message():
    with closing(child(break_down, is_quiet=True)) as one:
        assert received(one) == [BROKEN, "KeyError: 'of this name'"]
        assert one.wait(WAIT_S) == 1


def test_child_leaves_the_signals_of_a_stop_to_its_parent():
    with closing(child(tell_signals)) as one:
        assert received(one) == [True, True]


def test_child_imports_from_its_parents_folder_and_a_bare_one_has_no_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with closing(child(tell_path, is_bare=True, environment={"NAME": "given"})) as one:
        path, environment = received(one)
    assert path[0] == str(Path(__file__).parents[3])
    assert str(tmp_path) not in path
    assert environment.keys() - {"LC_CTYPE", "MALLOC_ARENA_MAX", "ORT_DISABLE_TELEMETRY"} == {"NAME"}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc only")
def test_many_threads_of_a_child_share_two_heaps():
    with closing(child(say_heaps)) as one:
        assert received(one) == 2


@pytest.fixture
def process():
    with closing(BoundedProcess()) as one:
        yield one


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("memory", WeightsRefused, "is too large"),
        ("ours", ModelUnsupported, "config.json: field: is new"),
        ("disk", LoadError, "no space"),
        ("unforeseen", WeightsCorrupt, "cannot be read: KeyError: 'x'"),
    ],
)
def test_error_of_bounded_work_is_raised_in_the_caller(process, kind, error, text):
    with pytest.raises(error, match=rf"expert a/b: file: .*{text}"):
        process.result(bounded(partial(fail, kind)), "a/b", "file: ")


def test_work_beyond_its_time_is_ended_and_the_process_is_reused(process):
    first = process.result(bounded(done_by), "a/b")
    for work, number in ((bounded(turn_for_ever, processor_s=1), 9), (bounded(wait_for_ever, clock_s=1), 14)):
        with pytest.raises(WeightsRefused, match=f"ended by {number}"):
            process.result(work, "a/b")
    assert process.result(bounded(done_by), "a/b") == first


def test_killed_bounded_process_is_started_again(process):
    os.kill(process.result(bounded(done_by), "a/b"), signal.SIGKILL)
    assert is_alive(process.result(bounded(done_by), "a/b"))


if __name__ == "__main__":
    globals()[sys.argv[1]](parent())
