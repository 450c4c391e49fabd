"""SQLite file of a line: durable (WAL, every commit synced), migrated, refused on a network share.

A damaged file is put aside, never deleted, and a new file replaces it. Readable accepted requests, undelivered
messages, alarms and the audit are copied. The new file has a new identity, because its numbers restart.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pwd
import re
import sqlite3
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import TypeAdapter
from sqlite_utils import Database, Migrations

from agent.faults.errors import AlreadyRunning, StateOfAnother, StateUnusable
from agent.places.sqlite_files import JOURNALS, migrate, primary_code, refuse_shared, remove_database
from experts.filesystem import make_folder, take_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0
CHECK_S = 2.0  # integrity check at a start: enough for 2 GB
DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
OWED = ("accepted_images", "accepted", "outbox_receivers", "outbox", "alarms", "audit")
ORPHANS = "DELETE FROM accepted WHERE image NOT IN (SELECT id FROM accepted_images) RETURNING key"
JOURNAL_LIMIT_BYTES = 64 * 1024 * 1024
ASIDE = re.compile(r"\.[a-z]+-\d{8}T\d{6}\.\d+")  # ending of an exchanged file's name
LOCK_NAME = "agent.lock"
JSON_COLUMNS = ("experts", "missing", "counts", "box")

Record = TypeVar("Record")

# Python's JSON may contain NaN, which SQLite cannot read: without the check such a row could not be stored
IMAGE_SHA256 = "CASE WHEN json_valid(detail) THEN json_extract(detail, '$.image_sha256') END"
OF_ONE_PART = "json_valid(detail) AND json_extract(detail, '$.box') IS NULL"  # no part of a larger image
BOARD_CHANGED = "INSERT OR REPLACE INTO board_changes (board) VALUES (NEW.seq)"

TABLES = (
    # AUTOINCREMENT: no number is reused, even after old rows are deleted
    """CREATE TABLE results (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, line TEXT NOT NULL, board TEXT,
        board_type TEXT, component TEXT NOT NULL, ref TEXT, image TEXT NOT NULL,
        verdict TEXT NOT NULL CHECK (verdict IN ('OK', 'NG', 'UNKNOWN')), label TEXT, score REAL, reason TEXT,
        experts TEXT NOT NULL, detail TEXT NOT NULL, arrived_at TEXT NOT NULL, finished_at TEXT NOT NULL,
        seconds REAL NOT NULL, config_sha256 TEXT NOT NULL, kept_as TEXT, asked_sha256 TEXT
    )""",
    "CREATE INDEX results_finished_at ON results (finished_at)",
    "CREATE INDEX results_board ON results (board, board_type)",
    "CREATE INDEX results_kept_as ON results (kept_as) WHERE kept_as IS NOT NULL",
    f"CREATE INDEX results_content ON results ({IMAGE_SHA256}) WHERE {IMAGE_SHA256} IS NOT NULL",
    # anomaly maps as small PNGs
    """CREATE TABLE anomaly_maps (
        seq INTEGER NOT NULL REFERENCES results, step INTEGER NOT NULL, expert TEXT NOT NULL, png BLOB NOT NULL,
        PRIMARY KEY (seq, step)
    )""",
    "CREATE TRIGGER anomaly_maps_go AFTER DELETE ON results BEGIN DELETE FROM anomaly_maps WHERE seq = OLD.seq; END",
    """CREATE TABLE boards (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, serial TEXT NOT NULL, board_type TEXT NOT NULL,
        verdict TEXT NOT NULL CHECK (verdict IN ('OK', 'NG', 'UNKNOWN')), opened_at TEXT NOT NULL,
        closed_at TEXT NOT NULL, missing TEXT NOT NULL, counts TEXT NOT NULL, revisions INTEGER NOT NULL DEFAULT 0,
        takt_s REAL, UNIQUE (serial, board_type, opened_at)
    )""",
    "CREATE INDEX boards_closed_at ON boards (closed_at)",
    "CREATE INDEX boards_of_type ON boards (board_type, closed_at)",
    # the latest change of each board's verdict: a watcher resumes by its number
    "CREATE TABLE board_changes (number INTEGER PRIMARY KEY AUTOINCREMENT, board INTEGER NOT NULL UNIQUE)",
    f"CREATE TRIGGER boards_come AFTER INSERT ON boards BEGIN {BOARD_CHANGED}; END",
    f"CREATE TRIGGER boards_change AFTER UPDATE ON boards BEGIN {BOARD_CHANGED}; END",
    "CREATE TRIGGER boards_go AFTER DELETE ON boards BEGIN DELETE FROM board_changes WHERE board = OLD.seq; END",
    # the journal: requests without a verdict, and their images, which several requests may share
    "CREATE TABLE accepted_images (id INTEGER PRIMARY KEY, content BLOB NOT NULL)",
    """CREATE TABLE accepted (
        key TEXT NOT NULL UNIQUE, source TEXT NOT NULL, component TEXT, expert TEXT, board TEXT, board_type TEXT,
        ref TEXT, name TEXT NOT NULL, box TEXT, accepted_at TEXT NOT NULL,
        image INTEGER NOT NULL REFERENCES accepted_images, asked_sha256 TEXT
    )""",
    "CREATE INDEX accepted_image ON accepted (image)",
    # distinguishes this file's sequence numbers from another file's
    "CREATE TABLE identity (id TEXT NOT NULL)",
    "INSERT INTO identity VALUES (lower(hex(randomblob(4))))",
    """CREATE TABLE outbox (
        number INTEGER PRIMARY KEY AUTOINCREMENT, receiver TEXT NOT NULL, id TEXT NOT NULL, event TEXT NOT NULL,
        board TEXT, payload TEXT NOT NULL, UNIQUE (receiver, id)
    )""",
    "CREATE INDEX outbox_receiver ON outbox (receiver, number)",
    """CREATE TABLE outbox_receivers (
        receiver TEXT PRIMARY KEY, waiting INTEGER NOT NULL DEFAULT 0, given_way INTEGER NOT NULL DEFAULT 0
    )""",
    """CREATE TABLE exports (
        last_seq INTEGER PRIMARY KEY, first_seq INTEGER NOT NULL, until TEXT NOT NULL, is_written INTEGER NOT NULL
    )""",
    # images marked for removal
    "CREATE TABLE leaving (path BLOB PRIMARY KEY, mtime_ns INTEGER NOT NULL, reason TEXT NOT NULL)",
    """CREATE TABLE shadow_answers (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, image TEXT NOT NULL, component TEXT,
        expert TEXT NOT NULL, shadow TEXT NOT NULL, expert_sha256 TEXT NOT NULL, shadow_sha256 TEXT NOT NULL,
        label TEXT NOT NULL, score REAL NOT NULL, passes INTEGER, seconds REAL NOT NULL, shadow_label TEXT,
        shadow_score REAL, shadow_passes INTEGER, shadow_seconds REAL, reason TEXT, asked_at TEXT NOT NULL,
        executor INTEGER, processor TEXT, shadow_executor INTEGER, shadow_processor TEXT
    )""",
    "CREATE INDEX shadow_answers_of_pair ON shadow_answers (expert, shadow, seq)",
    """CREATE TABLE shadow_drops (
        expert TEXT NOT NULL, shadow TEXT NOT NULL, expert_sha256 TEXT NOT NULL, shadow_sha256 TEXT NOT NULL,
        dropped INTEGER NOT NULL, PRIMARY KEY (expert, shadow, expert_sha256, shadow_sha256)
    )""",
)

migrations = Migrations("records")


@migrations()
def version_0_1(database: Database) -> None:
    """First schema. A released migration never changes: a later version adds another below."""
    for statement in TABLES:
        database.execute(statement)


STATION_TABLES = (
    # a person's verdict beside the machine's; the latest of a result that is not undone counts
    """CREATE TABLE reviews (
        number INTEGER PRIMARY KEY AUTOINCREMENT, result INTEGER NOT NULL,
        finding TEXT NOT NULL CHECK (finding IN ('agree', 'false_call', 'missed_defect', 'decided')),
        verdict TEXT NOT NULL CHECK (verdict IN ('OK', 'NG')), label TEXT, reason TEXT, who TEXT NOT NULL,
        at TEXT NOT NULL, undone_at TEXT, undone_by TEXT
    )""",
    "CREATE INDEX reviews_result ON reviews (result)",
    "CREATE UNIQUE INDEX reviews_one ON reviews (result) WHERE undone_at IS NULL",
    "CREATE INDEX reviews_counting ON reviews (finding, result) WHERE undone_at IS NULL",
    "CREATE INDEX reviews_at ON reviews (at)",
    "CREATE TRIGGER reviews_go AFTER DELETE ON results BEGIN DELETE FROM reviews WHERE result = OLD.seq; END",
    # a run of a board is over: an image of the serial stored after the result `after_seq` is not of it
    """CREATE TABLE reworks (
        number INTEGER PRIMARY KEY AUTOINCREMENT, serial TEXT NOT NULL, board_type TEXT NOT NULL,
        opened_at TEXT NOT NULL, after_seq INTEGER NOT NULL, who TEXT NOT NULL, reason TEXT, at TEXT NOT NULL,
        UNIQUE (serial, board_type, opened_at)
    )""",
    """CREATE TABLE audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, who TEXT NOT NULL, role TEXT NOT NULL,
        action TEXT NOT NULL, subject TEXT NOT NULL, outcome TEXT NOT NULL, config_sha256 TEXT NOT NULL
    )""",
    """CREATE TABLE alarms (
        number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, message TEXT NOT NULL, raised_at TEXT NOT NULL,
        cleared_at TEXT
    )""",
    "CREATE INDEX alarms_open ON alarms (name) WHERE cleared_at IS NULL",
    # pages of results and boards, newest first: each verdict's rows lie in the order of their numbers
    "CREATE INDEX results_verdict ON results (verdict)",
    "CREATE INDEX results_component ON results (component, verdict)",
    "CREATE INDEX results_label ON results (label, verdict)",
    "CREATE INDEX results_experts ON results (experts, verdict)",
    "CREATE INDEX results_source ON results (substr(key, 1, instr(key, '/') - 1), verdict)",
    "CREATE INDEX boards_verdict ON boards (verdict)",
    # totals of a time
    "DROP INDEX results_finished_at",
    "CREATE INDEX results_finished_at ON results (finished_at, verdict)",
    "CREATE INDEX results_bad ON results (finished_at, component, label) WHERE verdict != 'OK'",
    "DROP INDEX boards_closed_at",
    "CREATE INDEX boards_closed_at ON boards (closed_at, verdict)",
)


@migrations()
def version_0_2(database: Database) -> None:
    for statement in STATION_TABLES:
        database.execute(statement)


# runs of a serial, of which a golden board has many: the latest one, and the one that follows another
RUN_INDEXES = (
    "DROP INDEX boards_of_type",
    "CREATE INDEX boards_serial ON boards (serial)",
    "CREATE INDEX boards_run ON boards (serial, board_type)",
)
AUDIT_INDEX = "CREATE INDEX audit_class ON audit (action, outcome = 'done')"


@migrations()
def version_0_3(database: Database) -> None:
    for statement in RUN_INDEXES:
        database.execute(statement)


@migrations()
def version_0_4(database: Database) -> None:
    database.execute(AUDIT_INDEX)


@migrations()
def version_0_5(database: Database) -> None:
    """``reason``: why a board is not OK."""
    database.execute("ALTER TABLE boards ADD COLUMN reason TEXT")


SHADOW_TERMS = (
    "ALTER TABLE shadow_answers ADD COLUMN terms_sha256 TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE shadow_drops RENAME TO shadow_drops_before",
    """CREATE TABLE shadow_drops (
        expert TEXT NOT NULL, shadow TEXT NOT NULL, expert_sha256 TEXT NOT NULL, shadow_sha256 TEXT NOT NULL,
        terms_sha256 TEXT NOT NULL, dropped INTEGER NOT NULL,
        PRIMARY KEY (expert, shadow, expert_sha256, shadow_sha256, terms_sha256)
    )""",
    """INSERT INTO shadow_drops
        SELECT expert, shadow, expert_sha256, shadow_sha256, '', dropped FROM shadow_drops_before""",
    "DROP TABLE shadow_drops_before",
)


@migrations()
def version_0_6(database: Database) -> None:
    """Answers of shadows from before have no terms: no later ones are counted with them."""
    for statement in SHADOW_TERMS:
        database.execute(statement)


def open_for_writing(path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Database:
    """Open the migrated database; creates its folder. For one thread at a time. Raises ConfigError on a
    network share, where SQLite's locks and log are not safe."""
    refuse_shared(path, "set `state:` to a folder on a local disk")
    make_folder(path.parent)
    connection = sqlite3.connect(path, timeout=busy_timeout_s, check_same_thread=False)
    with ExitStack() as failing:
        failing.callback(connection.close)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
        database = Database(connection)
        migrate(database, migrations, path, "move the file")
        failing.pop_all()
    return database


def open_for_reading(path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    """Read-only connection, for one short query beside the writer. Rows have column names. Raises FileNotFoundError for
    a missing file."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no results yet - the agent writes this file when it first runs")
    connection = sqlite3.connect(path, timeout=busy_timeout_s)
    connection.execute("PRAGMA query_only = ON")
    connection.row_factory = sqlite3.Row
    return connection


def read_rows(path: Path, sql: str, given: Sequence[object] | Mapping[str, object] = ()) -> list[sqlite3.Row]:
    """Rows of one short query beside the writer. Raises FileNotFoundError, sqlite3.Error."""
    with closing(open_for_reading(path)) as connection:
        return connection.execute(sql, given).fetchall()


class Rows(Generic[Record]):
    """Records of one kind as rows: fields are columns, times ISO 8601, tuples and mappings JSON."""

    def __init__(self, kind: type[Record]) -> None:
        self._adapter = TypeAdapter(kind)

    def record(self, row: sqlite3.Row | Mapping[str, Any], **others: object) -> Record:
        """Record of a row, which may have other columns, too. ``others``: fields that are no columns."""
        values = dict(row)
        nested = {name: json.loads(values[name]) for name in JSON_COLUMNS if isinstance(values.get(name), str)}
        return self._adapter.validate_python(values | nested | others)


def as_column(value: object) -> object:
    """A field as a row holds it. Raises TypeError or ValueError for what no row can hold."""
    if isinstance(value, datetime):
        return utc_text(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | tuple) else value


def is_damage(error: BaseException) -> bool:
    return primary_code(error) in DAMAGED


def damage_of(path: Path, limit_s: float = CHECK_S) -> str | None:
    """First finding of SQLite's quick check; None for a sound file, or after ``limit_s``. Raises FileNotFoundError, and
    sqlite3.Error for errors other than damage."""
    deadline_s = time.monotonic() + limit_s
    with closing(open_for_reading(path)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 10_000)
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                return None
            if is_damage(error):
                return str(error)
            raise
    return None if found == "ok" else str(found).replace("\n", " ")


def fresh_place(path: Path, name: str) -> Path:
    """Path of a new, unfinished replacement; removes leftovers of an earlier try."""
    fresh = path.with_name(f"{path.name}.{name}")
    remove_database(fresh)
    return fresh


def exchange(path: Path, fresh: Path, why: str) -> Path | None:
    """Replace a database by a closed one. Returns the old file's new path, `NAME.WHY-TIME`; None without an old file.
    The name exists at every moment: an agent that starts meanwhile creates no third file."""
    aside = path.with_name(f"{path.name}.{why}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
    for suffix in JOURNALS:
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    was_there = path.exists()
    if was_there:
        try:
            os.link(path, aside)
        except OSError:  # a filesystem without hard links
            path.rename(aside)
    take_name(fresh, path)
    return aside if was_there else None


def begin_anew(path: Path, damage: str, busy_timeout_s: float = BUSY_TIMEOUT_S) -> tuple[Database, str]:
    """Replace a damaged file, after its open requests and messages are copied. Returns the new file, and the alarm."""
    fresh = fresh_place(path, "fresh")
    with closing(open_for_writing(fresh, busy_timeout_s)) as begun, begun.atomic():
        lost = _take_over(path, begun)
    aside = exchange(path, fresh, "damaged")
    database = open_for_writing(path, busy_timeout_s)
    alarm = (
        f"{path} was damaged ({damage}) and is at {aside} now: results are stored in a new file - bring earlier "
        "ones back with `coserve restore`, and check the disk"
    )
    log.error("results_file_damaged %s", alarm)
    for key in lost:
        log.error("accepted_image_lost key=%s: it cannot be read from the damaged file - send it again", key)
    return database, alarm


def _take_over(damaged: Path, database: Database) -> list[str]:
    """Copy the tables of OWED. Returns keys of accepted requests whose image cannot be read."""
    with closing(open_for_reading(damaged)) as source:
        for table in OWED:
            for row in chain(_readable(source, table, "ASC"), _readable(source, table, "DESC")):
                names, marks = ", ".join(row.keys()), ", ".join("?" * len(row))
                database.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", tuple(row))
    return [key for (key,) in database.execute(ORPHANS).fetchall()]


def _readable(source: sqlite3.Connection, table: str, order: str) -> Iterator[sqlite3.Row]:
    with suppress(sqlite3.DatabaseError):
        yield from source.execute(f"SELECT * FROM {table} ORDER BY rowid {order}")


def refuse_root_beside_another(folder: Path) -> None:
    """Raises StateOfAnother for root in another user's folder. Call before any write to a state folder."""
    with suppress(FileNotFoundError):
        owner = folder.stat().st_uid
        if os.geteuid() == 0 and owner != 0:
            raise StateOfAnother(folder, _user_name(owner))


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"#{number}"


def is_state_held(folder: Path) -> bool:
    """True if an agent or a profile run has the lock. Changes nothing on the disk."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def was_exchanged(path: Path) -> bool:
    """True if a file that was exchanged for another still lies beside the database."""
    return any(ASIDE.fullmatch(each.name.removeprefix(path.name)) for each in path.parent.glob(f"{path.name}.*"))


@contextmanager
def state_held(folder: Path) -> Iterator[None]:
    """Lock of a state folder, for one agent or profile run. The kernel drops it at any end of the process. Does
    not wait. Raises AlreadyRunning, StateOfAnother, and StateUnusable for disk errors."""
    try:
        refuse_root_beside_another(folder)
        descriptor = _lock(folder)
    except OSError as error:
        reason = "exists, and is not a folder" if isinstance(error, FileExistsError) else str(error.strerror)
        raise StateUnusable(folder, reason) from error
    try:
        yield
    finally:
        os.close(descriptor)  # keep the file: after a removal two agents could lock two files of one name


def _lock(folder: Path) -> int:
    """Raises AlreadyRunning, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    with ExitStack() as failing:
        failing.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunning(path) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        failing.pop_all()
    return descriptor


def utc_text(time_: datetime) -> str:
    """ISO 8601 in UTC with six decimals: texts sort by time. Raises ValueError for a time without zone."""
    if time_.tzinfo is None:
        raise ValueError(f"{time_} has no time zone")
    return time_.astimezone(UTC).isoformat(timespec="microseconds")
