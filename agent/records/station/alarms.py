"""Alarms of a line, and their rows: raised and cleared. The latest KEPT_ROWS stay."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from agent.records.database import read_rows, utc_text
from agent.records.results import AlarmRow

if TYPE_CHECKING:
    from pathlib import Path

    from sqlite_utils import Database

KEPT_ROWS = 100_000
COLUMNS = "number, name, message, raised_at, cleared_at"
RAISE = f"INSERT INTO alarms (name, message, raised_at) VALUES (?, ?, ?) RETURNING {COLUMNS}"
DROP_OLD = "DELETE FROM alarms WHERE number <= ?"
CLEAR = f"UPDATE alarms SET cleared_at = ? WHERE name = ? AND cleared_at IS NULL RETURNING {COLUMNS}"
OPEN = f"SELECT {COLUMNS} FROM alarms INDEXED BY alarms_open WHERE cleared_at IS NULL ORDER BY number"


@dataclass(frozen=True, slots=True)
class Alarm:
    """``name``: what it is about, such as camera/belt; ``message``: what is wrong, and what to do."""

    name: str
    message: str


def raise_alarm(database: Database, name: str, message: str, at: datetime) -> AlarmRow:
    """``name``, ``message``: storable. Call inside a transaction."""
    row = _row(database.execute(RAISE, (name, message, utc_text(at))).fetchone())
    database.execute(DROP_OLD, ((row.number or 0) - KEPT_ROWS,))
    return row


def clear_alarm(database: Database, name: str, at: datetime) -> list[AlarmRow]:
    """Clear the alarm of this name; empty if none is open. Call inside a transaction."""
    return [_row(row) for row in database.execute(CLEAR, (utc_text(at), name)).fetchall()]


def open_alarms(path: Path) -> list[AlarmRow]:
    return [_row(tuple(row)) for row in read_rows(path, OPEN)]


def _row(row: tuple[int, str, str, str, str | None]) -> AlarmRow:
    number, name, message, raised_at, cleared_at = row
    cleared = None if cleared_at is None else datetime.fromisoformat(cleared_at)
    return AlarmRow(number, name, message, datetime.fromisoformat(raised_at), cleared)
