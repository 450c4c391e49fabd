"""The one writer of a line's results and board verdicts, in SQLite.

Guarantees: a row is on the disk before its callback runs, and pending until it has run; rows have gap-free sequence
numbers in the order of commit; a key is stored once, whoever sends it again; a disk that is full or a file that is
locked loses nothing: the rows wait, and are tried again until they are in; so they are whatever else fails, and the
alarm says what. Where the file is moved or deleted while it is written, a new one is begun, and told: no row goes
where nobody will look for it.
Why one writer thread: commits are synced to the disk, so that many rows share one (group commit).
"""

from __future__ import annotations

import errno
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from agent.records.database import BUSY_TIMEOUT_S, open_for_writing, utc_text
from agent.records.result_reader import ResultReader
from agent.records.results import Recorded, Result, StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sqlite_utils import Database

    from agent.records.boards import BoardVerdict

log = logging.getLogger(__name__)

GROUP_ROWS = 200
GROUP_WAIT_S = 0.01  # how long a first row waits for others to share its sync
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 5.0
IDLE_CHECKPOINT_S = 5.0
GIVE_UP_S = 1.5
COLUMNS = (
    "key line board board_type component ref image verdict label score reason experts detail arrived_at finished_at "
    "seconds config_sha256"
)
INSERT_RESULT = f"""
    INSERT INTO results ({COLUMNS.replace(" ", ", ")}) VALUES (:{COLUMNS.replace(" ", ", :")}) RETURNING seq
"""
KNOWN_RESULT = "SELECT seq FROM results WHERE key = :key"
INSERT_BOARD = """
    INSERT INTO boards (serial, board_type, verdict, opened_at, closed_at, missing, counts)
    VALUES (:serial, :board_type, :verdict, :opened_at, :closed_at, :missing, :counts)
    ON CONFLICT (serial, board_type, opened_at) DO UPDATE
    SET verdict = excluded.verdict, closed_at = excluded.closed_at, missing = excluded.missing,
        counts = excluded.counts, revisions = revisions + 1
    RETURNING seq
"""
KNOWN_BOARD = """
    SELECT seq FROM boards WHERE serial = :serial AND board_type = :board_type AND opened_at = :opened_at
    AND verdict = :verdict AND missing = :missing AND counts = :counts
"""

OnRecorded: TypeAlias = "Callable[[Recorded], None]"


@dataclass(frozen=True, slots=True)
class _Pending:
    """One row to write: ``known`` asks for the number of the row that is there already, ``insert`` returns its own."""

    known: str
    insert: str
    values: Mapping[str, object]
    on_committed: OnRecorded | None

    def write(self, database: Database) -> Recorded:
        """Ask first: an insert that meets its key would use up a sequence number."""
        known = database.execute(self.known, dict(self.values)).fetchall()
        if known:
            return Recorded(known[0][0], is_new=False)
        return Recorded(database.execute(self.insert, dict(self.values)).fetchall()[0][0], is_new=True)


class ResultStore(ResultReader):
    """The one writer of a line's results. ``record`` never blocks; committing is its own thread's work."""

    def __init__(self, path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        super().__init__(path)
        self._busy_timeout_s = busy_timeout_s
        self._database = open_for_writing(path, busy_timeout_s)
        self._file = _file_at(path)
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._abandoned = threading.Event()
        self._pending = 0
        self._committed = 0
        self._duplicates = 0
        self._failed_commits = 0
        self._alarm: str | None = None
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def record(self, result: Result, on_committed: OnRecorded | None = None) -> None:
        """Store a result; ``on_committed`` is called by the writer's thread once it is on the disk.

        A key that is there already is left as it is and reported (``is_new`` False). Raises TypeError or ValueError
        for what no row can hold: a detail that is no JSON, a time without zone, text that is not Unicode.
        """
        self._put(_Pending(KNOWN_RESULT, INSERT_RESULT, _result_values(result), on_committed))

    def record_board(self, board: BoardVerdict, on_committed: OnRecorded | None = None) -> None:
        """Store a board's verdict, or replace that of the same run (serial, type, ``opened_at``).

        ``is_new`` is False where exactly this verdict was stored before.
        """
        self._put(_Pending(KNOWN_BOARD, INSERT_BOARD, _board_values(board), on_committed))

    def statistics(self) -> StoreStatistics:
        """A snapshot of the counters."""
        with self._lock:
            return StoreStatistics(self._pending, self._committed, self._duplicates, self._failed_commits, self._alarm)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Commit what is waiting, then stop. False if that took longer than ``timeout_s``: the rest is given up.

        A commit that is under way then is waited for GIVE_UP_S more; on a disk that hangs it is left behind.
        What callbacks record meanwhile is committed too; from anybody else it is a RuntimeError.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandoned.set()
            self._thread.join(GIVE_UP_S)
        return self.statistics().pending == 0

    def _put(self, pending: _Pending) -> None:
        for value in pending.values.values():
            if isinstance(value, str):
                value.encode()  # here, in the caller's thread, and not for every other row of a group
        with self._lock:
            if self._is_closed and threading.current_thread() is not self._thread:
                raise RuntimeError("the result store is closed")
            self._pending += 1
            self._queue.put(pending)

    def _run(self) -> None:
        has_log = is_closing = False
        try:
            while not (is_closing and self._queue.empty()) and not self._abandoned.is_set():
                group, is_last = self._next_group()
                is_closing = is_closing or is_last
                if group:
                    self._commit(group)
                    has_log = True
                elif has_log and not is_closing:
                    self._checkpoint()
                    has_log = False
        finally:
            self._database.close()

    def _next_group(self) -> tuple[list[_Pending], bool]:
        """Up to GROUP_ROWS records, waiting GROUP_WAIT_S after the first; and whether the store is closing."""
        group: list[_Pending] = []
        deadline = time.monotonic() + IDLE_CHECKPOINT_S
        while len(group) < GROUP_ROWS:
            try:
                pending = self._queue.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                return group, False
            if pending is None:
                return group, True
            if not group:
                deadline = time.monotonic() + GROUP_WAIT_S
            group.append(pending)
        return group, False

    def _commit(self, group: list[_Pending]) -> None:
        """Commit until it succeeds, or until close() gives up; then, and only then, tell the callers."""
        wait_s = FIRST_RETRY_S
        while not self._abandoned.is_set():
            try:
                if self._file is None or _file_at(self.path) != self._file:
                    self._begin_anew()
                with self._database.atomic():
                    recorded = [pending.write(self._database) for pending in group]
            except Exception as error:  # noqa: BLE001  # the boundary of the writer's thread: told as an alarm
                self._raise_alarm(error, len(group))
                self._abandoned.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)
                continue
            self._settle(group, recorded)
            return

    def _begin_anew(self) -> None:
        """The file was moved or deleted, or another took its place.

        Its last rows may be in its log, which lies under the name of the new one's: they are written to it first.
        """
        if self._file is not None:
            self._checkpoint()
        self._file = None
        self._database.close()
        if not self.path.parent.is_dir():  # a disk that is gone: nothing takes its place
            raise FileNotFoundError(errno.ENOENT, "the folder of the results is gone", str(self.path.parent))
        self._database = open_for_writing(self.path, self._busy_timeout_s)
        self._file = _file_at(self.path)
        log.error(
            "results_file_gone file=%s: it was moved, deleted or replaced while the agent writes it; the agent goes on "
            "with the file that is there, or a new one; earlier results are where it was moved to",
            self.path,
        )

    def _settle(self, group: list[_Pending], recorded: list[Recorded]) -> None:
        with self._lock:
            self._committed += sum(one.is_new for one in recorded)
            self._duplicates += sum(not one.is_new for one in recorded)
            ended, self._alarm = self._alarm, None
        if ended:
            log.warning("results_committed_again rows=%d", len(group))
        for pending, one in zip(group, recorded, strict=True):
            if pending.on_committed is not None:
                _call(pending.on_committed, one)
            with self._lock:
                self._pending -= 1

    def _raise_alarm(self, error: Exception, rows: int) -> None:
        reason = str(error) or type(error).__name__
        with self._lock:
            is_news = self._alarm != reason
            self._alarm = reason
            self._failed_commits += 1
        if is_news:
            log.error("results_not_committed rows=%d file=%s reason=%s: kept and retried", rows, self.path, reason)

    def _checkpoint(self) -> None:
        try:
            self._database.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except Exception as error:  # noqa: BLE001  # the boundary of the writer's thread
            log.warning("results_checkpoint_failed file=%s reason=%s", self.path, error)


def _file_at(path: Path) -> tuple[int, int] | None:
    """Which file lies there: its device and inode; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _call(on_committed: OnRecorded, recorded: Recorded) -> None:
    try:
        on_committed(recorded)
    except Exception:  # the boundary of the writer's thread: one caller's mistake must not stop all others' rows
        log.exception("result_callback_failed seq=%d", recorded.seq)


def _result_values(result: Result) -> dict[str, object]:
    return {
        "key": result.key,
        "line": result.line,
        "board": result.board,
        "board_type": result.board_type,
        "component": result.component,
        "ref": result.ref,
        "image": result.image,
        "verdict": str(result.verdict),
        "label": result.label,
        "score": result.score,
        "reason": result.reason,
        "experts": json.dumps(result.experts),
        "detail": json.dumps(dict(result.detail)),
        "arrived_at": utc_text(result.arrived_at),
        "finished_at": utc_text(result.finished_at),
        "seconds": result.seconds,
        "config_sha256": result.config_sha256,
    }


def _board_values(board: BoardVerdict) -> dict[str, object]:
    return {
        "serial": board.serial,
        "board_type": board.board_type,
        "verdict": str(board.verdict),
        "opened_at": utc_text(board.opened_at),
        "closed_at": utc_text(board.closed_at),
        "missing": json.dumps(dict(board.missing), sort_keys=True),
        "counts": json.dumps(dict(board.counts), sort_keys=True),
    }
