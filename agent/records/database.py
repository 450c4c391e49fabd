"""The SQLite file of a line: opened durable (WAL, every commit synced), migrated, and never on a network share."""

from __future__ import annotations

import fcntl
import os
import pwd
import sqlite3
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlite_utils import Database, Migrations

from agent.records.whole_file import make_folder
from experts.errors import AlreadyRunning, ConfigError, StateOfAnother, StateUnusable
from experts.filesystem import filesystem_type, is_shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

BUSY_TIMEOUT_S = 5.0
JOURNAL_LIMIT_BYTES = 64 * 1024 * 1024
LOCK_NAME = "agent.lock"

# JSON as Python writes it may hold NaN, which SQLite takes for no JSON: an index must not keep a row from being stored
IMAGE_SHA256 = "CASE WHEN json_valid(detail) THEN json_extract(detail, '$.image_sha256') END"

migrations = Migrations("records")


@migrations()
def results_and_boards(database: Database) -> None:
    """The first tables. AUTOINCREMENT: a sequence number is never given twice, even when old rows are deleted."""
    database.execute(
        """
        CREATE TABLE results (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            key TEXT NOT NULL UNIQUE,
            line TEXT NOT NULL,
            board TEXT,
            board_type TEXT,
            component TEXT NOT NULL,
            ref TEXT,
            image TEXT NOT NULL,
            verdict TEXT NOT NULL CHECK (verdict IN ('OK', 'NG', 'UNKNOWN')),
            label TEXT,
            score REAL,
            reason TEXT,
            experts TEXT NOT NULL,
            detail TEXT NOT NULL,
            arrived_at TEXT NOT NULL,
            finished_at TEXT NOT NULL,
            seconds REAL NOT NULL,
            config_sha256 TEXT NOT NULL
        )
        """
    )
    database.execute("CREATE INDEX results_finished_at ON results (finished_at)")
    database.execute("CREATE INDEX results_board ON results (board, board_type)")
    database.execute(
        """
        CREATE TABLE boards (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            serial TEXT NOT NULL,
            board_type TEXT NOT NULL,
            verdict TEXT NOT NULL CHECK (verdict IN ('OK', 'NG', 'UNKNOWN')),
            opened_at TEXT NOT NULL,
            closed_at TEXT NOT NULL,
            missing TEXT NOT NULL,
            counts TEXT NOT NULL,
            revisions INTEGER NOT NULL DEFAULT 0,
            UNIQUE (serial, board_type, opened_at)
        )
        """
    )
    database.execute("CREATE INDEX boards_closed_at ON boards (closed_at)")


@migrations()
def accepted_requests(database: Database) -> None:
    """The journal: requests without a verdict, and their images, which several of them may share."""
    database.execute("CREATE TABLE accepted_images (id INTEGER PRIMARY KEY, content BLOB NOT NULL)")
    database.execute(
        """
        CREATE TABLE accepted (
            key TEXT NOT NULL UNIQUE,
            source TEXT NOT NULL,
            component TEXT,
            expert TEXT,
            board TEXT,
            board_type TEXT,
            ref TEXT,
            name TEXT NOT NULL,
            box TEXT,
            accepted_at TEXT NOT NULL,
            image INTEGER NOT NULL REFERENCES accepted_images
        )
        """
    )
    database.execute("CREATE INDEX accepted_image ON accepted (image)")


@migrations()
def takt_and_kept_images(database: Database) -> None:
    """How long after the one before a board closed; and which file of the archive shows what a result is about."""
    database.execute("ALTER TABLE boards ADD COLUMN takt_s REAL")
    database.execute("CREATE INDEX boards_of_type ON boards (board_type, closed_at)")
    database.execute("ALTER TABLE results ADD COLUMN kept_as TEXT")
    database.execute("CREATE INDEX results_kept_as ON results (kept_as) WHERE kept_as IS NOT NULL")


@migrations()
def outbox(database: Database) -> None:
    """Messages that somebody has still to be told; and what tells this file's numbers from those of another file."""
    database.execute("CREATE TABLE identity (id TEXT NOT NULL)")
    database.execute("INSERT INTO identity VALUES (lower(hex(randomblob(4))))")
    database.execute(
        """
        CREATE TABLE outbox (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            receiver TEXT NOT NULL,
            id TEXT NOT NULL,
            event TEXT NOT NULL,
            board TEXT,
            payload TEXT NOT NULL,
            UNIQUE (receiver, id)
        )
        """
    )
    database.execute("CREATE INDEX outbox_receiver ON outbox (receiver, number)")
    database.execute(
        """
        CREATE TABLE outbox_receivers (
            receiver TEXT PRIMARY KEY,
            waiting INTEGER NOT NULL DEFAULT 0,
            given_way INTEGER NOT NULL DEFAULT 0
        )
        """
    )


@migrations()
def exports_and_leaving_images(database: Database) -> None:
    """Which days were written to files; and images that are to be removed, until they are."""
    database.execute(
        """
        CREATE TABLE exports (
            day TEXT PRIMARY KEY,
            until TEXT NOT NULL,
            last_seq INTEGER NOT NULL,
            rows INTEGER NOT NULL,
            file TEXT NOT NULL
        )
        """
    )
    database.execute("CREATE TABLE leaving (path BLOB PRIMARY KEY, mtime_ns INTEGER NOT NULL, reason TEXT NOT NULL)")


@migrations()
def results_by_content(database: Database) -> None:
    """Results of images that are recognised when their bytes come again; only these have a digest in their detail."""
    database.execute(f"CREATE INDEX results_content ON results ({IMAGE_SHA256}) WHERE {IMAGE_SHA256} IS NOT NULL")


@migrations()
def anomaly_maps(database: Database) -> None:
    """Small pictures of where images were anomalous. They go with their result, whoever removes that."""
    database.execute(
        """
        CREATE TABLE anomaly_maps (
            seq INTEGER NOT NULL REFERENCES results,
            step INTEGER NOT NULL,
            expert TEXT NOT NULL,
            png BLOB NOT NULL,
            PRIMARY KEY (seq, step)
        )
        """
    )
    database.execute(
        "CREATE TRIGGER anomaly_maps_go AFTER DELETE ON results BEGIN DELETE FROM anomaly_maps WHERE seq = OLD.seq; END"
    )


@migrations()
def shadow_answers(database: Database) -> None:
    """What experts and their shadows said of the same images; and how often there was no time to ask a shadow."""
    database.execute(
        """
        CREATE TABLE shadow_answers (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            key TEXT NOT NULL,
            image TEXT NOT NULL,
            component TEXT,
            expert TEXT NOT NULL,
            shadow TEXT NOT NULL,
            expert_sha256 TEXT NOT NULL,
            shadow_sha256 TEXT NOT NULL,
            label TEXT NOT NULL,
            score REAL NOT NULL,
            passes INTEGER,
            seconds REAL NOT NULL,
            shadow_label TEXT,
            shadow_score REAL,
            shadow_passes INTEGER,
            shadow_seconds REAL,
            reason TEXT,
            asked_at TEXT NOT NULL
        )
        """
    )
    database.execute("CREATE INDEX shadow_answers_of_pair ON shadow_answers (expert, shadow, seq)")
    database.execute(
        """
        CREATE TABLE shadow_drops (
            expert TEXT NOT NULL,
            shadow TEXT NOT NULL,
            expert_sha256 TEXT NOT NULL,
            shadow_sha256 TEXT NOT NULL,
            dropped INTEGER NOT NULL,
            PRIMARY KEY (expert, shadow, expert_sha256, shadow_sha256)
        )
        """
    )


@migrations()
def executors_of_shadow_answers(database: Database) -> None:
    """Who ran an expert and its shadow: seconds on two processors are not comparable. Not known of earlier answers."""
    for side in ("", "shadow_"):
        database.execute(f"ALTER TABLE shadow_answers ADD COLUMN {side}executor INTEGER")
        database.execute(f"ALTER TABLE shadow_answers ADD COLUMN {side}processor TEXT")


def open_for_writing(path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Database:
    """The migrated database, with its folder; the connection may be used by one thread at a time.

    Raises ConfigError on a network share: SQLite's locks and its log are not safe there.
    """
    kind = filesystem_type(path)
    if is_shared(kind):
        raise ConfigError(f"{path} is on a shared filesystem ({kind}) - set `state:` to a folder on a local disk")
    make_folder(path.parent)
    connection = sqlite3.connect(path, timeout=busy_timeout_s, check_same_thread=False)
    try:
        return _prepared(connection)
    except BaseException:
        connection.close()
        raise


def _prepared(connection: sqlite3.Connection) -> Database:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
    database = Database(connection)
    migrations.apply(database)
    return database


def open_for_reading(path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    """A connection that cannot write, for one short look beside the writer. Rows answer to column names.

    Raises FileNotFoundError if there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no results yet - the agent writes this file when it first runs")
    connection = sqlite3.connect(path, timeout=busy_timeout_s)
    connection.execute("PRAGMA query_only = ON")
    connection.row_factory = sqlite3.Row
    return connection


class StateLock:
    """One agent or profile run per state folder, by a lock that the kernel drops when its process ends in any way."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = None

    def __enter__(self) -> StateLock:
        """Take the lock at once.

        Raises AlreadyRunning if another one holds it, StateOfAnother, and OSError for what the disk refuses.
        """
        refuse_root_beside_another(self.path.parent)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AlreadyRunning(self.path) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # the file stays: removing it would let two agents lock two files of one name
            self._descriptor = None


def refuse_root_beside_another(folder: Path) -> None:
    """Before anything is written to a state folder. Raises StateOfAnother for root in another user's."""
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
    """Whether an agent or a profile run has the lock; nothing is made or changed, whoever asks."""
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


@contextmanager
def state_held(folder: Path) -> Iterator[None]:
    """StateLock for who serves. Raises AlreadyRunning, StateOfAnother, and StateUnusable for what the disk refuses."""
    with ExitStack() as ending:
        try:
            ending.enter_context(StateLock(folder))
        except OSError as error:
            reason = "is there, and is no folder" if isinstance(error, FileExistsError) else str(error.strerror)
            raise StateUnusable(folder, reason) from error
        yield


def utc_text(time_: datetime) -> str:
    """ISO-8601 in UTC with six decimals, so that text sorts as time does. Raises ValueError for a time without zone."""
    if time_.tzinfo is None:
        raise ValueError(f"{time_} has no time zone")
    return time_.astimezone(UTC).isoformat(timespec="microseconds")
