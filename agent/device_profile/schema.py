"""Tables of a device profile's file as migrations, and connections to write or read it.

Guarantees: a file is written with a rollback journal (no WAL), so once closed it is one file that may be renamed. A
file is read through a copy in memory, which is migrated there.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from sqlite_utils import Database, Migrations

from agent.faults.errors import ProfileDamaged
from agent.places.sqlite_files import migrate, primary_code, refuse_shared
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADER = b"SQLite format 3\x00"
AGAIN = "run `coserve profile LINE.yaml` again with --fresh, or move this file away to serve with a quick probe"
CHECK_IT = "check the disk and the file's permissions, then run the command again"
REFUSED_BY_DISK = frozenset(  # primary result codes of the disk, not of the file's content
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY}
)

# Columns have no types: each value is checked by its table when it is written and when it is read.
TABLES = {
    "profile": "line, device, model, processors, cores, host_bytes, device_bytes, versions, forms, finished_at",
    "parts": "part PRIMARY KEY",  # saved for this profile, not taken over from an earlier one
    "links": "link PRIMARY KEY, bytes_per_s",
    "kinds": """kind, architecture, processor, precision, threads, K_s, B_s, fit_error, max_batch, weight_bytes,
        workspace_base_bytes, workspace_bytes, load_s, samples, K_prompt_s, K_output_s, lease_bytes,
        PRIMARY KEY (kind, processor, precision)""",
    "batches": """kind, processor, precision, batch_size, seconds, workspace_bytes,
        PRIMARY KEY (kind, processor, precision, batch_size)""",
    "agreements": """expert, processor, kind, precision, images, labels_differ, largest_score_difference, tolerance,
        of_sha256, least, PRIMARY KEY (expert, processor, precision)""",
    "forms": "expert, processor, kind, precision, why, verdict_sha256, PRIMARY KEY (expert, processor)",
    "precisions": "kind, processor, precision, PRIMARY KEY (kind, processor)",
    "speedups": "processor PRIMARY KEY, factors",
    "packed": "expert, precision, sha256, PRIMARY KEY (expert, precision)",
    "usage_origin": "origin, requests",
    "usage": "expert PRIMARY KEY, probability, pass_rate",
    "allocation_origin": "origin",
    "allocation_budgets": "pool PRIMARY KEY, budget_bytes",
    "allocation_pools": "pool PRIMARY KEY, expert_bytes, workspace_bytes, experts",
    "allocation_executors": "processor PRIMARY KEY, executors",
    "trials": "search, number, setting, images_per_s, note, PRIMARY KEY (search, number)",
    "decodings": """expert PRIMARY KEY, images, megapixels, full_s, scaled_s, smaller, labels_differ,
        largest_score_difference, tolerance, of_sha256""",
}

migrations = Migrations("profile")


@migrations()
def version_0_1(database: Database) -> None:
    """A released migration never changes: a later version adds its own below. Lists and mappings are JSON."""
    for name, columns in TABLES.items():
        database.execute(f"CREATE TABLE {name} ({columns})")


@migrations()
def cpu_and_drive(database: Database) -> None:
    """Empty in a profile from before: not compared."""
    for column in ("cpu", "drive"):
        database.execute(f"ALTER TABLE profile ADD COLUMN {column} DEFAULT ''")


@migrations()
def samples_by_class(database: Database) -> None:
    """A form's proof from before counted no classes, and stands until it is compared again. One of smaller JPEGs is
    bound to nothing: images are decoded in full until the next profile."""
    for table in ("agreements", "decodings"):
        for column in ("failing", "least_each"):
            database.execute(f"ALTER TABLE {table} ADD COLUMN {column} DEFAULT 0")
    database.execute("ALTER TABLE decodings ADD COLUMN least DEFAULT 0")
    database.execute("ALTER TABLE decodings ADD COLUMN bound_sha256 DEFAULT ''")


@migrations()
def gain_of_graphs(database: Database) -> None:
    """A profile from before runs without CUDA graphs."""
    database.execute("ALTER TABLE profile ADD COLUMN graphs DEFAULT '{}'")


def open_for_writing(path: Path) -> Database:
    """Database of a profile, new or existing, migrated, every commit synced. Raises ProfileDamaged for any other file,
    ConfigError for another version's profile or a network share, and sqlite3.OperationalError from the disk."""
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
    """Copy of a profile in memory, migrated there. Raises ConfigError for any other file."""
    check_header(path)
    copy = Database(memory=True)
    try:
        with closed_on_error(copy), understood(path, "is damaged or truncated"):
            # A finished profile is replaced, never written to: it has no journal, and needs no lock.
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as source:
                source.backup(copy.conn)
            _check_integrity(copy, path)  # SQLite checks nothing of a file that is only read
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
    """Turn errors into ProfileDamaged, naming ``path``; the disk's stay sqlite3.Error."""
    try:
        yield
    except sqlite3.Error as error:
        if is_refused_by_disk(error):
            raise
        raise ProfileDamaged(path, f"{damaged} ({error})", AGAIN) from error
    except ValueError as error:
        raise ProfileDamaged(path, f"has invalid content ({error})", AGAIN) from error


def check_header(path: Path) -> None:
    """Raises ConfigError for a file that cannot be opened, ProfileDamaged for a file that is not SQLite's."""
    try:
        with path.open("rb") as file:
            header = file.read(len(HEADER))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}) - correct its permissions") from error
    if header != HEADER:
        what = "is empty" if not header else "is not a SQLite file"
        raise ProfileDamaged(path, f"{what}, so it is not a device profile", AGAIN)


def is_refused_by_disk(error: sqlite3.Error) -> bool:
    """True if the disk is full, read-only or failing, or the file is locked."""
    return primary_code(error) in REFUSED_BY_DISK


def _check_integrity(database: Database, path: Path) -> None:
    found = [row[0] for row in database.execute("PRAGMA integrity_check")]
    if found != ["ok"]:
        raise ProfileDamaged(path, f"is damaged ({found[0]})", AGAIN)


def _bring_up_to_date(database: Database, path: Path, *, is_new: bool) -> None:
    if not is_new and not migrations.applied(database):
        raise ProfileDamaged(path, "is a SQLite file, but not a device profile", "name another file, or move it away")
    migrate(database, migrations, path, AGAIN)
