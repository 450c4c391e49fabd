"""Write-ahead log of a line's database: checkpoints when no commit waits.

Guarantees: a checkpoint waits for no reader, so no reader delays a commit. Checkpoints are retried at quiet moments,
and on a busy line once the log is large. A reader that keeps LOG_ALARM_BYTES in the log raises an alarm, logged once,
and once more after the checkpoint that empties the log.

SQLite cannot checkpoint commits that are younger than an open transaction: a program that leaves a query open makes the
log grow. For the writer's thread only.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from agent.records.database import JOURNAL_LIMIT_BYTES

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

log = logging.getLogger(__name__)

LOG_ALARM_BYTES = 128 * 1024 * 1024
LOOK_AGAIN_S = 5.0  # between two tries on a busy line
MIB = 1024 * 1024


class WriteAheadLog:
    """``alarm``, for any thread: why the log grows; None: no alarm."""

    def __init__(self, path: Path) -> None:
        self.alarm: str | None = None
        self._path = path
        self._file = path.with_name(f"{path.name}-wal")
        self._is_empty = True
        self._look_again_s = 0.0
        self._failure: str | None = None

    def committed(self, connection: sqlite3.Connection) -> None:
        self._is_empty = False
        if self._size_bytes() > JOURNAL_LIMIT_BYTES and time.monotonic() >= self._look_again_s:
            self.fold_in(connection)

    def fold_in(self, connection: sqlite3.Connection) -> None:
        """Checkpoint, as far as readers allow. Errors are logged, not raised."""
        if self._is_empty:
            return
        try:
            kept_bytes = fold_in(connection)
        except Exception as error:  # noqa: BLE001  # the boundary of the writer's thread
            is_news, self._failure = self._failure != str(error), str(error)
            if is_news:
                log.warning("results_checkpoint_failed file=%s reason=%s", self._path, self._failure)
            return
        self._failure = None
        self._is_empty = kept_bytes is None
        self._look_again_s = time.monotonic() + LOOK_AGAIN_S
        self._check(kept_bytes or 0)

    def _check(self, kept_bytes: int) -> None:
        was_alarm, self.alarm = self.alarm, None
        if kept_bytes > LOG_ALARM_BYTES:
            self.alarm = (
                f"their log {self._file} has grown to {self._size_bytes() // MIB} MiB, because a program keeps reading "
                f"them: end it (as root `fuser -v {self._path}` names it)"
            )
        if self.alarm and not was_alarm:
            log.error("results_log_grows log_bytes=%d: %s", self._size_bytes(), self.alarm)
        elif was_alarm and not self.alarm:
            log.warning("results_log_folded_in file=%s log_bytes=%d", self._file, self._size_bytes())

    def _size_bytes(self) -> int:
        try:
            return self._file.stat().st_size
        except OSError:
            return 0


def fold_in(connection: sqlite3.Connection) -> int | None:
    """Checkpoint without waiting. Returns bytes that readers keep in the log, 0 if readers only block its truncation,
    None for an empty log. Raises sqlite3.Error from the disk."""
    (busy_timeout_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        is_busy, pages, folded_in = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {busy_timeout_ms}")
    if not is_busy:
        return None
    is_known = pages >= 0  # -1 while another program makes a checkpoint
    return int(page_bytes * (pages - folded_in if is_known else 1))
