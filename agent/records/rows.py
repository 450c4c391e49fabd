"""Stored results and boards as plain rows, for files and scripts: names and JSON values, and how they are written.

Guarantees: times are ISO 8601 with their offset; what is nested stays JSON, also inside a field of CSV; text is UTF-8.
"""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.records.results import BoardRow, ResultRow

Format: TypeAlias = Literal["csv", "jsonl"]

OF_SUBJECT = frozenset({"key", "component", "image", "arrived_at", "board", "board_type", "ref"})
RESULT_COLUMNS = (
    "seq", "key", "line", "component", "image", "verdict", "arrived_at", "finished_at", "seconds", "config_sha256",
    "board", "board_type", "ref", "label", "score", "reason", "experts", "detail", "kept_as",
)  # fmt: skip


def plain_result(row: ResultRow) -> dict[str, Any]:
    subject, result = row.result.subject, row.result
    values = {name: getattr(subject if name in OF_SUBJECT else result, name) for name in RESULT_COLUMNS[1:]}
    values["component"] = subject.component or ""
    return {"seq": row.seq} | {name: _plain(value) for name, value in values.items()}


def plain_board(row: BoardRow) -> dict[str, Any]:
    board = {name: _plain(value) for name, value in asdict(row.board).items()}
    return {"seq": row.seq, "revisions": row.revisions, "takt_s": row.takt_s} | board


class RowWriter:
    """Writes rows as JSON lines, or as CSV whose header is ``columns``, or the first row's where these are None."""

    def __init__(self, stream: TextIO, output: Format, columns: Sequence[str] | None = None) -> None:
        self._stream = stream
        self._is_csv = output == "csv"
        self._csv: csv.DictWriter[str] | None = None
        if self._is_csv and columns is not None:
            self._begin(columns)

    def write(self, row: dict[str, Any]) -> None:
        """One more row."""
        if not self._is_csv:
            self._stream.write(json.dumps(row) + "\n")
            return
        writer = self._csv or self._begin(list(row))
        writer.writerow({key: json.dumps(v) if isinstance(v, dict | list) else v for key, v in row.items()})

    def _begin(self, columns: Sequence[str]) -> csv.DictWriter[str]:
        self._csv = csv.DictWriter(self._stream, fieldnames=columns)
        self._csv.writeheader()
        return self._csv


def write_rows(rows: Iterable[dict[str, Any]], output: Format, stream: TextIO) -> None:
    writer = RowWriter(stream, output)
    for row in rows:
        writer.write(row)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return list(value) if isinstance(value, tuple) else value
