"""How many threads a process has that are not Python's: the teams of operators, and what other libraries keep."""

import os
import sys
import threading
import time

import pytest

SETTLING_S = 0.1
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the system's threads in /proc")


def native_threads() -> int:
    """Once their number stands still: a team that ended with its thread takes a moment to leave."""
    last = _now()
    while True:
        time.sleep(SETTLING_S)
        found = _now()
        if found == last:
            return found
        last = found


def _now() -> int:
    own = {thread.native_id for thread in threading.enumerate()}
    return sum(int(task) not in own for task in os.listdir("/proc/self/task"))
