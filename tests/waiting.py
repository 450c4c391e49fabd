"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.records.result_writer import ResultStore

PATIENCE_S = 60.0


def until(is_so: Callable[[], object], what: str = "it did not come about") -> None:
    """Poll, PATIENCE_S at most."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.002)


def settled(store: ResultStore) -> ResultStore:
    """The store once nothing is pending; fails at once where it cannot commit."""

    def is_settled() -> bool:
        statistics = store.statistics()
        assert statistics.alarm is None
        return statistics.pending == 0

    until(is_settled)
    return store
