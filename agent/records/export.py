"""One file of results a day, for whoever reads files: `results-YYYY-MM-DD.csv`, or `.jsonl`.

Guarantees: a file appears under its name whole, or not at all, and once its day (the box's local one) is over; each
result is in exactly one file, also one that was stored after its day's file was written: that one is in the next.
Days that passed while the agent was off are caught up, the oldest first, from the oldest result on; a day without
results has its file too. A file may be written again, with the same results, when the process ends while it appears.

The first line says what the file is, with the number of its schema: as long as that stays, columns may be added at the
end, and none changes its meaning or goes.
    CSV:   `# coserve results: schema 1, line LINE, day YYYY-MM-DD`, then a header, then rows
    JSONL: {"schema": 1, "kind": "results", "line": LINE, "day": "YYYY-MM-DD", "columns": [...]}, then rows
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING

from agent.records.database import open_for_reading, utc_text
from agent.records.result_reader import ResultReader
from agent.records.rows import RESULT_COLUMNS, RowWriter, plain_result
from agent.records.whole_file import make_folder, whole_text_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlite_utils import Database

    from agent.line_file.records import ExportSection
    from agent.records.result_writer import ResultStore
    from agent.records.results import ResultRow

log = logging.getLogger(__name__)

SCHEMA = 1
GRACE = timedelta(minutes=5)  # after midnight: what was judged before is stored by then, nearly always
STEP_ROWS = 500
INSERT = """
    INSERT INTO exports (day, until, last_seq, rows, file) VALUES (:day, :until, :last_seq, :rows, :file)
    ON CONFLICT (day) DO UPDATE SET until = :until, last_seq = :last_seq, rows = :rows, file = :file
"""


@dataclass(frozen=True, slots=True)
class Exported:
    """The last day that was written: results that finished before ``until``, up to the number ``last_seq``."""

    day: date
    until: datetime
    last_seq: int


@dataclass(frozen=True, slots=True)
class ExportStatistics:
    """A snapshot. ``day``: the last one written; ``files`` and ``rows``: since the start."""

    day: date | None
    files: int
    rows: int


class DailyExport:
    """Writes what is due, a little with each ``step``. One thread at a time."""

    def __init__(self, section: ExportSection, line: str, store: ResultStore, wall: Callable[[], datetime]) -> None:
        self._section = section
        self._line = line
        self._store = store
        self._wall = wall
        self._last = last_exported(store.path)
        self._work: Iterator[None] | None = None
        self._files = 0
        self._rows = 0
        self._is_ahead_told = False

    def step(self) -> None:
        """A part of a file, if one is due. Raises OSError for what the disk refuses; the next step begins anew."""
        if self._work is None:
            day = self._due()
            if day is None:
                return
            self._work = self._write(day)
        try:
            next(self._work)
        except StopIteration:
            self._work = None
        except BaseException:
            self._work = None
            raise

    def stop(self) -> None:
        """Leave no draft behind."""
        if self._work is not None:
            self._work.close()  # type: ignore[attr-defined]  # it is a generator
            self._work = None

    def statistics(self) -> ExportStatistics:
        """A snapshot."""
        return ExportStatistics(self._last.day if self._last else None, self._files, self._rows)

    def _due(self) -> date | None:
        """The first day that is over and has no file."""
        now = self._wall()
        day = self._last.day + timedelta(days=1) if self._last else self._first_day()
        if self._last is not None and self._last.until > now + timedelta(days=1) and not self._is_ahead_told:
            self._is_ahead_told = True
            log.error(
                "export_ahead day=%s: the clock was ahead when it was written; results wait for the day after it",
                self._last.day,
            )
        return day if day is not None and now >= beginning(day + timedelta(days=1)) + GRACE else None

    def _first_day(self) -> date | None:
        with closing(open_for_reading(self._store.path)) as connection:
            oldest = connection.execute("SELECT min(finished_at) FROM results").fetchone()[0]
        return None if oldest is None else datetime.fromisoformat(oldest).astimezone().date()

    def _write(self, day: date) -> Iterator[None]:
        reading = _DayReader(self._store.path, day, self._last)
        path = self._section.folder / f"results-{day}.{self._section.format}"
        rows = 0
        with ExitStack() as stack:
            make_folder(self._section.folder)
            stream = stack.enter_context(whole_text_file(path))
            stream.write(self._first_line(day))
            writer = RowWriter(stream, self._section.format, RESULT_COLUMNS)
            while found := reading.next_rows(STEP_ROWS):
                for row in found:
                    writer.write(plain_result(_local(row)))
                rows += len(found)
                yield
        self._written(path, Exported(day, beginning(day + timedelta(days=1)), reading.last_seq), rows)

    def _written(self, path: Path, exported: Exported, rows: int) -> None:
        state = {
            "day": exported.day.isoformat(),
            "until": utc_text(exported.until),
            "last_seq": exported.last_seq,
            "rows": rows,
            "file": path.name,
        }

        def write(database: Database) -> None:
            database.execute(INSERT, state)

        self._store.write(write)
        self._last = exported
        self._files += 1
        self._rows += rows
        log.info("results_exported file=%s rows=%d", path, rows)

    def _first_line(self, day: date) -> str:
        if self._section.format == "csv":
            return f"# coserve results: schema {SCHEMA}, line {self._line}, day {day}\n"
        head = {"schema": SCHEMA, "kind": "results", "line": self._line, "day": str(day), "columns": RESULT_COLUMNS}
        return json.dumps(head) + "\n"


class _DayReader:
    """The results of one day that no earlier file has, in the order of their numbers, by short looks."""

    def __init__(self, path: Path, day: date, before: Exported | None) -> None:
        self._reader = ResultReader(path)
        self._from = utc_text(beginning(day))
        self._until = utc_text(beginning(day + timedelta(days=1)))
        self._late_after = before.last_seq if before else 0  # stored after the file of their own day was written
        self.last_seq, self._at, self._end = self._range(path)

    def next_rows(self, limit: int) -> list[ResultRow]:
        """The next ones; none when all are read."""
        sql = (
            "SELECT * FROM results WHERE seq > ? AND seq <= ? AND finished_at < ? AND (finished_at >= ? OR seq > ?)"
            " ORDER BY seq LIMIT ?"
        )
        rows = self._reader.select(sql, (self._at, self._end, self._until, self._from, self._late_after, limit))
        if rows:
            self._at = rows[-1].seq
        return rows

    def _range(self, path: Path) -> tuple[int, int, int]:
        """The last number of all; and before the first, and the last, of what this day's file can hold."""
        within = (
            "SELECT min(seq), max(seq) FROM results INDEXED BY results_finished_at"
            " WHERE finished_at >= ? AND finished_at < ?"
        )
        late = "SELECT min(seq), max(seq) FROM results WHERE seq > ? AND finished_at < ?"
        with closing(open_for_reading(path)) as connection:
            last_seq = connection.execute("SELECT max(seq) FROM results").fetchone()[0] or 0
            found = [
                connection.execute(within, (self._from, self._until)).fetchone(),
                connection.execute(late, (self._late_after, self._from)).fetchone(),
            ]
        lowest = min((low for low, _ in found if low is not None), default=1)
        highest = max((high for _, high in found if high is not None), default=0)
        return max(last_seq, self._late_after), lowest - 1, min(highest, last_seq)


def beginning(day: date) -> datetime:
    """The moment at which a day begins on this box."""
    return datetime.combine(day, time()).astimezone()


def last_exported(path: Path) -> Exported | None:
    """What was exported of these results so far."""
    with closing(open_for_reading(path)) as connection:
        rows = connection.execute("SELECT day, until, last_seq FROM exports ORDER BY day DESC LIMIT 1").fetchall()
    if not rows:
        return None
    day, until, last_seq = rows[0]
    return Exported(date.fromisoformat(day), datetime.fromisoformat(until), last_seq)


def _local(row: ResultRow) -> ResultRow:
    """With times as the clock on the wall showed them."""
    result = row.result
    return replace(
        row,
        result=replace(result, arrived_at=result.arrived_at.astimezone(), finished_at=result.finished_at.astimezone()),
    )
