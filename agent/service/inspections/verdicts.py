"""Verdicts: passes them to the store, to their boards, and to subscribers.

Guarantees: subscribers are called in the order of the store, after a row is on the disk.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.records.boards import BoardVerdict
    from agent.records.result_writer import Recorded, ResultStore
    from agent.records.verdict import Result
    from agent.service.inspections.line_boards import LineBoards

    Listener: TypeAlias = Callable[["Result | BoardVerdict", Recorded], None]

log = logging.getLogger(__name__)


class Verdicts:
    """For any thread; callbacks run on the store's thread."""

    def __init__(self, store: ResultStore, boards: LineBoards) -> None:
        self._store = store
        self._boards = boards
        self._guard = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        boards.when_stored(self._notify)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each newly stored result and board; returns a function to unsubscribe."""
        with self._guard:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._guard:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return end

    def commit_result(self, result: Result, stored: Callable[[Recorded], None], *, is_urgent: bool = False) -> None:
        """Store a result; ``stored`` is called after the commit."""
        self._store.record(
            result, lambda recorded: self._result_committed(result, stored, recorded), is_urgent=is_urgent
        )

    def _result_committed(self, result: Result, stored: Callable[[Recorded], None], recorded: Recorded) -> None:
        try:
            if recorded.is_new:
                self._notify(result, recorded)
                self._boards.count(result)
        finally:
            stored(recorded)

    def _notify(self, stored: Result | BoardVerdict, recorded: Recorded) -> None:
        for listener in self._listeners:
            try:
                listener(stored, recorded)
            except Exception:  # an error of one listener must not affect others
                log.exception("listener_failed seq=%d", recorded.seq)
