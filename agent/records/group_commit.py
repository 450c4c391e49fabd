"""The one writer of a line's database: a thread that commits what many callers hand in, many at a time.

Guarantees: what a job wrote is on the disk before its callback runs, and counts as pending until that has run; jobs
are written in the order in which they were put; a disk that is full or a file that is locked loses nothing: jobs
wait, and are tried again until they are in; so they do whatever else fails, and the alarm says what. Where the file is
moved or deleted while it is written, a new one is begun, and told: no row goes where nobody will look for it.
Why one thread: commits are synced to the disk, so that many rows share one (group commit). What somebody waits for is
committed at once, with all that came meanwhile; what nobody waits for waits a little for company.
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

from agent.records.database import BUSY_TIMEOUT_S, begin_anew, damage_of, is_damage, open_for_writing
from agent.records.write_ahead_log import WriteAheadLog, fold_in
from experts.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlite_utils import Database

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

GROUP_JOBS = 200
GROUP_BYTES = 64 * 1024 * 1024  # of images; the log grows by so much before it can be emptied
GROUP_WAIT_S = 0.01  # how long a first job that nobody waits for waits for others to share its sync
BACKOFF = Backoff(0.05, 5.0)
IDLE_CHECKPOINT_S = 5.0
GIVE_UP_S = 1.5


@dataclass(frozen=True, slots=True)
class CommitStatistics:
    """A snapshot. ``alarm`` says why nothing can be committed at the moment; None while all is well.

    ``log_alarm``: what keeps the log of the file from being folded in, so that it grows; commits go on.
    ``damage_alarm``: where a damaged file was put aside since the start.
    """

    pending: int
    failed_commits: int
    alarm: str | None
    log_alarm: str | None
    damage_alarm: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """``write`` is called once for each try, inside a transaction; its answer goes to the callback of the last one."""

    write: Callable[[Database], Any]
    on_committed: Callable[[Any], None] | None
    size_bytes: int
    is_urgent: bool


class GroupCommitter:
    """See the module. ``put`` never blocks; committing is its own thread's work."""

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
        write: Callable[[Database], Answer],
        on_committed: Callable[[Answer], None] | None = None,
        *,
        size_bytes: int = 0,
        is_urgent: bool = False,
    ) -> None:
        """Have ``write`` called inside a transaction; ``on_committed``, with its answer, once that is on the disk.

        Both run on the writer's thread. ``write`` may be called several times, of which the last one counts. Raises
        RuntimeError after ``close``, except for what callbacks put.
        """
        with self._lock:
            if self._is_closed and threading.current_thread() is not self._thread:
                raise RuntimeError("the result store is closed")
            self._pending += 1
            self._queue.put(_Job(write, on_committed, size_bytes, is_urgent))

    def statistics(self) -> CommitStatistics:
        """A snapshot of the counters."""
        with self._lock:
            return CommitStatistics(
                self._pending, self._failed_commits, self._alarm, self._log.alarm, self._damage_alarm
            )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Commit what is waiting, then stop. False if that took longer than ``timeout_s``: the rest is given up.

        A commit that is under way then is waited for GIVE_UP_S more; on a disk that hangs it is left behind.
        What callbacks put meanwhile is committed too.
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
        """What is committed together: GROUP_JOBS and GROUP_BYTES at most; and whether the writer is to end."""
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
                deadline = 0.0  # with what is there already, and nothing that comes later
            group.append(job)
            size_bytes += job.size_bytes
        return group, False

    def _commit(self, group: list[_Job]) -> None:
        """Commit until it succeeds, or until close() gives up; then, and only then, tell the callers."""
        failures = 0
        while not self._abandoned.is_set():
            try:
                if self._file is None or _file_at(self.path) != self._file:
                    self._begin_anew()
                with self._database.atomic():
                    answers = [job.write(self._database) for job in group]
            except Exception as error:  # noqa: BLE001  # the boundary of the writer's thread: told as an alarm
                if is_damage(error) and self._damage_alarm is None and self._leave_damaged(str(error)):
                    continue
                self._raise_alarm(error, len(group))
                failures += 1
                self._abandoned.wait(BACKOFF.pause_s(failures))
                continue
            self._settle(group, answers)
            return

    def _begin_anew(self) -> None:
        """The file was moved or deleted, or another took its place.

        Its last rows may be in its log, which lies under the name of the new one's: they are written to it first, and
        that waits for whoever reads it.
        """
        if self._file is not None:
            self._leave_whole()
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

    def _leave_damaged(self, damage: str) -> bool:
        """Once a run: a disk that damages the next file, too, needs a person."""
        self._database.close()
        try:
            self._database, self._damage_alarm = begin_anew(self.path, damage, self._busy_timeout_s)
        except (OSError, sqlite3.Error) as error:
            log.error("results_file_not_put_aside file=%s reason=%s", self.path, error)
            self._file = None  # opened again with the next try
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
        except sqlite3.Error as error:  # of a disk that is gone nothing can be saved
            log.warning("results_checkpoint_failed file=%s reason=%s", self.path, error)
            return
        if kept_bytes:
            raise BlockingIOError(errno.EBUSY, "moved while a program reads it, which has to end first", str(self.path))


def _opened(path: Path, busy_timeout_s: float) -> tuple[Database, str | None]:
    """The database, and where a damaged one was put aside."""
    try:
        database = open_for_writing(path, busy_timeout_s)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        return begin_anew(path, str(error), busy_timeout_s)
    damage = None
    with suppress(sqlite3.Error):  # a file that cannot be read now is judged by its first commit
        damage = damage_of(path)
    if damage is None:
        return database, None
    database.close()
    return begin_anew(path, damage, busy_timeout_s)


def _file_at(path: Path) -> tuple[int, int] | None:
    """Which file lies there: its device and inode; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _call(on_committed: Callable[[Any], None], answer: object) -> None:
    try:
        on_committed(answer)
    except Exception:  # the boundary of the writer's thread: one caller's mistake must not stop all others' rows
        log.exception("result_callback_failed answer=%s", answer)
