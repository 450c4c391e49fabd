"""The journal: accepted requests without a verdict, each with its image.

Guarantees: a committed request is offered again by every start until its result is stored or it is withdrawn. An image
is kept once, even with several requests for its parts, until the last request ends. A folder's files are not in the
journal: a claimed file stays in its folder until its verdict is stored.

The functions run inside their caller's transaction.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from agent.records.database import Rows, as_column, open_for_reading
from agent.subject import PART_MARK, Subject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sqlite_utils import Database

OF_SUBJECT = "key source component expert board board_type ref box asked_sha256"
COLUMNS = f"{OF_SUBJECT} name accepted_at"
SUBJECTS = Rows(Subject)
INSERT = f"INSERT INTO accepted ({COLUMNS.replace(' ', ', ')}, image) VALUES (:{COLUMNS.replace(' ', ', :')}, :image)"
OF_KEY = "key = :key OR (key > :key || '#' AND key < :key || '$')"  # $ follows # in ASCII
ASKED = f"SELECT asked_sha256 FROM results WHERE {OF_KEY} UNION SELECT asked_sha256 FROM accepted WHERE {OF_KEY}"


class Acceptance(StrEnum):
    """State of a request after ``accept``."""

    NEW = "new"
    UNDER_WAY = "under way"
    JUDGED = "judged"
    REUSED = "reused"  # the key belongs to another request; no row was written


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Request of an earlier run. ``image``: number of its bytes in the journal."""

    subject: Subject
    image: int


class JournalReader:
    """Reads the journal of a line, with or without a writing agent. Each call is one short query."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def unfinished(self) -> list[Unfinished]:
        with closing(open_for_reading(self.path)) as connection:
            rows = connection.execute("SELECT * FROM accepted ORDER BY rowid").fetchall()
        return [
            Unfinished(SUBJECTS.record(row, image=row["name"], arrived_at=row["accepted_at"]), row["image"])
            for row in rows
        ]

    def content(self, image: int) -> bytes | None:
        """Bytes of an image; None if all its requests have ended."""
        with closing(open_for_reading(self.path)) as connection:
            rows = connection.execute("SELECT content FROM accepted_images WHERE id = ?", (image,)).fetchall()
        return bytes(rows[0][0]) if rows else None

    def asked(self, key: str) -> set[str | None]:
        """Digests of the orders under this key, or for parts of it; empty for an unknown key."""
        with closing(open_for_reading(self.path)) as connection:
            return {asked for (asked,) in connection.execute(ASKED, {"key": key}).fetchall()}


def values(subject: Subject) -> dict[str, object]:
    """Values of a row. Raises ValueError for a time without zone."""
    row = {name: getattr(subject, name) for name in OF_SUBJECT.split()}
    row |= {"name": subject.image, "accepted_at": subject.arrived_at}
    return {name: as_column(value) for name, value in row.items()}


def accept(database: Database, rows: Sequence[Mapping[str, object]], content: bytes) -> list[Acceptance]:
    """Write new rows, with the image if any row is new. All rows are REUSED, or none is."""
    if any(_is_reused(database, key, asked) for key, asked in {_given(row) for row in rows}):
        return [Acceptance.REUSED] * len(rows)
    image: int | None = None
    answers = []
    for row in rows:
        answer = _known(database, str(row["key"]))
        if answer is Acceptance.NEW:
            if image is None:
                sql = "INSERT INTO accepted_images (content) VALUES (?) RETURNING id"
                image = database.execute(sql, (content,)).fetchall()[0][0]
            database.execute(INSERT, {**row, "image": image})
        answers.append(answer)
    return answers


def end(database: Database, key: str) -> None:
    """Delete a request; the last request of an image also deletes the image."""
    found = database.execute("DELETE FROM accepted WHERE key = ? RETURNING image", (key,)).fetchall()
    for (image,) in found:
        database.execute(
            "DELETE FROM accepted_images WHERE id = ? AND NOT EXISTS (SELECT 1 FROM accepted WHERE image = ?)",
            (image, image),
        )


def _given(row: Mapping[str, object]) -> tuple[str, object]:
    return str(row["key"]).partition(PART_MARK)[0], row["asked_sha256"]


def _is_reused(database: Database, key: str, asked: object) -> bool:
    return asked is not None and any(known != asked for (known,) in database.execute(ASKED, {"key": key}).fetchall())


def _known(database: Database, key: str) -> Acceptance:
    if database.execute("SELECT 1 FROM results WHERE key = ?", (key,)).fetchall():
        return Acceptance.JUDGED
    if database.execute("SELECT 1 FROM accepted WHERE key = ?", (key,)).fetchall():
        return Acceptance.UNDER_WAY
    return Acceptance.NEW
