"""Results and boards as plain rows for other programs, and files of them: `results-FILE-FIRST-LAST.csv`, or `.jsonl`.

Guarantees: times are ISO 8601 with their offset; nested values stay JSON, also inside a field of CSV. A file appears
atomically. Ranges are consecutive, so each result is in exactly one file, at any state of the clock. While the folder's
share is away, no range is begun or counts as written. FILE is the
identity of the results file, so results of a restored backup overwrite no file. A process that ends during a write
writes the same range again at its next start.

A head has the number of the schema: under one number, columns may be added at the end, and none changes.
    {"schema": 1, "kind": "results", "line": LINE, "file": FILE, "first_seq": 1, "last_seq": 9, "columns": [...]}
It is the first line of JSONL. Beside NAME.csv it is the file NAME.schema.json, with schema 2.

CSV is for spreadsheets, too: each line and each line break in a cell ends in LF, and a text that a spreadsheet would
take for a formula, or that begins with ', has a ' before it. Without that one ' it is the stored text.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from dataclasses import dataclass, replace
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

from agent.faults.housekeeping import Rounds
from agent.places.mounts import MountedFolder
from agent.records.boards import BoardVerdict
from agent.records.database import Rows, read_rows, utc_text
from agent.records.result_reader import ResultReader
from experts.filesystem import whole_text_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from pathlib import Path

    from agent.line_file.records import ExportSection
    from agent.records.result_writer import ResultStore
    from agent.records.verdict import Result

log = logging.getLogger(__name__)

Format: TypeAlias = Literal["csv", "jsonl"]

RESULT_COLUMNS = (
    "seq", "key", "line", "component", "image", "verdict", "arrived_at", "finished_at", "seconds", "config_sha256",
    "board", "board_type", "ref", "label", "score", "reason", "experts", "detail", "kept_as", "unproven",
)  # fmt: skip
BOARD_COLUMNS = tuple(dict.fromkeys(("seq", "revisions", "takt_s", *BoardVerdict.__slots__)))
SCHEMA = {"jsonl": 1, "csv": 2}
BOM = "\ufeff"  # Excel takes a file without it for the code page of Windows
FORMULA = re.compile(r"['=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # first characters; the last four are full-width
FIRST_S = 60.0  # from the agent's start to the first file
EVERY_S = 3600.0  # from one file to the next
STEP_ROWS = 500
NUMBER_DIGITS = 9  # digits, so that file names sort by number
BEGIN = "INSERT OR REPLACE INTO exports (last_seq, first_seq, until, is_written) VALUES (?, ?, ?, 0)"
LATEST = """
    SELECT first_seq, last_seq, until, is_written FROM exports WHERE is_written >= ? ORDER BY last_seq DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class ExportedRange:
    """Numbers of one file. ``until``: wall-clock time; all results stored before are in a file."""

    first_seq: int
    last_seq: int
    until: datetime
    is_written: bool = False

    def until_s(self, now_s: float) -> float:
        """Time up to which unnamed files count as exported; -inf if the clock was ahead when the range was taken."""
        until_s = self.until.timestamp()
        return until_s if until_s <= now_s else -math.inf


RANGES = Rows(ExportedRange)


class ResultExport(Rounds):
    """Writes a file when due, STEP_ROWS per ``step``. ``wall``: time with time zone."""

    def __init__(
        self,
        section: ExportSection,
        line: str,
        store: ResultStore,
        wall: Callable[[], datetime],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(clock, clock() + FIRST_S)
        self._store = store
        self._section = section
        self._line = line
        self._wall = wall
        self._place = MountedFolder(section.folder, store.path.parent / "places")

    def _steps(self) -> Generator[None, None, None]:
        self._place.make()
        part = yield from self._next_range()
        if part is not None:
            yield from self._write_file(part)
        self._due_s = self._clock() + EVERY_S

    def _next_range(self) -> Generator[None, None, ExportedRange | None]:
        """Next range, stored before its file is written: after a kill, name and content are equal."""
        latest, now = _latest_range(self._store.path), self._wall()
        if latest is not None and not latest.is_written:
            return latest
        exported = 0 if latest is None else latest.last_seq
        last_seq = read_rows(self._store.path, "SELECT max(seq) FROM results")[0][0] or 0
        if last_seq <= exported:
            return None
        part = ExportedRange(exported + 1, last_seq, now)
        values = part.last_seq, part.first_seq, utc_text(part.until)
        yield from self._store.written(lambda database: database.execute(BEGIN, values))
        return part

    def _write_file(self, part: ExportedRange) -> Iterator[None]:
        file = read_rows(self._store.path, "SELECT id FROM identity")[0][0]
        numbers = f"{part.first_seq:0{NUMBER_DIGITS}}-{part.last_seq:0{NUMBER_DIGITS}}"
        path = self._section.folder / f"results-{file}-{numbers}.{self._section.format}"
        reader, at, rows = ResultReader(self._store.path), part.first_seq - 1, 0
        head: dict[str, object] = {"schema": SCHEMA[self._section.format], "kind": "results"}
        head |= {"line": self._line, "file": file, "first_seq": part.first_seq, "last_seq": part.last_seq}
        first_line = json.dumps(head | {"columns": RESULT_COLUMNS}) + "\n"
        if self._section.format == "csv":
            with whole_text_file(path.with_suffix(".schema.json")) as schema:
                schema.write(first_line)
            first_line = csv_head(RESULT_COLUMNS, bom=self._section.bom)
        with whole_text_file(path) as stream:
            stream.write(first_line)
            while found := reader.select(
                "SELECT * FROM results WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?", (at, part.last_seq, STEP_ROWS)
            ):
                write_rows(map(_local_row, found), self._section.format, stream, RESULT_COLUMNS)
                at, rows = found[-1].seq, rows + len(found)
                yield
        self._place.find()  # else the file is on a bare mount point
        marked = "UPDATE exports SET is_written = 1 WHERE last_seq = ?"
        self._store.write(lambda database: database.execute(marked, (part.last_seq,)))
        log.info("results_exported file=%s rows=%d", path, rows)


def last_exported(path: Path) -> ExportedRange | None:
    return _latest_range(path, is_written=True)


def _latest_range(path: Path, *, is_written: bool = False) -> ExportedRange | None:
    return next(map(RANGES.record, read_rows(path, LATEST, (is_written,))), None)


def _local_row(row: Result) -> dict[str, Any]:
    subject = replace(row.subject, arrived_at=row.subject.arrived_at.astimezone())
    return plain_result(replace(row, subject=subject, finished_at=row.finished_at.astimezone()))


def plain_result(row: Result) -> dict[str, Any]:
    values = row.flat(RESULT_COLUMNS) | {"component": row.subject.component or ""}
    return {name: _plain(value) for name, value in values.items()}


def plain_board(board: BoardVerdict) -> dict[str, Any]:
    return {name: _plain(getattr(board, name)) for name in BOARD_COLUMNS}


def csv_head(columns: Sequence[str], *, bom: bool = False) -> str:
    return (BOM if bom else "") + ",".join(columns) + "\n"


def write_rows(
    rows: Iterable[dict[str, Any]], output: Format, stream: TextIO, columns: Sequence[str] | None = None
) -> int:
    """Write rows as JSON lines or CSV; returns their number. ``columns``: columns of a CSV whose header is written
    already; else the first row makes the header."""
    writer = None if columns is None else csv.DictWriter(stream, columns, lineterminator="\n")
    count = 0
    for row in rows:
        count += 1
        if output == "jsonl":
            stream.write(json.dumps(row) + "\n")
            continue
        if writer is None:
            writer = csv.DictWriter(stream, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return count


def _cell(value: object) -> object:
    if isinstance(value, dict | list):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if FORMULA.match(text) else text


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return list(value) if isinstance(value, tuple) else value
