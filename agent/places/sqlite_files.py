"""SQLite files of the agent: checks of place and version, result codes, removal."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from sqlite_utils import Database

from agent.places.mounts import filesystem_type, is_shared
from experts.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from sqlite_utils import Migrations

PRIMARY = 0xFF  # of an extended result code
JOURNALS = ("-wal", "-shm", "-journal")


def refuse_shared(path: Path, advice: str) -> None:
    """Raises ConfigError on a network share, where SQLite's locks and log are unsafe."""
    kind = filesystem_type(path)
    if is_shared(kind):
        raise ConfigError(f"{path} is on a shared filesystem ({kind}) - {advice}")


def migrate(database: Database, migrations: Migrations, path: Path, advice: str) -> None:
    """Apply pending migrations. Raises ConfigError for a file with migrations of another version."""
    with closing(Database(memory=True)) as empty:
        known = {migration.name for migration in migrations.pending(empty)}
    if unknown := sorted({migration.name for migration in migrations.applied(database)} - known):
        others = ", ".join(unknown)
        raise ConfigError(f"{path} was written by another version of CoServe ({others}) - install it, or {advice}")
    migrations.apply(database)


def primary_code(error: BaseException) -> int | None:
    """Primary result code; None for Python's own errors."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & PRIMARY


def remove_database(path: Path) -> None:
    """Remove a file and its journals. SQLite would replay a journal that stays into the next file of the name."""
    for suffix in ("", *JOURNALS):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
