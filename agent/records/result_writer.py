"""Writes a line's results, board verdicts and journal.

Guarantees: sequence numbers are gap-free in the order of commit. A key is stored once, even if sent repeatedly. A
result and the end of its journal entry are one commit: after any end of the process a request is either unfinished or
judged. Followers' rows are committed with the row they follow. See also ``group_commit``.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from agent.faults.errors import OrderRefused, Reason
from agent.records import journal
from agent.records.database import BUSY_TIMEOUT_S, as_column
from agent.records.group_commit import GroupCommitter
from agent.records.journal import OF_KEY
from agent.records.result_reader import ResultReader
from agent.records.verdict import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sqlite_utils import Database

    from agent.records.boards import BoardVerdict
    from agent.records.group_commit import StoreStatistics
    from agent.records.journal import Acceptance
    from agent.records.verdict import Result
    from agent.subject import Subject

log = logging.getLogger(__name__)

INSERT_RESULT = f"""
    INSERT INTO results ({", ".join(COLUMNS)}) VALUES (:{", :".join(COLUMNS)}) RETURNING seq
"""
INSERT_MAP = "INSERT INTO anomaly_maps (seq, step, expert, png) VALUES (?, ?, ?, ?)"
PLACE = f"UPDATE results SET detail = json_set(detail, '$.place', :place) WHERE ({OF_KEY}) AND json_valid(detail)"
KNOWN_RESULT = "SELECT seq FROM results WHERE key = :key"
BOARD_COLUMNS = (
    "serial", "board_type", "verdict", "opened_at", "closed_at", "missing", "counts", "takt_s", "reason",
)  # fmt: skip
INSERT_BOARD = f"""
    INSERT INTO boards ({", ".join(BOARD_COLUMNS)}) VALUES (:{", :".join(BOARD_COLUMNS)}) RETURNING seq
"""
REVISE_BOARD = """
    UPDATE boards SET verdict = :verdict, closed_at = :closed_at, missing = :missing, counts = :counts,
        reason = :reason, revisions = revisions + 1
    WHERE serial = :serial AND board_type = :board_type AND opened_at = :opened_at RETURNING seq
"""
STORED_BOARD = "SELECT revisions, takt_s FROM boards WHERE seq = ?"
KNOWN_BOARD = """
    SELECT seq FROM boards WHERE serial = :serial AND board_type = :board_type AND opened_at = :opened_at
    AND verdict = :verdict AND missing = :missing AND counts = :counts
"""

WRITE_NOW_S = 5.0  # the wait of a person, or of a program that serves one

OnRecorded: TypeAlias = "Callable[[Recorded], None]"
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Number of a record's row. ``is_new``: written by this call; False: the key was already stored."""

    seq: int
    is_new: bool


class Follower(Protocol):
    """Writes its rows with every new result and board verdict, on the store's thread.

    These rows are part of the same transaction: the follower may be called again for a row that was not committed, and
    an exception keeps the whole transaction from being stored.
    """

    def result_stored(self, database: Database, row: Result) -> None:
        """Called for a new result."""

    def board_stored(self, database: Database, row: BoardVerdict) -> None:
        """Called for a new board verdict, or a revision."""

    def committed(self) -> None:
        """Called once new rows are on the disk."""


class ResultStore(ResultReader):
    """Only writer of a line's records. No call blocks: the committer's thread writes."""

    def __init__(
        self, path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S, *, followers: Sequence[Follower] = ()
    ) -> None:
        super().__init__(path)
        self._followers = tuple(followers)
        self._committer = GroupCommitter(path, busy_timeout_s)
        self._lock = threading.Lock()
        self._counts = {True: 0, False: 0}  # new rows, and rows already stored

    def record(self, result: Result, on_committed: OnRecorded | None = None, *, is_urgent: bool = False) -> None:
        """Store a result; the writer's thread calls ``on_committed`` after the commit.

        A key already stored is left unchanged and reported (``is_new`` False). Raises TypeError or ValueError for
        values that no row can hold: a detail outside JSON, a time without zone, text that is not Unicode.
        """
        values = _checked(result.columns())

        def write(database: Database) -> Recorded:
            journal.end(database, result.subject.key)
            recorded = _write_result(database, values)
            if recorded.is_new:
                for each in result.maps:
                    database.execute(INSERT_MAP, (recorded.seq, each.step, each.expert, each.png))
                for follower in self._followers:
                    follower.result_stored(database, replace(result, seq=recorded.seq))
            return recorded

        self._committer.put(write, self._counted(on_committed), is_urgent=is_urgent)

    def record_board(self, board: BoardVerdict, on_committed: OnRecorded | None = None) -> None:
        """Store a board's verdict, or replace that of the same run (serial, type, ``opened_at``). ``is_new`` is False
        if exactly this verdict was stored before."""
        values = _checked({name: as_column(getattr(board, name)) for name in BOARD_COLUMNS})

        def write(database: Database) -> Recorded:
            recorded = _write_board(database, values)
            if recorded.is_new:
                revisions, takt_s = database.execute(STORED_BOARD, (recorded.seq,)).fetchone()
                row = replace(board, seq=recorded.seq, revisions=revisions, is_revision=revisions > 0, takt_s=takt_s)
                for follower in self._followers:
                    follower.board_stored(database, row)
            return recorded

        self._committer.put(write, self._counted(on_committed))

    def place(self, key: str, place: str) -> None:
        """Store the path below its folder of a judged file: with the image's result, or those of its parts."""
        try:
            place.encode()
            self.write(lambda database: database.execute(PLACE, {"key": key, "place": place}))
        except (RuntimeError, UnicodeEncodeError):  # after the close, or no UTF-8: the file is looked for where asked
            log.info("place_not_stored key=%r place=%r", key, place)

    def write(self, write: Callable[[Database], Answer], on_committed: Callable[[Answer], None] | None = None) -> None:
        """Queue another write; both calls run on the writer's thread, see ``GroupCommitter.put``."""
        self._committer.put(write, on_committed)

    def written(self, write: Callable[[Database], object]) -> Iterator[None]:
        """Queue a write, and yield until its commit: for work in steps."""
        is_stored = threading.Event()
        self.write(write, lambda _: is_stored.set())
        while not is_stored.is_set():
            yield

    def write_now(
        self,
        write: Callable[[Database], Answer | OrderRefused],
        on_committed: Callable[[Answer], None] = lambda _: None,
    ) -> Answer:
        """Write, and return the answer after the commit; not for the writer's thread, which calls ``on_committed``.

        Raises an OrderRefused that ``write`` returns, STOPPING after the close, and NOT_NOW without a commit within
        WRITE_NOW_S: the write may be committed later.
        """
        answered: Future[Answer | OrderRefused] = Future()

        def settle(answer: Answer | OrderRefused) -> None:
            if not isinstance(answer, OrderRefused):
                on_committed(answer)
            answered.set_result(answer)

        try:
            self._committer.put(write, settle, is_urgent=True)
            answer = answered.result(WRITE_NOW_S)
        except RuntimeError:
            raise OrderRefused(Reason.STOPPING, "the agent is stopping: nothing more is stored", 5.0) from None
        except TimeoutError:
            reason = self.statistics().alarm or "the disk does not answer"
            raise OrderRefused(Reason.NOT_NOW, f"not stored yet: {reason} - look again later", 5.0) from None
        if isinstance(answer, OrderRefused):
            raise answer
        return answer

    def accept(
        self, subjects: Sequence[Subject], content: bytes, on_committed: Callable[[Sequence[Acceptance]], None]
    ) -> None:
        """Journal these requests of one image, which survive the process until each has its result.

        ``on_committed`` gets an Acceptance of each, in order: new, under way already, judged before, or a key that
        belongs to another request.
        """
        rows = [_checked(journal.values(subject)) for subject in subjects]
        self._committer.put(
            lambda database: journal.accept(database, rows, content),
            on_committed,
            size_bytes=len(content),
            is_urgent=True,
        )

    def withdraw(self, keys: Sequence[str], on_committed: Callable[[None], None] | None = None) -> None:
        """Delete these requests from the journal."""

        def write(database: Database) -> None:
            for key in keys:
                journal.end(database, key)

        self._committer.put(write, on_committed)

    def statistics(self) -> StoreStatistics:
        commits = self._committer.statistics()
        with self._lock:
            return replace(commits, committed=self._counts[True], duplicates=self._counts[False])

    def close(self, timeout_s: float = 10.0) -> bool:
        return self._committer.close(timeout_s)

    def _counted(self, on_committed: OnRecorded | None) -> OnRecorded:
        def count(recorded: Recorded) -> None:
            with self._lock:
                self._counts[recorded.is_new] += 1
            if recorded.is_new:
                for follower in self._followers:
                    follower.committed()
            if on_committed is not None:
                on_committed(recorded)

        return count


def _write_result(database: Database, values: Mapping[str, object]) -> Recorded:
    """Query first: an insert with a known key would use up a sequence number."""
    known = _first(database, KNOWN_RESULT, values)
    return Recorded(known or _first(database, INSERT_RESULT, values), is_new=not known)


def _write_board(database: Database, values: Mapping[str, object]) -> Recorded:
    """Insert a new run, or update a known one; an upsert would use up a number with each revision."""
    known = _first(database, KNOWN_BOARD, values)
    seq = known or _first(database, REVISE_BOARD, values) or _first(database, INSERT_BOARD, values)
    return Recorded(seq, is_new=not known)


def _first(database: Database, sql: str, values: Mapping[str, object]) -> Any:  # noqa: ANN401  # of any column
    """First value of the first row; None without a row, as sequence numbers begin at 1."""
    rows = database.execute(sql, dict(values)).fetchall()
    return rows[0][0] if rows else None


def _checked(values: Mapping[str, object]) -> Mapping[str, object]:
    """Raises ValueError for text that is not Unicode: in the caller's thread, not for a whole group of rows."""
    for value in values.values():
        if isinstance(value, str):
            value.encode()
    return values
