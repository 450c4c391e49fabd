"""Verdicts on their way out: into the store, onto their boards, and to subscribers.

Guarantees: all of them are told in the order of the store, after a row is on the disk.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.records.boards import BoardVerdict
    from agent.records.result_writer import ResultStore
    from agent.records.results import Recorded, Result
    from agent.service.inspections.line_boards import LineBoards

    Told: TypeAlias = Callable[["Result | BoardVerdict", Recorded], None]

log = logging.getLogger(__name__)


class Verdicts:
    """For any thread; what it calls runs on the store's thread."""

    def __init__(self, store: ResultStore, boards: LineBoards) -> None:
        self._store = store
        self._boards = boards
        self._guard = threading.Lock()
        self._told: tuple[Told, ...] = ()
        boards.when_stored(self._tell)

    def subscribe(self, told: Told) -> Callable[[], None]:
        """``told`` hears of everything that is stored from now on; call the result to unsubscribe."""
        with self._guard:
            self._told = (*self._told, told)

        def end() -> None:
            with self._guard:
                self._told = tuple(each for each in self._told if each is not told)

        return end

    def commit_result(self, result: Result, stored: Callable[[Recorded], None], *, is_urgent: bool = False) -> None:
        """Store a result; ``stored`` is called afterwards."""
        self._store.record(result, lambda recorded: self._stored(result, stored, recorded), is_urgent=is_urgent)

    def _stored(self, result: Result, stored: Callable[[Recorded], None], recorded: Recorded) -> None:
        try:
            if recorded.is_new:
                self._tell(result, recorded)
                self._boards.count(result)
        finally:
            stored(recorded)

    def _tell(self, stored: Result | BoardVerdict, recorded: Recorded) -> None:
        for told in self._told:
            try:
                told(stored, recorded)
            except Exception:  # one listener's mistake is not the others'
                log.exception("listener_failed seq=%d", recorded.seq)
