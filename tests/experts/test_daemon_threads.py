"""Threads that do what they are given, and never keep a process alive."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from experts.daemon_threads import DaemonThreads

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def test_results_and_errors_come_through_their_futures():
    threads = DaemonThreads(2, "test")
    futures = [threads.submit(divmod, number, 3) for number in range(20)]
    broken = threads.submit(divmod, 1, 0)
    named = threads.submit(int, "ff", base=16)
    assert [future.result(PATIENCE_S) for future in futures] == [divmod(number, 3) for number in range(20)]
    assert isinstance(broken.exception(PATIENCE_S), ZeroDivisionError)
    assert named.result(PATIENCE_S) == 255
    assert threads.stop(PATIENCE_S)


def test_stop_finishes_submitted_tasks_and_refuses_new_ones():
    threads = DaemonThreads(1, "test")
    may_go = threading.Event()
    futures = [threads.submit(may_go.wait), *(threads.submit(str, number) for number in range(5))]
    cancelled = threads.submit(str, 5)
    assert cancelled.cancel()
    assert not threads.stop(0.0)
    with pytest.raises(RuntimeError, match="stopped"):
        threads.submit(str, 1)
    may_go.set()
    assert threads.stop(PATIENCE_S)
    assert [future.result(0) for future in futures[1:]] == ["0", "1", "2", "3", "4"]
    assert cancelled.cancelled()


def test_process_ends_though_a_daemon_thread_hangs():
    script = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from experts.daemon_threads import DaemonThreads
entered, threads = threading.Event(), DaemonThreads(1, "test")
threads.submit(lambda: (entered.set(), threading.Event().wait()))
entered.wait()
print("ended", threads.stop(0.0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended False\n"
