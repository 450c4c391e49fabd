"""Pages of stored results and boards, newest first, and totals of a shift, for a station's page and an MES.

Guarantees: reads committed rows only, in short queries. A page is found by an index: that of the filter with the fewest
rows, for each verdict; the other filters are compared on these rows. Totals read each result once.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from agent.records.database import open_for_reading, read_rows, utc_text
from agent.records.result_reader import LARGEST_SEQ, board_row
from agent.records.station.reviews import AS_REVIEW, CHAINS, review_beside
from agent.records.verdict import result_row
from experts.expert import Verdict

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from agent.records.boards import BoardVerdict
    from agent.records.station.reviews import Finding, Review
    from agent.records.verdict import Result

COUNTED_ROWS = 2000  # of a filter: enough to tell a rare value from a common one
RANGED_ROWS = 100_000  # of a time: the numbers of a longer one are not looked up
INDEXED = {  # filters with an index each
    "board": "board",
    "component": "component",
    "experts": "experts",
    "label": "results.label",
    "source": "substr(key, 1, instr(key, '/') - 1)",
}
RANGE = "SELECT {2} FROM {0} INDEXED BY {0}_{1} WHERE {1} >= ? AND {1} < ?"
LATER = "SELECT 1 FROM {0} INDEXED BY {0}_{1} WHERE {1} >= ? LIMIT 1"
FEW = f"SELECT min(seq), max(seq), count(*) FROM ({RANGE} LIMIT {RANGED_ROWS + 1})"
COUNT = f"SELECT count(*) FROM (SELECT 1 FROM results WHERE {{}} = ? AND {{}} LIMIT {COUNTED_ROWS})"
OF_REVIEWS = "reviews INDEXED BY {} CROSS JOIN results ON seq = result"
REVIEWED = "EXISTS (SELECT 1 FROM reviews INDEXED BY reviews_one WHERE result = seq AND {})"
NOT_REVIEWED = "NOT EXISTS (SELECT 1 FROM reviews WHERE result = seq AND undone_at IS NULL)"
LISTED = f"""
    SELECT results.*, {AS_REVIEW}, EXISTS (SELECT 1 FROM anomaly_maps WHERE anomaly_maps.seq = results.seq) AS has_maps,
        (SELECT id FROM identity) AS file
    FROM results LEFT JOIN reviews ON reviews.result = results.seq AND undone_at IS NULL
    WHERE results.seq IN (SELECT value FROM json_each(?)) ORDER BY results.seq DESC
"""
# The first time by an index on times, then by numbers.
VERDICTS = """
    SELECT verdict, count(*), max(seq) FROM results {} WHERE finished_at >= :since AND seq > :last GROUP BY verdict
"""
BAD = """
    SELECT component, label, count(*) FROM results {} WHERE verdict != 'OK' AND finished_at >= :since AND seq > :last
    GROUP BY component, label
"""
BOARDS = "SELECT verdict, count(*) FROM boards INDEXED BY boards_closed_at WHERE closed_at >= ? GROUP BY verdict"


@dataclass(frozen=True, slots=True)
class ResultQuery:
    """Filters of results; None: any. ``expert``: one of those that judged; ``source``: the beginning of the key, as in
    a stored subject. ``since`` and ``until`` are of the verdict. ``before``: number."""

    verdicts: tuple[Verdict, ...] = tuple(Verdict)
    component: str | None = None
    expert: str | None = None
    label: str | None = None
    board: str | None = None
    source: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    reviewed: bool | None = None
    finding: Finding | None = None
    before: int | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class ListedResult:
    """``review``: the one that counts. ``file``: identity of the results file, to which the number belongs."""

    result: Result
    has_maps: bool
    review: Review | None
    file: str


@dataclass(frozen=True, slots=True)
class BoardQuery:
    """Filters of closed boards; None: any. ``since`` and ``until`` are of the closing. ``before``: number."""

    serial: str | None = None
    verdict: Verdict | None = None
    board_type: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    before: int | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class Totals:
    """Results and boards since a time. ``bad``: images that are NG or UNKNOWN by component and label, most first."""

    verdicts: Mapping[Verdict, int]
    boards: Mapping[Verdict, int]
    bad: tuple[tuple[str, str | None, int], ...]


class StationReader:
    """Reads one results file. Each call is one short query, or several."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def page(self, query: ResultQuery) -> tuple[ListedResult, ...]:
        with closing(open_for_reading(self.path)) as connection:
            found = sorted(
                (seq for sql, values in branches(connection, query) for (seq,) in connection.execute(sql, values)),
                reverse=True,
            )[: query.limit]
            rows = connection.execute(LISTED, (json.dumps(found),)).fetchall()
        return tuple(map(_listed, rows))

    def listed(self, seq: int) -> ListedResult | None:
        return next(iter(self.numbered([seq])), None)

    def numbered(self, numbers: Sequence[int]) -> tuple[ListedResult, ...]:
        """Results with these numbers, oldest first; missing ones are left out."""
        return tuple(map(_listed, reversed(read_rows(self.path, LISTED, (json.dumps(numbers),)))))

    def board_page(self, query: BoardQuery) -> tuple[BoardVerdict, ...]:
        with closing(open_for_reading(self.path)) as connection:
            conditions, values = _numbered(connection, "boards", "closed_at", query)
            index = "INDEXED BY boards_serial" if query.serial is not None else ""
            for name in ("serial", "verdict", "board_type"):
                if (value := getattr(query, name)) is not None:
                    conditions.append(f"{'+' if name == 'board_type' else ''}{name} = ?")  # there are few types
                    values.append(value)
            sql = f"SELECT * FROM boards {index} WHERE {' AND '.join(conditions)} ORDER BY seq DESC LIMIT ?"
            rows = connection.execute(sql, (*values, query.limit)).fetchall()
        return tuple(map(board_row, rows))

    def board(self, number: int) -> BoardVerdict | None:
        rows = read_rows(self.path, "SELECT * FROM boards WHERE seq = ?", (number,))
        return board_row(rows[0]) if rows else None


class RunningTotals:
    """Totals since a time, such as a shift's beginning. For any thread; a later call reads later results only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._of: tuple[str, str] | None = None  # results file and time
        self._last = 0
        self._verdicts: Counter[Verdict] = Counter()
        self._bad: Counter[tuple[str, str | None]] = Counter()

    def since(self, moment: datetime) -> Totals:
        since = utc_text(moment)
        with self._lock, closing(open_for_reading(self._path)) as connection:
            connection.execute("BEGIN")  # one snapshot
            self._read_on(connection, since)
            boards = {Verdict(verdict): count for verdict, count in connection.execute(BOARDS, (since,))}
            bad = tuple((*place, count) for place, count in self._bad.most_common())
            return Totals({verdict: self._verdicts[verdict] for verdict in Verdict}, boards, bad)

    def _read_on(self, connection: sqlite3.Connection, since: str) -> None:
        of = connection.execute("SELECT id FROM identity").fetchone()[0], since
        if of != self._of:
            self._of, self._last, self._verdicts, self._bad = of, 0, Counter(), Counter()
        values = {"since": since, "last": self._last}
        by_verdict, bad = (
            ("NOT INDEXED",) * 2 if self._last else ("INDEXED BY results_finished_at", "INDEXED BY results_bad")
        )
        for component, label, count in connection.execute(BAD.format(bad), values):
            self._bad[component, label] += count
        for verdict, count, last in connection.execute(VERDICTS.format(by_verdict), values).fetchall():
            self._verdicts[Verdict(verdict)] += count
            self._last = max(self._last, last)


def branches(connection: sqlite3.Connection, query: ResultQuery) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Statements with their values, each for the numbers of its newest results: one for each verdict and route."""
    conditions, values = _numbered(connection, "results", "finished_at", query)
    asks_review = query.finding is not None or query.reviewed is True
    review = "undone_at IS NULL" if query.finding is None else "undone_at IS NULL AND finding = ?"
    values += [] if query.finding is None else [query.finding]
    given = {name: getattr(query, name, None) for name in INDEXED}
    chains: list[str | None] = [None]
    if query.expert is not None:
        chains = [row[0] for row in connection.execute(CHAINS, {"expert": query.expert})]
    for chain, verdict in product(chains, query.verdicts):
        filters = [(INDEXED[name], value) for name, value in (given | {"experts": chain}).items() if value is not None]
        of_verdict = f"verdict = '{verdict}'"
        counts = [COUNT.format(name, "true" if name == "board" else of_verdict) for name, _ in filters]  # its index
        rows = [connection.execute(sql, one[1:]).fetchone()[0] for sql, one in zip(counts, filters, strict=True)]
        filters = [one for _, one in sorted(zip(rows, filters, strict=True), key=lambda each: each[0])]
        is_by_review = asks_review and min(rows, default=COUNTED_ROWS) == COUNTED_ROWS
        origin, number = "results", "seq"
        if is_by_review:
            index = "reviews_one" if query.finding is None else "reviews_counting"
            origin, number = OF_REVIEWS.format(index), "result"
        about = REVIEWED.format(review) if asks_review and not is_by_review else review
        reviewed = [about] * asks_review + [NOT_REVIEWED] * (query.reviewed is False)
        # a plus keeps SQLite, which has no statistics, from the other indexes
        pluses = ["+" if place or is_by_review else "" for place in range(len(filters))]
        by_index = [f"{plus}{column} = ?" for plus, (column, _) in zip(pluses, filters, strict=True)]
        bar = "+" if is_by_review or filters[:1] == [("board", query.board)] else ""
        where = " AND ".join([*conditions, *reviewed, *by_index, f"{bar}results.verdict = ?"])
        sql = f"SELECT {number} FROM {origin} WHERE {where} ORDER BY {number} DESC LIMIT ?"
        yield sql, (*values, *(value for _, value in filters), verdict, query.limit)


def _numbered(
    connection: sqlite3.Connection, table: str, time: str, query: ResultQuery | BoardQuery
) -> tuple[list[str], list[object]]:
    """Conditions on number and time. The numbers of a time are looked up, as the clock may have been set back."""
    latest = LARGEST_SEQ if query.before is None else query.before - 1
    if query.since is None and query.until is None:
        return ["seq <= ?"], [latest]
    times = (
        ("" if query.since is None else utc_text(query.since)),
        ("~" if query.until is None else utc_text(query.until)),
    )
    first, last, count = connection.execute(FEW.format(table, time, "seq"), times).fetchone()
    if count > RANGED_ROWS:
        first, last = 0, latest
        if connection.execute(LATER.format(table, time), times[1:]).fetchone():
            (last,) = connection.execute(RANGE.format(table, time, "max(seq)"), times).fetchone()
    numbers = (first, min(last, latest)) if count else (1, 0)
    return ["seq BETWEEN ? AND ?", f"+{time} >= ?", f"+{time} < ?"], [*numbers, *times]


def _listed(row: sqlite3.Row) -> ListedResult:
    review = None if row["review_number"] is None else review_beside(row)
    return ListedResult(result_row(row), bool(row["has_maps"]), review, row["file"])
