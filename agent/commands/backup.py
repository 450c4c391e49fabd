"""A line's records and measurements, copied to a folder and restored: `coserve backup` and `restore`.

Guarantees: a backup appears whole, with the sha256 of each file; results are copied as of one moment, also beside a
running agent. A restore overwrites nothing: it renames the earlier files. Restored results have a new identity: their
sequence numbers repeat, and a reader must not take new results for old ones.

    DEST/backup.json   its format, the line, the time, and each file's sha256
    DEST/line.yaml     the line file, with thresholds; without its weights, kept images and secrets
    DEST/results.db    results, boards, the journal and the outbox
    DEST/profile.db    the device profile, if there is one
    DEST/promotions.json  promotions in force, if there are any
    DEST/proofs.json   proofs of experts, if there are any
    DEST/calibrations/ calibrations of int8 forms
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from agent.config import read_line
from agent.line_file.promotions import FILE_NAME as PROMOTIONS
from agent.line_file.proofs import FILE_NAME as PROOFS
from agent.places.mounts import MountedFolder
from agent.records.database import damage_of, exchange, fresh_place, open_for_reading, state_held
from experts.calibrations import CalibrationFolder
from experts.errors import ConfigError
from experts.filesystem import file_sha256, whole_file, whole_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent.config import LineConfig

FORMAT = 1
MANIFEST = "backup.json"
LINE_FILE, RESULTS, PROFILE, CALIBRATIONS = "line.yaml", "results.db", "profile.db", "calibrations"


@dataclass(frozen=True, slots=True)
class Backup:
    """Manifest of a backup. ``files``: each file's sha256, by its path in the folder."""

    line: str
    made_at: str
    files: dict[str, str]
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore. ``aside``: new paths of the replaced files."""

    backup: Backup
    aside: tuple[Path, ...]
    is_line_file_kept: bool


def back_up(config: LineConfig, destination: Path) -> Backup:
    """Copy a line's state to a new folder. Raises ConfigError for a file that cannot be read or written."""
    if destination.exists():
        raise ConfigError(f"{destination} exists already - name a new folder")
    if not destination.parent.is_dir():
        raise ConfigError(f"{destination.parent} is missing - make it, or mount its disk")
    try:
        MountedFolder(destination.parent).find()
        with whole_folder(destination) as draft:
            _copy_state(config, draft)
            files = {str(path.relative_to(draft)): file_sha256(path) for path in _files(draft)}
            backup = Backup(config.line, datetime.now(UTC).astimezone().isoformat(timespec="seconds"), files)
            (draft / MANIFEST).write_text(json.dumps(asdict(backup), indent=2), "utf-8")
    except OSError as error:
        raise ConfigError(f"{destination}: {error.strerror or error} - name a folder that can be written") from error
    return backup


def restore(line_file: Path, source: Path) -> Restored:
    """Restore a backup to the line of this file; without the file, the backup's line file is copied there. Raises
    ConfigError for an invalid or damaged backup, AlreadyRunning while an agent serves the line."""
    backup = _read_manifest(source)
    is_kept, is_done = line_file.exists(), False
    try:
        if not is_kept:
            _copy(source / LINE_FILE, line_file)
        config = _read_line(line_file, None if is_kept else source / LINE_FILE)
        if config.line != backup.line:
            raise ConfigError(f"{source} is a backup of line {backup.line!r}, {line_file} is {config.line!r}")
        with state_held(config.state):
            aside = tuple(_put_back(config, source, backup))
        is_done = True
    except OSError as error:
        raise ConfigError(f"{error.filename or source}: {error.strerror or error} - check the disk") from error
    finally:
        if not is_kept and not is_done:
            with suppress(OSError):
                line_file.unlink(missing_ok=True)
    same = is_kept and file_sha256(line_file) == backup.files[LINE_FILE]
    return Restored(backup, aside, is_kept and not same)


def _read_line(line_file: Path, copied_from: Path | None) -> LineConfig:
    try:
        return read_line(line_file)
    except ConfigError as error:
        if copied_from is None:
            raise
        advice = f"{line_file} was copied from {copied_from} and is removed again: correct that file, and restore again"
        raise ConfigError(f"{error}\n{advice}") from error


def _copy_state(config: LineConfig, draft: Path) -> None:
    _copy(config.document.file, draft / LINE_FILE)
    if config.results_file.exists():
        _copy_database(config.results_file, draft / RESULTS)
    if config.profile_file.exists():
        _copy(config.profile_file, draft / PROFILE)  # a finished profile is replaced, never written to
    if config.promotions:
        _copy(config.state / PROMOTIONS, draft / PROMOTIONS)
    if (config.state / PROOFS).exists():
        _copy(config.state / PROOFS, draft / PROOFS)
    for path in _files(_calibrations(config)):
        _copy(path, draft / CALIBRATIONS / path.relative_to(_calibrations(config)))


def _copy_database(source: Path, target: Path) -> None:
    try:
        with closing(open_for_reading(source)) as reading, closing(sqlite3.connect(target)) as writing:
            reading.backup(writing)
        damage = damage_of(target, float("inf"))
    except sqlite3.DatabaseError as error:
        damage = str(error)
    if damage is not None:
        raise ConfigError(f"{source} is damaged ({damage}), so it cannot be backed up - run `coserve doctor`")


def _put_back(config: LineConfig, source: Path, backup: Backup) -> Iterator[Path]:
    """Yield the new paths of replaced files. All files are copied before the first is replaced."""
    places = {RESULTS: config.results_file, PROFILE: config.profile_file}
    places |= {name: config.state / name for name in (PROMOTIONS, PROOFS)}
    ready = []
    for name, sha256 in backup.files.items():
        place = places.get(name, _calibrations(config) / name.removeprefix(f"{CALIBRATIONS}/"))
        is_there = place.exists() and file_sha256(place) == sha256
        if name == LINE_FILE or (is_there and name != RESULTS):  # results may have a log of newer rows
            continue
        fresh = fresh_place(place, "restoring")
        _copy(source / name, fresh)
        if name == RESULTS:
            with closing(sqlite3.connect(fresh)) as database, database:
                database.execute("UPDATE identity SET id = lower(hex(randomblob(4)))")
        ready.append((place, fresh))
    for place, fresh in ready:
        if aside := exchange(place, fresh, "replaced"):
            yield aside


def _read_manifest(source: Path) -> Backup:
    """Raises ConfigError, naming the file, for any difference from the written backup."""
    try:
        backup = Backup(**json.loads((source / MANIFEST).read_bytes()))
        files = {str(name): str(sha256) for name, sha256 in backup.files.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is not a backup of a line: {MANIFEST} cannot be read ({error})") from error
    if backup.format != FORMAT:
        raise ConfigError(f"{source} is a backup of format {backup.format}; this CoServe reads {FORMAT}")
    for name, sha256 in files.items():
        path = source / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ConfigError(
                f"{source / MANIFEST} names {name!r}, which is not a file of a backup - use another backup"
            )
        if not path.is_file() or file_sha256(path) != sha256:
            raise ConfigError(f"{path} is missing or was changed - use another backup")
    if LINE_FILE not in files:
        raise ConfigError(f"{source / MANIFEST} names no {LINE_FILE} - use another backup")
    return backup


def _calibrations(config: LineConfig) -> Path:
    return CalibrationFolder.beside(config.packed_folder).directory


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reading, whole_file(target) as writing:
        shutil.copyfileobj(reading, writing)
