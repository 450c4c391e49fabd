"""Reworks of boards, stored: a closed run is over, and the next image of its serial opens a new one.

Guarantees: a run is reworked once. A rework has its place in the order of results, and counts from its commit on, also
after any end of the process.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from agent.records.boards import Rework
from agent.records.database import Rows, read_rows, utc_text

if TYPE_CHECKING:
    from pathlib import Path

    from sqlite_utils import Database

SHOWN = 50  # of a board, which a golden board exceeds in a month
COLUMNS = "serial, board_type, opened_at, after_seq, who, reason, at"
LAST_RUN = """
    SELECT opened_at FROM boards INDEXED BY boards_run WHERE serial = ? AND board_type = ? ORDER BY seq DESC LIMIT 1
"""
LAST_RESULT = "SELECT coalesce(max(seq), 0) FROM results"
INSERT = f"INSERT INTO reworks ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
OF_RUN = f"SELECT {COLUMNS} FROM reworks WHERE serial = ? AND board_type = ? AND opened_at = ?"
OF_BOARD = f"SELECT {COLUMNS} FROM reworks WHERE serial = ? AND board_type = ? ORDER BY number DESC LIMIT {SHOWN}"
LATEST = f"SELECT {COLUMNS} FROM reworks ORDER BY number DESC LIMIT ?"
REWORKS = Rows(Rework)
REPLAYED = 10_000  # newest ones: far more than boards that a restart may find closed and not forgotten


def last_run(database: Database, serial: str, board_type: str) -> datetime | None:
    """Opening of the last stored run of a board. Call inside a transaction."""
    row = database.execute(LAST_RUN, (serial, board_type)).fetchone()
    return None if row is None else datetime.fromisoformat(row[0])


def write_rework(database: Database, rework: Rework) -> Rework:
    """Write a rework behind the last result, if its run has none yet; the stored one. Call inside a transaction."""
    (after_seq,) = database.execute(LAST_RESULT).fetchone()
    run = rework.serial, rework.board_type, utc_text(rework.opened_at)
    database.execute(INSERT, (*run, after_seq, rework.who, rework.reason, utc_text(rework.at)))
    return REWORKS.record(next(database.query(OF_RUN, run)))


def reworks_of(path: Path, serial: str, board_type: str) -> tuple[Rework, ...]:
    """The latest reworks of a board, oldest first."""
    return tuple(map(REWORKS.record, reversed(read_rows(path, OF_BOARD, (serial, board_type)))))


def latest_reworks(path: Path) -> tuple[Rework, ...]:
    """Reworks for the replay of boards after a restart."""
    return tuple(map(REWORKS.record, read_rows(path, LATEST, (REPLAYED,))))
