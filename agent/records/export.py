"""One file of results a day, for whoever reads files: `results-YYYY-MM-DD.csv`, or `.jsonl`.

Guarantees: a file appears under its name whole, or not at all; a file holds the results of one range of sequence
numbers, and the ranges follow one another, so that each result is in exactly one file, whatever the clock showed. The
day (the box's local one) is the file's label: its range ends before the first result of a later day. Days that passed
while the agent was off are caught up, the oldest first; a day without results has its file too, up to a month of days.
Nothing is written before the clock has run evenly for an hour. A label that a wrong clock has used up, or results that
a restore has put aside, gets a number (`results-YYYY-MM-DD-2.csv`). When the process ends while a file appears, it is
written again with the same results.

The first line says what the file is, with the number of its schema: as long as that stays, columns may be added at the
end, and none changes its meaning or goes.
    CSV:   `# coserve results: schema 1, line LINE, day YYYY-MM-DD`, then a header, then rows
    JSONL: {"schema": 1, "kind": "results", "line": LINE, "day": "YYYY-MM-DD", "columns": [...]}, then rows
"""

from __future__ import annotations

import json
import logging
import math
import re
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from time import monotonic
from typing import TYPE_CHECKING

from agent.records.database import open_for_reading, utc_text
from agent.records.result_reader import ResultReader
from agent.records.rows import RESULT_COLUMNS, RowWriter, plain_result
from agent.records.steadiness import Steadiness
from experts.filesystem import make_folder, whole_text_file

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
LONGEST_GAP = timedelta(days=31)  # of days without results; beyond it no empty files are written
INSERT = """
    INSERT OR REPLACE INTO exports (day, until, last_seq, rows, file) VALUES (:day, :until, :last_seq, :rows, :file)
"""
UNEXPORTED_DAY = "SELECT finished_at FROM results WHERE seq > ? AND finished_at <= ? ORDER BY seq LIMIT 1"
LATER_DAY = "SELECT min(seq) FROM results WHERE seq > ? AND finished_at >= ? AND finished_at <= ?"
NUMBERED = re.compile(r"-(\d+)\.\w+")


@dataclass(frozen=True, slots=True)
class Exported:
    """The last file: its label, the end of that day, and the last sequence number that is in a file."""

    day: date
    until: datetime
    last_seq: int

    def until_s(self, now_s: float) -> float:
        """Until when files that no result names count as exported; never, where the clock was ahead then."""
        until_s = self.until.timestamp()
        return until_s if until_s <= now_s else -math.inf


@dataclass(frozen=True, slots=True)
class ExportStatistics:
    """A snapshot. ``day``: the last one written; ``files`` and ``rows``: since the start."""

    day: date | None
    files: int
    rows: int


class DailyExport:
    """Writes what is due, a little with each ``step``. One thread at a time. ``clock``: monotonic seconds."""

    def __init__(
        self,
        section: ExportSection,
        line: str,
        store: ResultStore,
        wall: Callable[[], datetime],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._section = section
        self._line = line
        self._store = store
        self._wall = wall
        self._clock = clock
        self._steadiness = Steadiness(wall().timestamp() - clock(), clock())
        self._last = last_exported(store.path)
        self._work: Iterator[None] | None = None
        self._files = 0
        self._rows = 0

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
        if self._work is not None:
            self._work.close()  # type: ignore[attr-defined]  # it is a generator
            self._work = None

    def statistics(self) -> ExportStatistics:
        return ExportStatistics(self._last.day if self._last else None, self._files, self._rows)

    def _due(self) -> date | None:
        """The next label: a day that is over. None where there is nothing to write yet."""
        now = self._wall()
        if not self._steadiness.look(now.timestamp(), self._clock()):
            return None
        yesterday = (now - GRACE).astimezone().date() - timedelta(days=1)
        last = self._last
        if last is not None and last.day == yesterday:
            return None
        first = self._first_unexported_day(now)
        if last is None:
            day = first
        elif last.day > yesterday:  # the clock was ahead: what came since then waits for the end of its day
            day = yesterday if first is not None and first <= yesterday else None
        else:
            day = last.day + timedelta(days=1)
            if yesterday - day > LONGEST_GAP:
                day = max(day, min(first or yesterday, yesterday))
        return day if day is not None and day <= yesterday else None

    def _first_unexported_day(self, now: datetime) -> date | None:
        """The day of the first result that is in no file; those that a wrong clock dated ahead do not count."""
        after = self._last.last_seq if self._last else 0
        with closing(open_for_reading(self._store.path)) as connection:
            found = connection.execute(UNEXPORTED_DAY, (after, utc_text(now))).fetchone()
        return None if found is None else datetime.fromisoformat(found[0]).astimezone().date()

    def _write(self, day: date) -> Iterator[None]:
        reader, at, last_seq = ResultReader(self._store.path), *self._range(day)
        head = self._first_line(day, at)
        path = self._place(day, head)
        rows = 0
        with ExitStack() as stack:
            make_folder(self._section.folder)
            stream = stack.enter_context(whole_text_file(path))
            stream.write(head)
            writer = RowWriter(stream, self._section.format, RESULT_COLUMNS)
            while found := reader.select(
                "SELECT * FROM results WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?", (at, last_seq, STEP_ROWS)
            ):
                for row in found:
                    writer.write(plain_result(_local(row)))
                at, rows = found[-1].seq, rows + len(found)
                yield
        self._written(path, Exported(day, beginning(day + timedelta(days=1)), last_seq), rows)

    def _range(self, day: date) -> tuple[int, int]:
        """After which number the day's file begins, and with which it ends."""
        after = self._last.last_seq if self._last else 0
        end, now = beginning(day + timedelta(days=1)), self._wall()
        with closing(open_for_reading(self._store.path)) as connection:
            next_seq = connection.execute(LATER_DAY, (after, utc_text(end), utc_text(now))).fetchone()[0]
            last_seq = connection.execute("SELECT max(seq) FROM results").fetchone()[0] or 0
        return after, max(after, last_seq if next_seq is None else next_seq - 1)

    def _place(self, day: date, head: str) -> Path:
        """Under a name that no other results have: neither of this results file, nor of one that a restore replaced."""
        with closing(open_for_reading(self._store.path)) as connection:
            earlier = connection.execute("SELECT file FROM exports WHERE day = ?", (day.isoformat(),)).fetchone()
        number = 1
        if earlier is not None:
            found = NUMBERED.fullmatch(earlier[0], len(f"results-{day}"))
            number = int(found[1]) + 1 if found else 2
        while True:
            path = self._section.folder / f"results-{day}{f'-{number}' if number > 1 else ''}.{self._section.format}"
            if not path.exists() or _begins_with(path, head):  # one that was killed before it was recorded
                return path
            number += 1

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

    def _first_line(self, day: date, after_seq: int) -> str:
        """What the file is, and which results are in it: the identity of their file, and behind which number."""
        with closing(open_for_reading(self._store.path)) as connection:
            file = connection.execute("SELECT id FROM identity").fetchone()[0]
        if self._section.format == "csv":
            whose = f"line {self._line}, day {day}, file {file}, after {after_seq}"
            return f"# coserve results: schema {SCHEMA}, {whose}\n"
        head = {"schema": SCHEMA, "kind": "results", "line": self._line, "day": str(day), "columns": RESULT_COLUMNS}
        return json.dumps(head | {"file": file, "after_seq": after_seq}) + "\n"


def _begins_with(path: Path, head: str) -> bool:
    if not path.is_file():  # a pipe would keep us waiting
        return False
    with path.open("rb") as file:
        return file.readline() == head.encode()


def beginning(day: date) -> datetime:
    return datetime.combine(day, time()).astimezone()


def last_exported(path: Path) -> Exported | None:
    """What was exported of these results so far."""
    with closing(open_for_reading(path)) as connection:
        rows = connection.execute("SELECT day, until, last_seq FROM exports ORDER BY rowid DESC LIMIT 1").fetchall()
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
