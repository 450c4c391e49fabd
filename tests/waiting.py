"""Waits for what other threads and processes do."""

import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 90.0


def until(is_so, otherwise=str):
    """Poll until the answer is true; the answer. ``otherwise``: what is said of one that never is."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline_s, otherwise() or is_so
        time.sleep(0.002)
    return found


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def settled(store):
    """The store once nothing is pending; fails at once where it cannot commit."""

    def is_settled():
        statistics = store.statistics()
        assert statistics.alarm is None
        return statistics.pending == 0

    until(is_settled)
    return store
