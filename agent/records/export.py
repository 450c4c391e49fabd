"""Files of results for other programs: `results-FILE-FIRST-LAST.csv`, or `.jsonl`, each with one range of numbers.

Guarantees: a file appears under its name whole, or not at all. The ranges follow one another, so each result is in
exactly one file, whatever the clock showed. FILE is the identity of the results file: results that a restore brought
back overwrite nothing. A process that ends while a file appears writes the same range again at its next start.

The first line has the number of the schema: while that stays, columns may be added at the end, and none changes.
    CSV:   `# coserve results: schema 1, line LINE, file FILE, seq FIRST to LAST`, then a header, then rows
    JSONL: {"schema": 1, "kind": "results", "line": LINE, "file": FILE, "first_seq": 1, "last_seq": 9, "columns": [...]}
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING

from agent.records.database import read_rows, utc_text
from agent.records.result_reader import ResultReader
from agent.records.rows import RESULT_COLUMNS, RowWriter, plain_result
from experts.filesystem import make_folder, whole_text_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from sqlite_utils import Database

    from agent.line_file.records import ExportSection
    from agent.records.result_writer import ResultStore
    from agent.records.results import ResultRow

log = logging.getLogger(__name__)

SCHEMA = 1
FIRST_S = 60.0  # from the start of the agent to its first file
EVERY_S = 3600.0  # from one file to the next
STEP_ROWS = 500
NUMBER_DIGITS = 9  # file names sort as their numbers do
BEGIN = "INSERT OR REPLACE INTO exports (last_seq, first_seq, until, is_written) VALUES (?, ?, ?, 0)"
LATEST = """
    SELECT first_seq, last_seq, until, is_written FROM exports WHERE is_written >= ? ORDER BY last_seq DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class ExportedRange:
    """Numbers of one file. ``until``: when all results that were stored by then were in a file, by the wall clock."""

    first_seq: int
    last_seq: int
    until: datetime
    is_written: bool = False

    def until_s(self, now_s: float) -> float:
        """Time up to which unnamed files count as exported; -inf if the clock was ahead when the range was taken."""
        until_s = self.until.timestamp()
        return until_s if until_s <= now_s else -math.inf


class ResultExport:
    """Writes a file when one is due, STEP_ROWS with each ``step``, and counts ``files`` and ``rows`` since the start.

    For one thread at a time. ``clock``: monotonic seconds.
    """

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
        self._due_s = clock() + FIRST_S
        self._work: Iterator[None] | None = None
        self.files = 0
        self.rows = 0

    def step(self) -> None:
        """Write a part of a file, if one is due. Raises OSError: the next step begins it anew."""
        if self._work is None:
            if self._clock() < self._due_s:
                return
            self._work = self._write()
        try:
            next(self._work)
        except StopIteration:
            self._work = None
            self._due_s = self._clock() + EVERY_S
        except BaseException:
            self._work = None
            raise

    def stop(self) -> None:
        if self._work is not None:
            self._work.close()  # type: ignore[attr-defined]  # it is a generator
            self._work = None

    def _write(self) -> Iterator[None]:
        part = yield from self._next_range()
        if part is None:
            return
        file = read_rows(self._store.path, "SELECT id FROM identity")[0][0]
        numbers = f"{part.first_seq:0{NUMBER_DIGITS}}-{part.last_seq:0{NUMBER_DIGITS}}"
        path = self._section.folder / f"results-{file}-{numbers}.{self._section.format}"
        reader, at, rows = ResultReader(self._store.path), part.first_seq - 1, 0
        make_folder(self._section.folder)
        with whole_text_file(path) as stream:
            stream.write(self._first_line(file, part))
            writer = RowWriter(stream, self._section.format, RESULT_COLUMNS)
            while found := reader.select(
                "SELECT * FROM results WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?", (at, part.last_seq, STEP_ROWS)
            ):
                for row in found:
                    writer.write(plain_result(_local(row)))
                at, rows = found[-1].seq, rows + len(found)
                yield
        self._store.write(partial(_mark_written, part))
        self.files += 1
        self.rows += rows
        log.info("results_exported file=%s rows=%d", path, rows)

    def _next_range(self) -> Generator[None, None, ExportedRange | None]:
        """The range to write, on the disk before its file: also after a kill its name and content are the same."""
        latest, now = _latest_range(self._store.path), self._wall()
        if latest is not None and not latest.is_written:
            return latest
        exported = 0 if latest is None else latest.last_seq
        last_seq = read_rows(self._store.path, "SELECT max(seq) FROM results")[0][0] or 0
        if last_seq <= exported:
            return None
        part = ExportedRange(exported + 1, last_seq, now)
        is_stored = Event()
        self._store.write(partial(_begin, part), lambda _: is_stored.set())
        while not is_stored.is_set():
            yield
        return part

    def _first_line(self, file: str, part: ExportedRange) -> str:
        if self._section.format == "csv":
            whose = f"line {self._line}, file {file}, seq {part.first_seq} to {part.last_seq}"
            return f"# coserve results: schema {SCHEMA}, {whose}\n"
        head = {"schema": SCHEMA, "kind": "results", "line": self._line, "file": file}
        head |= {"first_seq": part.first_seq, "last_seq": part.last_seq, "columns": RESULT_COLUMNS}
        return json.dumps(head) + "\n"


def last_exported(path: Path) -> ExportedRange | None:
    return _latest_range(path, is_written=True)


def _latest_range(path: Path, *, is_written: bool = False) -> ExportedRange | None:
    ranges = [
        ExportedRange(first_seq, last_seq, datetime.fromisoformat(until), bool(is_done))
        for first_seq, last_seq, until, is_done in read_rows(path, LATEST, (is_written,))
    ]
    return ranges[0] if ranges else None


def _begin(part: ExportedRange, database: Database) -> None:
    database.execute(BEGIN, (part.last_seq, part.first_seq, utc_text(part.until)))


def _mark_written(part: ExportedRange, database: Database) -> None:
    database.execute("UPDATE exports SET is_written = 1 WHERE last_seq = ?", (part.last_seq,))


def _local(row: ResultRow) -> ResultRow:
    subject = replace(row.result.subject, arrived_at=row.result.subject.arrived_at.astimezone())
    finished_at = row.result.finished_at.astimezone()
    return replace(row, result=replace(row.result, subject=subject, finished_at=finished_at))
