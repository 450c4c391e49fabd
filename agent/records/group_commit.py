"""Group commit: one writer thread of a line's database, many jobs per transaction.

Guarantees: a job's rows are on the disk before its callback runs; the job is pending until the callback has returned.
Jobs are written in the order of ``put``. A full disk, a locked file or any other error loses no job: the group is
retried with backoff, and an alarm names the reason. If the file is moved or deleted, a new file is created and logged,
so that no row is written to a deleted file.
Why one thread: each commit is synced, and many rows share one sync. An urgent job is committed at once, with all jobs
that are queued; other jobs wait GROUP_WAIT_S for more.
"""

from __future__ import annotations

import errno
import logging
import queue
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from agent.faults.backoff import Backoff
from agent.records.database import BUSY_TIMEOUT_S, begin_anew, damage_of, is_damage, open_for_writing
from agent.records.write_ahead_log import WriteAheadLog, fold_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlite_utils import Database

log = logging.getLogger(__name__)

Written = TypeVar("Written")

GROUP_JOBS = 200
GROUP_BYTES = 64 * 1024 * 1024  # of images: bounds the growth of the write-ahead log
GROUP_WAIT_S = 0.01
BACKOFF = Backoff(0.05, 5.0)
IDLE_CHECKPOINT_S = 5.0
GIVE_UP_S = 1.5


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Snapshot. ``alarm``: why commits fail now. ``log_alarm``: why the log grows; commits continue. ``damage_alarm``:
    path of a damaged file that was put aside since the start. None: no alarm."""

    pending: int
    committed: int
    duplicates: int
    failed_commits: int
    alarm: str | None
    log_alarm: str | None = None
    damage_alarm: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """``write`` runs once per try, inside a transaction; the callback gets the result of the last try."""

    write: Callable[[Database], Any]
    on_committed: Callable[[Any], None] | None
    size_bytes: int
    is_urgent: bool


class GroupCommitter:
    """Writer thread with a queue. ``put`` never blocks."""

    def __init__(self, path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._database, self._damage_alarm = _opened(path, busy_timeout_s)
        self._file = _file_at(path)
        self._log = WriteAheadLog(path)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._abandoned = threading.Event()
        self._pending = 0
        self._failed_commits = 0
        self._alarm: str | None = None
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def put(
        self,
        write: Callable[[Database], Written],
        on_committed: Callable[[Written], None] | None = None,
        *,
        size_bytes: int = 0,
        is_urgent: bool = False,
    ) -> None:
        """Queue ``write`` for a transaction; ``on_committed`` gets the result after the commit.

        Both run on the writer's thread. ``write`` may run several times; only the last run counts. Raises RuntimeError
        after ``close``, except inside callbacks.
        """
        with self._lock:
            if self._is_closed and threading.current_thread() is not self._thread:
                raise RuntimeError("the result store is closed")
            self._pending += 1
            self._queue.put(_Job(write, on_committed, size_bytes, is_urgent))

    def statistics(self) -> StoreStatistics:
        """Statistics without the counts of rows, which the store keeps."""
        with self._lock:
            return StoreStatistics(
                self._pending, 0, 0, self._failed_commits, self._alarm, self._log.alarm, self._damage_alarm
            )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Commit all queued jobs, and those of their callbacks, then stop. False after ``timeout_s``: the rest is lost.
        A commit under way has GIVE_UP_S more; on a hanging disk the thread is abandoned."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandoned.set()
            self._thread.join(GIVE_UP_S)
        return self.statistics().pending == 0

    def _run(self) -> None:
        is_closing = False
        try:
            while not (is_closing and self._queue.empty()) and not self._abandoned.is_set():
                group, is_last = self._next_group()
                is_closing = is_closing or is_last
                if group:
                    self._commit(group)
                    self._log.committed(self._database.conn)
                elif not is_closing:
                    self._log.fold_in(self._database.conn)
        finally:
            self._database.close()

    def _next_group(self) -> tuple[list[_Job], bool]:
        """Jobs of one commit, GROUP_JOBS and GROUP_BYTES at most; and True if the writer must end."""
        group: list[_Job] = []
        size_bytes = 0
        deadline = time.monotonic() + IDLE_CHECKPOINT_S
        while len(group) < GROUP_JOBS and size_bytes < GROUP_BYTES:
            try:
                job = self._queue.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                return group, False
            if job is None:
                return group, True
            if not group:
                deadline = time.monotonic() + GROUP_WAIT_S
            if job.is_urgent:
                deadline = 0.0  # together with the jobs already queued
            group.append(job)
            size_bytes += job.size_bytes
        return group, False

    def _commit(self, group: list[_Job]) -> None:
        """Retry until the commit succeeds or ``close`` gives up; then run the callbacks."""
        failures = 0
        while not self._abandoned.is_set():
            try:
                if self._file is None or _file_at(self.path) != self._file:
                    self._begin_anew()
                with self._database.atomic():
                    answers = [job.write(self._database) for job in group]
            except Exception as error:  # noqa: BLE001  # the boundary of the writer's thread: becomes an alarm
                if is_damage(error) and self._damage_alarm is None and self._leave_damaged(str(error)):
                    continue
                self._raise_alarm(error, len(group))
                failures += 1
                self._abandoned.wait(BACKOFF.pause_s(failures))
                continue
            self._settle(group, answers)
            return

    def _begin_anew(self) -> None:
        """Open a new file after the old one was moved, deleted or replaced.

        The old file's log may still have its last rows, under the name of the new file's log. A checkpoint writes them
        to the old file first, which waits for programs that read it.
        """
        if self._file is not None:
            self._leave_whole()
        self._file = None
        self._database.close()
        if not self.path.parent.is_dir():  # the disk is gone
            raise FileNotFoundError(errno.ENOENT, "the folder of the results is gone", str(self.path.parent))
        self._database = open_for_writing(self.path, self._busy_timeout_s)
        self._file = _file_at(self.path)
        log.error(
            "results_file_gone file=%s: it was moved, deleted or replaced while the agent writes it; the agent goes on "
            "with the file that is there, or a new one; earlier results are where it was moved to",
            self.path,
        )

    def _leave_damaged(self, damage: str) -> bool:
        """Replace a damaged file, once per run: if the next file is damaged too, a person must look at the disk."""
        self._database.close()
        try:
            self._database, self._damage_alarm = begin_anew(self.path, damage, self._busy_timeout_s)
        except (OSError, sqlite3.Error) as error:
            log.error("results_file_not_put_aside file=%s reason=%s", self.path, error)
            self._file = None  # reopened by the next try
            return False
        self._file = _file_at(self.path)
        return True

    def _settle(self, group: list[_Job], answers: list[Any]) -> None:
        with self._lock:
            ended, self._alarm = self._alarm, None
        if ended:
            log.warning("results_committed_again rows=%d", len(group))
        for job, answer in zip(group, answers, strict=True):
            if job.on_committed is not None:
                _call(job.on_committed, answer)
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

    def _leave_whole(self) -> None:
        try:
            kept_bytes = fold_in(self._database.conn)
        except sqlite3.Error as error:  # the disk is gone: no row can be saved
            log.warning("results_checkpoint_failed file=%s reason=%s", self.path, error)
            return
        if kept_bytes:
            raise BlockingIOError(errno.EBUSY, "moved while a program reads it, which has to end first", str(self.path))


def _opened(path: Path, busy_timeout_s: float) -> tuple[Database, str | None]:
    """The database, and the alarm if a damaged file was put aside."""
    try:
        database = open_for_writing(path, busy_timeout_s)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        return begin_anew(path, str(error), busy_timeout_s)
    damage = None
    with suppress(sqlite3.Error):  # the first commit reports it
        damage = damage_of(path)
    if damage is None:
        return database, None
    database.close()
    return begin_anew(path, damage, busy_timeout_s)


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode; None without a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _call(on_committed: Callable[[Any], None], answer: object) -> None:
    try:
        on_committed(answer)
    except Exception:  # the boundary of the writer's thread
        log.exception("result_callback_failed answer=%s", answer)
