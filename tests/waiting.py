"""Waits for what other threads and processes do."""

import time

PATIENCE_S = 90.0


def until(is_so, otherwise=str):
    """Poll until the answer is true; the answer. ``otherwise``: what is said of one that never is."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline_s, otherwise() or is_so
        time.sleep(0.002)
    return found


def settled(store):
    """The store once nothing is pending; fails at once where it cannot commit."""

    def is_settled():
        statistics = store.statistics()
        assert statistics.alarm is None
        return statistics.pending == 0

    until(is_settled)
    return store
