"""How many threads a process has that are not Python's: the teams of operators, and what other libraries keep."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from agent.runtime.machine.threads import give_way

SETTLING_S = 0.1
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the system's threads in /proc")
on_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def native_threads():
    """Once their number stands still: a team that ended with its thread takes a moment to leave."""
    last, found = -1, len(_theirs())
    while found != last:
        time.sleep(SETTLING_S)
        last, found = found, len(_theirs())
    return found


def cores_by_thread():
    """By the system's number, the cores that each of them may run on, once their number stands still."""
    native_threads()
    found = {}
    for task in _theirs():
        with suppress(ProcessLookupError):
            found[task] = os.sched_getaffinity(task)
    return found


def _theirs():
    own = {thread.native_id for thread in threading.enumerate()}
    return [task for task in map(int, os.listdir("/proc/self/task")) if task not in own]


def nice_value():
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _is_given_way():
    """True if a thread may lower its priority. A sandbox may forbid it."""

    def look():
        before = nice_value()
        give_way()
        return nice_value() != before

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(look).result()


gives_way_here = pytest.mark.skipif(not _is_given_way(), reason="no thread can give way to all others here")
