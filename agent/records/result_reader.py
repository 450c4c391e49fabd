"""Reads a line's results and boards, in any process, beside a writing agent or without one.

Guarantees: reads committed rows only; queries are short, so that readers never keep the log from shrinking; rows of any
age are found by an index.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from agent.records.boards import BoardVerdict, Inspection
from agent.records.database import IMAGE_SHA256, OF_ONE_PART, Rows, open_for_reading, read_rows, utc_text
from agent.records.verdict import KeptMap, Result, result_row
from agent.subject import Subject
from experts.expert import Verdict

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

READ_ROWS = 500  # rows of one short read: a long one would keep the log from shrinking
LARGEST_SEQ = 2**63 - 1
NUMBERED = "SELECT * FROM results WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq"
# Results of a run of a board have consecutive numbers among those of the board: from the one that opened it.
OPENER = """
    SELECT min(seq) FROM results INDEXED BY results_finished_at
    WHERE finished_at = ? AND board = ? AND board_type = ?
"""
NEXT_RUN = """
    SELECT opened_at FROM boards INDEXED BY boards_run WHERE serial = ?1 AND board_type = ?2 AND seq > (
        SELECT seq FROM boards WHERE serial = ?1 AND board_type = ?2 AND opened_at = ?3
    ) ORDER BY seq LIMIT 1
"""
REWORKED = "SELECT after_seq FROM reworks WHERE serial = ? AND board_type = ? AND opened_at = ?"
OF_RUN = """
    SELECT seq FROM results INDEXED BY results_board WHERE board = ? AND board_type = ? AND seq BETWEEN ? AND ?
    ORDER BY seq DESC LIMIT ?
"""
LATEST_RUNS = """
    WITH RECURSIVE types (name) AS (
        SELECT min(board_type) FROM boards INDEXED BY boards_run WHERE serial = ?1
        UNION ALL SELECT (
            SELECT min(board_type) FROM boards INDEXED BY boards_run WHERE serial = ?1 AND board_type > types.name
        ) FROM types WHERE types.name IS NOT NULL
    ) SELECT boards.* FROM types CROSS JOIN boards ON seq = (
        SELECT max(seq) FROM boards INDEXED BY boards_run WHERE serial = ?1 AND board_type = types.name
    ) ORDER BY seq DESC
"""  # each type by one look into the index
BOARDS = Rows(BoardVerdict)


@dataclass(frozen=True, slots=True)
class StoredPage:
    """Rows after a cursor, in one snapshot. ``file``: identity of the results file, to which the numbers belong.

    ``last_seq``, ``last_board``: last numbers of a result and of a change of a board's verdict. ``boards``: changes
    with their numbers, only after the last result.
    """

    file: str
    last_seq: int
    last_board: int
    results: tuple[Result, ...]
    boards: tuple[tuple[int, BoardVerdict], ...]


class ResultReader:
    """Reader of one results file. Each call is one short query, or several."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, key: str) -> Result | None:
        return self._first("SELECT * FROM results WHERE key = ?", (key,))

    def numbered(self, seq: int) -> Result | None:
        return self._first("SELECT * FROM results WHERE seq = ?", (seq,))

    def latest_in_place(self, seen: str) -> Result | None:
        """The latest result of the folder's file, or a part of it, whose keys begin so (``subject.seen_key``).

        Rows of earlier versions are among them; rows of claimed files are not.
        """
        return self._first(
            "SELECT * FROM results WHERE key = ?1 OR (key >= ?1 || '#' AND key < ?1 || '$')"
            " OR (key >= ?1 || '-t' AND key < ?1 || '-u') ORDER BY seq DESC LIMIT 1",
            (seen,),
        )

    def of_keys(self, beginning: str) -> list[Result]:
        after = beginning[:-1] + chr(ord(beginning[-1]) + 1)
        return self.select("SELECT * FROM results WHERE key >= ? AND key < ? ORDER BY seq", (beginning, after))

    def last_judged(self, subject: Subject, image_sha256: str, config_sha256: str) -> Result | None:
        """The latest judged OK or NG for the same bytes, part, source and line file."""
        source = f"{subject.key.partition('/')[0]}/"
        place = subject.board, subject.board_type, subject.component or "", subject.ref
        return self._first(
            f"SELECT * FROM results INDEXED BY results_content WHERE {IMAGE_SHA256} = ?"
            " AND board = ? AND board_type IS ? AND component = ? AND ref = ? AND config_sha256 = ?"
            " AND substr(key, 1, ?) = ? AND verdict != 'UNKNOWN' AND json_extract(detail, '$.duplicate_of') IS NULL"
            " ORDER BY seq DESC LIMIT 1",
            (image_sha256, *place, config_sha256, len(source), source),
        )

    def query(
        self, since: datetime | None = None, verdict: Verdict | None = None, limit: int | None = None
    ) -> Iterator[Result]:
        """Results in the order of their numbers, finished at ``since`` or later."""
        last, left = self._before(since), limit
        while left is None or left > 0:
            wanted = READ_ROWS if left is None else min(left, READ_ROWS)
            rows = self._rows(
                "SELECT * FROM results WHERE seq > ? AND finished_at >= ? AND (? IS NULL OR verdict = ?)"
                " ORDER BY seq LIMIT ?",
                (last, utc_text(since) if since else "", verdict, verdict, wanted),
            )
            yield from map(result_row, rows)
            if len(rows) < wanted:
                return
            last, left = rows[-1]["seq"], None if left is None else left - len(rows)

    def after(self, seq: int, board: int, limit: int) -> StoredPage:
        """At most ``limit`` results with larger numbers; if fewer remain, as many changes of board verdicts."""
        with closing(open_for_reading(self.path)) as connection:
            connection.execute("BEGIN")  # one snapshot of one file
            file = connection.execute("SELECT id FROM identity").fetchone()[0]
            last = dict(connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
            rows = connection.execute(
                "SELECT * FROM results WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)
            ).fetchall()
            boards = connection.execute(
                "SELECT number, boards.* FROM board_changes JOIN boards ON boards.seq = board WHERE number > ?"
                " ORDER BY number LIMIT ?",
                (board, limit if len(rows) < limit else 0),
            ).fetchall()
        results = tuple(result_row(row) for row in rows)
        changes = tuple((row["number"], board_row(row)) for row in boards)
        return StoredPage(file, last.get("results", 0), last.get("board_changes", 0), results, changes)

    def select(self, sql: str, values: Sequence[object]) -> list[Result]:
        return [result_row(row) for row in self._rows(sql, values)]

    def _first(self, sql: str, values: Sequence[object]) -> Result | None:
        return next(iter(self.select(sql, values)), None)

    def maps(self, seq: int) -> tuple[KeptMap, ...]:
        """Anomaly maps of a result, in the order of its route."""
        rows = self._rows("SELECT step, expert, png FROM anomaly_maps WHERE seq = ? ORDER BY step", (seq,))
        return tuple(KeptMap(**dict(row)) for row in rows)

    def find_with_maps(self, key: str) -> Result | None:
        found = self.find(key)
        return None if found is None else replace(found, maps=self.maps(found.seq))

    def run_numbers(
        self, place: tuple[str, str], opened_at: datetime, later: Iterable[datetime] = (), limit: int | None = None
    ) -> list[int]:
        """Numbers of the results of a board's run, the latest ``limit`` in order. ``place``: serial and type;
        ``later``: openings of its runs that are not stored yet."""
        run = (*place, utc_text(opened_at))
        with closing(open_for_reading(self.path)) as connection:

            def opened_by(opening: str) -> int:
                return connection.execute(OPENER, (opening, *place)).fetchone()[0] or 0

            first = opened_by(run[2])
            openings = [*(row[0] for row in connection.execute(NEXT_RUN, run)), *map(utc_text, later)]
            ends = [seq - 1 for opening in openings if (seq := opened_by(opening)) > first]
            ends += [seq for (seq,) in connection.execute(REWORKED, run)]
            among = (*place, first, min(ends, default=LARGEST_SEQ), -1 if limit is None else limit)
            return [seq for (seq,) in connection.execute(OF_RUN, among)][::-1]

    def of_run(self, serial: str, board_type: str, opened_at: datetime) -> list[Result]:
        """Results of a run of a board, in the order of their numbers."""
        return self.select(NUMBERED, (json.dumps(self.run_numbers((serial, board_type), opened_at)),))

    def latest_runs(self, serial: str) -> list[BoardVerdict]:
        """The last stored run of each type, the newest first."""
        return [board_row(row) for row in self._rows(LATEST_RUNS, (serial,))]

    def newest_first(self) -> Iterator[Inspection]:
        """All results, latest first, read lazily: for the replay of boards after a restart."""
        before = LARGEST_SEQ
        while rows := self._rows(
            "SELECT seq, board, board_type, component, ref, verdict, finished_at,"
            f" CASE WHEN {OF_ONE_PART} THEN {IMAGE_SHA256} END AS image_sha256 FROM results"
            " WHERE seq < ? ORDER BY seq DESC LIMIT ?",
            (before, READ_ROWS),
        ):
            yield from (_inspection(row) for row in rows)
            before = rows[-1]["seq"]

    def boards(self, since: datetime | None = None, limit: int | None = None) -> tuple[BoardVerdict, ...]:
        """The newest ``limit`` board verdicts closed at ``since`` or later, oldest first."""
        index = "INDEXED BY boards_closed_at" if since else ""  # otherwise SQLite reads all boards
        rows = self._rows(
            f"SELECT * FROM boards {index} WHERE closed_at >= ? ORDER BY seq DESC LIMIT ?",
            (utc_text(since) if since else "", -1 if limit is None else limit),
        )
        return tuple(board_row(row) for row in reversed(rows))

    def board_query(
        self, since: datetime | None = None, verdict: Verdict | None = None, limit: int | None = None
    ) -> Iterator[BoardVerdict]:
        """The newest ``limit`` board verdicts closed at ``since`` or later, in the order of their numbers."""
        wanted = "FROM boards WHERE seq > ? AND +closed_at >= ? AND (? IS NULL OR verdict = ?) ORDER BY seq"
        given = (utc_text(since) if since else "", verdict, verdict)
        last = self._before(since, "boards", "closed_at")
        if limit is not None:
            newest = f"SELECT min(seq) - 1 FROM (SELECT seq {wanted} DESC LIMIT ?)"
            last = self._rows(newest, (last, *given, limit))[0][0] or last
        while rows := self._rows(f"SELECT * {wanted} LIMIT ?", (last, *given, READ_ROWS)):
            yield from map(board_row, rows)
            last = rows[-1]["seq"]

    def _before(self, since: datetime | None, table: str = "results", time: str = "finished_at") -> int:
        """Number below all rows of ``since`` or later, so that older ones are not read."""
        if since is None:
            return 0
        first = f"SELECT min(seq) FROM {table} INDEXED BY {table}_{time} WHERE {time} >= ?"
        return (self._rows(first, (utc_text(since),))[0][0] or 1) - 1

    def _rows(self, sql: str, values: Sequence[object]) -> list[sqlite3.Row]:
        return read_rows(self.path, sql, values)


def _inspection(row: sqlite3.Row) -> Inspection:
    at = datetime.fromisoformat(row["finished_at"])
    about = {name: row[name] for name in ("board", "board_type", "component", "ref")}
    return Inspection(Subject("", "", "", at, **about), Verdict(row["verdict"]), at, row["seq"], row["image_sha256"])


def board_row(row: sqlite3.Row) -> BoardVerdict:
    return BOARDS.record(row, is_revision=row["revisions"] > 0)
