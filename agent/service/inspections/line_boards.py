"""Boards of a served line: decides and stores their verdicts. Names serials that people read as one.

Guarantees: verdicts reach the store in the order of decision, so a late NG is never overwritten; a verdict that the
store refused is retried before the next; no step of the wall clock closes a board.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from agent.faults.errors import OrderRefused, Reason
from agent.records.boards import BoardLedger, BoardManifest, Inspection, Rework
from agent.records.station.alarms import Alarm
from agent.records.station.reworks import last_run, latest_reworks, write_rework

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from sqlite_utils import Database

    from agent.line_file.boards import BoardSection, LayoutSections
    from agent.records.boards import BoardRun, BoardVerdict, LedgerStatistics
    from agent.records.result_writer import Recorded, ResultStore
    from agent.records.verdict import Result

log = logging.getLogger(__name__)


def wall_clock() -> datetime:
    return datetime.now(UTC)


class LineBoards:
    """Counts results on boards, records closed boards. For any thread. ``clock``: for ages; ``wall``: for dates."""

    def __init__(
        self,
        boards: Mapping[str, BoardSection],
        store: ResultStore,
        layouts: Mapping[str, LayoutSections] = MappingProxyType({}),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = wall_clock,
    ) -> None:
        self._ledger = BoardLedger(_manifests(boards, layouts))
        self._store = store
        self._clock = clock
        self._wall = wall
        self._guard = threading.Lock()  # held from the decision of a verdict until the store has it
        self._warned: set[str] = set()  # of serials, in the log
        self._decided: deque[BoardVerdict] = deque()  # not yet taken by the store
        self._notify: Callable[[BoardVerdict, Recorded], None] = lambda *_: None

    def change(
        self, boards: Mapping[str, BoardSection], layouts: Mapping[str, LayoutSections] = MappingProxyType({})
    ) -> None:
        """Set board types; open boards keep theirs."""
        manifests = _manifests(boards, layouts)
        with self._guard:
            self._ledger.change(manifests)

    def when_stored(self, notify: Callable[[BoardVerdict, Recorded], None]) -> None:
        """Set ``notify``, called on the store's thread for every new board verdict."""
        self._notify = notify

    def take_up(self) -> None:
        """Reopen boards of the last run; closed ones stay as stored."""
        if not self._ledger.longest_timeout:  # no board types
            return

        def recorded_since(since: datetime) -> Iterable[BoardVerdict]:
            return self._store.boards(since)

        with self._guard:
            newest_first, reworks = self._store.newest_first(), latest_reworks(self._store.path)
            self._record(self._ledger.replay(newest_first, recorded_since, self._clock(), self._wall(), reworks))

    def count(self, result: Result) -> None:
        """Count a stored result on its board, if the board is open or of a configured type."""
        if not result.subject.is_on_board:
            return
        image_sha256 = result.image_sha256 if result.subject.box is None else None
        inspection = Inspection(result.subject, result.verdict, result.finished_at, image_sha256=image_sha256)
        with self._guard:
            now_s = self._clock()
            if self._ledger.counts(inspection, now_s):
                verdict = self._ledger.add(inspection, now_s)
                self._record(() if verdict is None else (verdict,))

    def rework(self, serial: str, board_type: str, who: str, reason: str | None) -> Rework:
        """End the wait for late images of a closed board: its next image opens a new run. Twice is once.

        Blocks until the commit. Raises OrderRefused, NOT_NOW for an open board.
        """
        now = self._wall()

        def write(database: Database) -> Rework | OrderRefused:
            with self._guard:  # results committed with this rework are not counted yet, and are of the run before
                run = self._ledger.run_of(serial, board_type)
            if run is not None and run.closed is None:
                waiting = ", ".join(f"{count} of {component}" for component, count in run.missing.items())
                return OrderRefused(Reason.NOT_NOW, f"board {serial!r} is open, and waits for {waiting}", 5.0)
            opened_at = last_run(database, serial, board_type) if run is None else run.opened_at
            if opened_at is None:
                return OrderRefused(Reason.NOT_FOUND, f"no board {serial!r} of type {board_type!r}", field="serial")
            return write_rework(database, Rework(serial, board_type, opened_at, 0, who, reason, now))

        return self._store.write_now(write, self._reworked)

    def _reworked(self, rework: Rework) -> None:
        """On the store's thread: behind the results before it, ahead of those after it."""
        with self._guard:
            self._ledger.rework(rework.serial, rework.board_type, rework.opened_at)
        log.info("board_reworked board=%s who=%s reason=%r", rework.serial, rework.who, rework.reason)

    def expire(self) -> None:
        with self._guard:
            self._record(self._ledger.expire(self._clock(), self._wall()))

    def alarms(self) -> Iterator[Alarm]:
        """Alarms of serials that people read as one, while the line knows their boards."""
        with self._guard:
            alike = self._ledger.read_alike()
        messages = {
            f"serials {' and '.join(map(ascii, serials))} read alike, and are two boards: each waits for the other's "
            "parts and becomes UNKNOWN - write a serial in one way at all sources"
            for serials in alike
        }
        for message in sorted(messages - self._warned):
            log.warning("boards_read_alike %s", message)
        self._warned = messages
        for message in sorted(messages):
            yield Alarm("boards/serials", message)

    def runs(self, serial: str) -> tuple[BoardRun, ...]:
        """Boards of this serial that wait for images, or closed recently."""
        with self._guard:
            return self._ledger.runs(serial)

    def open_runs(self) -> tuple[BoardRun, ...]:
        with self._guard:
            return self._ledger.open_runs()

    def statistics(self) -> LedgerStatistics:
        with self._guard:
            return self._ledger.statistics()

    def _record(self, verdicts: Iterable[BoardVerdict]) -> None:
        """Call under the guard: another thread's verdict of the same board must not interleave."""
        self._decided.extend(verdicts)
        while self._decided:
            verdict = self._decided[0]
            self._store.record_board(verdict, partial(self._stored, verdict))
            self._decided.popleft()
            log.info(
                "board_judged board=%s verdict=%s missing=%s reason=%s",
                verdict.serial, verdict.verdict, dict(verdict.missing), verdict.reason,
            )  # fmt: skip

    def _stored(self, verdict: BoardVerdict, recorded: Recorded) -> None:
        if recorded.is_new:
            self._notify(verdict, recorded)


def _manifests(boards: Mapping[str, BoardSection], layouts: Mapping[str, LayoutSections]) -> dict[str, BoardManifest]:
    refs = {name: layouts[name].refs if name in layouts else board.refs for name, board in boards.items()}
    return {
        name: BoardManifest(board.quantities, timedelta(seconds=board.patience_s), refs[name])
        for name, board in boards.items()
    }
