"""Tables of a device profile's file as migrations, and connections to write or read it.

Guarantees: a written file has a rollback journal (no WAL), so once closed it is one file that may be renamed; a file
that is read is copied into memory and migrated there.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from sqlite_utils import Database, Migrations

from agent.sqlite_files import migrate, primary_code, refuse_shared
from experts.errors import ConfigError, ProfileDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADER = b"SQLite format 3\x00"
AGAIN = "run `coserve profile LINE.yaml` again with --fresh, or move this file away to serve with a quick probe"
CHECK_IT = "check the disk and the file's permissions, then run the command again"
REFUSED_BY_DISK = frozenset(  # primary result codes that say nothing of what a file holds
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY}
)

TABLES = (
    """CREATE TABLE profile (
        id INTEGER PRIMARY KEY CHECK (id = 1), line TEXT NOT NULL, device TEXT NOT NULL, model TEXT NOT NULL,
        processors TEXT NOT NULL, cores INTEGER NOT NULL, host_bytes INTEGER NOT NULL, device_bytes INTEGER,
        versions TEXT NOT NULL, forms TEXT NOT NULL, finished_at TEXT
    )""",
    "CREATE TABLE parts (part TEXT PRIMARY KEY)",  # saved for this profile, not taken over from an earlier one
    "CREATE TABLE links (link TEXT PRIMARY KEY, bytes_per_s REAL NOT NULL CHECK (bytes_per_s > 0))",
    """CREATE TABLE kinds (
        kind TEXT NOT NULL, architecture TEXT NOT NULL, processor TEXT NOT NULL, precision TEXT NOT NULL,
        threads INTEGER NOT NULL CHECK (threads > 0), K_s REAL NOT NULL CHECK (K_s >= 0),
        B_s REAL NOT NULL CHECK (B_s >= 0), fit_error REAL NOT NULL,
        max_batch INTEGER NOT NULL CHECK (max_batch > 0), weight_bytes INTEGER NOT NULL CHECK (weight_bytes >= 0),
        workspace_base_bytes INTEGER NOT NULL CHECK (workspace_base_bytes >= 0),
        workspace_bytes INTEGER NOT NULL CHECK (workspace_bytes >= 0), load_s TEXT NOT NULL, samples TEXT NOT NULL,
        K_prompt_s REAL NOT NULL CHECK (K_prompt_s >= 0), K_output_s REAL NOT NULL CHECK (K_output_s >= 0),
        lease_bytes INTEGER NOT NULL CHECK (lease_bytes >= 0), PRIMARY KEY (kind, processor, precision)
    )""",
    """CREATE TABLE batches (
        kind TEXT NOT NULL, processor TEXT NOT NULL, precision TEXT NOT NULL,
        batch_size INTEGER NOT NULL CHECK (batch_size > 0), seconds TEXT NOT NULL,
        workspace_bytes INTEGER NOT NULL CHECK (workspace_bytes >= 0),
        PRIMARY KEY (kind, processor, precision, batch_size)
    )""",
    """CREATE TABLE agreements (
        expert TEXT NOT NULL, processor TEXT NOT NULL, kind TEXT NOT NULL, precision TEXT NOT NULL,
        images INTEGER NOT NULL, labels_differ INTEGER NOT NULL, largest_score_difference REAL NOT NULL,
        tolerance REAL NOT NULL, of_sha256 TEXT NOT NULL, least INTEGER NOT NULL CHECK (least > 0),
        PRIMARY KEY (expert, processor, precision)
    )""",
    """CREATE TABLE forms (
        expert TEXT NOT NULL, processor TEXT NOT NULL, kind TEXT NOT NULL, precision TEXT NOT NULL,
        why TEXT NOT NULL, verdict_sha256 TEXT NOT NULL, PRIMARY KEY (expert, processor)
    )""",
    """CREATE TABLE precisions (
        kind TEXT NOT NULL, processor TEXT NOT NULL, precision TEXT NOT NULL, PRIMARY KEY (kind, processor)
    )""",
    "CREATE TABLE speedups (processor TEXT PRIMARY KEY, factors TEXT NOT NULL)",
    """CREATE TABLE packed (
        expert TEXT NOT NULL, precision TEXT NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (expert, precision)
    )""",
    """CREATE TABLE usage_origin (
        id INTEGER PRIMARY KEY CHECK (id = 1), origin TEXT NOT NULL, requests INTEGER NOT NULL
    )""",
    "CREATE TABLE usage (expert TEXT PRIMARY KEY, probability REAL, pass_rate REAL)",
    "CREATE TABLE allocation_origin (id INTEGER PRIMARY KEY CHECK (id = 1), origin TEXT NOT NULL)",
    "CREATE TABLE allocation_budgets (pool TEXT PRIMARY KEY, budget_bytes INTEGER NOT NULL)",
    """CREATE TABLE allocation_pools (
        pool TEXT PRIMARY KEY, expert_bytes INTEGER NOT NULL, workspace_bytes INTEGER NOT NULL,
        experts INTEGER NOT NULL
    )""",
    "CREATE TABLE allocation_executors (processor TEXT PRIMARY KEY, executors INTEGER NOT NULL)",
    """CREATE TABLE trials (
        search TEXT NOT NULL, number INTEGER NOT NULL, setting TEXT NOT NULL, images_per_s REAL NOT NULL,
        note TEXT NOT NULL
    )""",
    "CREATE INDEX trials_search ON trials (search)",
    """CREATE TABLE decodings (
        expert TEXT PRIMARY KEY, images INTEGER NOT NULL CHECK (images > 0), megapixels REAL NOT NULL,
        full_s REAL NOT NULL, scaled_s REAL NOT NULL, smaller INTEGER NOT NULL, labels_differ INTEGER NOT NULL,
        largest_score_difference REAL NOT NULL, tolerance REAL NOT NULL, of_sha256 TEXT NOT NULL
    )""",
)

migrations = Migrations("profile")


@migrations()
def version_0_1(database: Database) -> None:
    """A released migration never changes: a later version adds its own below. Lists and mappings are JSON."""
    for statement in TABLES:
        database.execute(statement)


def open_for_writing(path: Path) -> Database:
    """Database of a profile, new or existing, migrated, every commit synced.

    Raises ProfileDamaged for no profile, ConfigError for another version's or a network share, sqlite3.OperationalError
    from the disk.
    """
    refuse_shared(path, "keep the profile on a local disk")
    if path.exists():
        check_header(path)
    database = Database(path)
    with closed_on_error(database), understood(path):
        _check_integrity(database, path)
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA synchronous = FULL")
        _bring_up_to_date(database, path, is_new=not database.execute("PRAGMA page_count").fetchone()[0])
    return database


def copy_in_memory(path: Path) -> Database:
    """Copy of a profile in memory, migrated there. Raises ConfigError for a file that is no profile."""
    check_header(path)
    copy = Database(memory=True)
    try:
        with closed_on_error(copy), understood(path, "is damaged or truncated"):
            # a finished profile is replaced, never written to, so it may be read without locks: nothing lies beside it
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as source:
                source.backup(copy.conn)
            _check_integrity(copy, path)  # of a file that is only read, SQLite does not check what its columns hold
            _bring_up_to_date(copy, path, is_new=False)
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} cannot be read ({error}) - {CHECK_IT}") from error
    return copy


@contextmanager
def closed_on_error(database: Database) -> Iterator[None]:
    try:
        yield
    except BaseException:
        database.close()
        raise


@contextmanager
def understood(path: Path, damaged: str = "is damaged") -> Iterator[None]:
    """Turn errors into ProfileDamaged, naming ``path``; errors of the disk stay sqlite3's."""
    try:
        yield
    except sqlite3.Error as error:
        if is_refused_by_disk(error):
            raise
        raise ProfileDamaged(path, f"{damaged} ({error})", AGAIN) from error
    except ValueError as error:
        raise ProfileDamaged(path, f"holds what no profile holds ({error})", AGAIN) from error


def check_header(path: Path) -> None:
    """Raises ConfigError for a file that cannot be opened, ProfileDamaged for a file that is not SQLite's."""
    try:
        with path.open("rb") as file:
            header = file.read(len(HEADER))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}) - correct its permissions") from error
    if header != HEADER:
        what = "is empty" if not header else "is not a SQLite file"
        raise ProfileDamaged(path, f"{what}, so it is no device profile", AGAIN)


def is_refused_by_disk(error: sqlite3.Error) -> bool:
    """Whether the disk is full, read-only, failing or locked."""
    return primary_code(error) in REFUSED_BY_DISK


def _check_integrity(database: Database, path: Path) -> None:
    found = [row[0] for row in database.execute("PRAGMA integrity_check")]
    if found != ["ok"]:
        raise ProfileDamaged(path, f"is damaged ({found[0]})", AGAIN)


def _bring_up_to_date(database: Database, path: Path, *, is_new: bool) -> None:
    if not is_new and not migrations.applied(database):
        raise ProfileDamaged(path, "is a SQLite file, but no device profile", "name another file, or move it away")
    migrate(database, migrations, path, AGAIN)
