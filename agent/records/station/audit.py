"""Audit: who changed what, from where the records are read, one row for each call that changes something.

Guarantees: a call is in the log at once and in the database with the next commit. Any text can be recorded: a long one
is cut, one that is not Unicode is shown with marks. Recording never fails a call.

Each class of calls, an action done or an action refused, has rows of its own, so that none pushes another out. The
latest KEPT_ROWS of each action that was done stay, at any age; of triggers and refused calls, which machines repeat,
the latest ORDINARY_ROWS, and no longer than results (``retention``).
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from datetime import datetime  # noqa: TC003  # pydantic reads it
from typing import TYPE_CHECKING

from agent.records.database import Rows, read_rows, utc_text
from agent.records.result_reader import LARGEST_SEQ

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlite_utils import Database

    from agent.records.result_writer import ResultStore

log = logging.getLogger(__name__)

KEPT_ROWS = 100_000  # about 20 MB
ORDINARY_ROWS = 20_000
ORDINARY, DONE = "trigger", "done"
IS_ORDINARY = f"(action = '{ORDINARY}' OR outcome != '{DONE}')"
TRIMMED_EVERY = 500  # rows of a class: finding the oldest one to keep takes 1 ms
LONGEST_TEXT = 500
INSERT = "INSERT INTO audit (at, who, role, action, subject, outcome, config_sha256) VALUES (?, ?, ?, ?, ?, ?, ?)"
OF_CLASS = "audit INDEXED BY audit_class WHERE action = ?1 AND (outcome = 'done') = ?2"
DROP_OLD = f"""
    DELETE FROM {OF_CLASS} AND number <= (SELECT number FROM {OF_CLASS} ORDER BY number DESC LIMIT 1 OFFSET ?3)
"""
PAGE = "SELECT * FROM audit WHERE number < ? ORDER BY number DESC LIMIT ?"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A call that changed something, or was refused. ``who``: a token's name, ``owner`` or ``signal``; ``outcome``:
    done, or why not; ``config_sha256``: digest of the line file served meanwhile."""

    number: int
    at: datetime
    who: str
    role: str
    action: str
    subject: str
    outcome: str
    config_sha256: str


ENTRIES = Rows(AuditEntry)


class AuditTrail:
    """For any thread; returns at once."""

    def __init__(self, store: ResultStore, wall: Callable[[], datetime]) -> None:
        self._store = store
        self._wall = wall
        self._written = Counter[tuple[str, bool]]()  # on the store's thread

    def record(self, who: str, role: str, action: str, subject: str, outcome: str, config_sha256: str) -> None:
        """Record a call; arguments as in ``AuditEntry``."""
        texts = [storable(text) for text in (who, role, action, subject, outcome, config_sha256)]
        log.info("audited who=%s role=%s action=%s subject=%r outcome=%r", *texts[:-1])
        values = utc_text(self._wall()), *texts

        def write(database: Database) -> None:
            database.execute(INSERT, values)
            action, is_done = class_ = texts[2], texts[4] == DONE
            if self._written[class_] % TRIMMED_EVERY == 0:
                kept = KEPT_ROWS if is_done and action != ORDINARY else ORDINARY_ROWS
                database.execute(DROP_OLD, (*class_, kept))
            self._written[class_] += 1

        try:
            self._store.write(write)
        except RuntimeError:  # the store is closed: the agent ends
            log.warning("audited_in_the_log_only action=%s", action)


def audit_page(path: Path, before: int | None = None, limit: int = 50) -> tuple[AuditEntry, ...]:
    """Newest first. ``before``: number of the last entry of the page before."""
    return tuple(map(ENTRIES.record, read_rows(path, PAGE, (LARGEST_SEQ if before is None else before, limit))))


def storable(text: str) -> str:
    """Any text as a row can hold it, LONGEST_TEXT characters at most."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."
