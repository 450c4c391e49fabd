"""Alarms of a line, and their rows: raised and cleared. The latest KEPT_ROWS stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.records.database import Rows, read_rows, utc_text
from agent.records.verdict import AlarmRow

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from sqlite_utils import Database

KEPT_ROWS = 100_000
COLUMNS = "number, name, message, raised_at, cleared_at"
RAISE = f"INSERT INTO alarms (name, message, raised_at) VALUES (?, ?, ?) RETURNING {COLUMNS}"
DROP_OLD = "DELETE FROM alarms WHERE number <= ?"
CLEAR = f"UPDATE alarms SET cleared_at = ? WHERE name = ? AND cleared_at IS NULL RETURNING {COLUMNS}"
OPEN = f"SELECT {COLUMNS} FROM alarms INDEXED BY alarms_open WHERE cleared_at IS NULL ORDER BY number"
ALARMS = Rows(AlarmRow)


@dataclass(frozen=True, slots=True)
class Alarm:
    """``name``: the subject, such as camera/belt; ``message``: the fault, and what to do."""

    name: str
    message: str


def raise_alarm(database: Database, name: str, message: str, at: datetime) -> AlarmRow:
    """``name``, ``message``: storable. Call inside a transaction."""
    row = ALARMS.record(next(database.query(RAISE, (name, message, utc_text(at)))))
    database.execute(DROP_OLD, ((row.number or 0) - KEPT_ROWS,))
    return row


def clear_alarm(database: Database, name: str, at: datetime) -> list[AlarmRow]:
    """Clear the alarm of this name; empty if none is open. Call inside a transaction."""
    return list(map(ALARMS.record, database.query(CLEAR, (utc_text(at), name))))


def open_alarms(path: Path) -> list[AlarmRow]:
    return list(map(ALARMS.record, read_rows(path, OPEN)))
