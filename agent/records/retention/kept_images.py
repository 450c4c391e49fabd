"""Images of a line on the disk: in its archive, and in the shelves of its watched folders.

Guarantees: only regular files in the agent's own layout are listed, and no link is followed:
    ARCHIVE/YYYY-MM-DD/NAME~DIGEST.SUFFIX
    SHELF/YYYY-MM-DD/...                    of judged files
    SHELF/... beside NAME.error.json        of files that could not be judged; the explanation is removed with its file
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

from agent.records.retention.archive import DAY, KEPT
from agent.records.retention.rules import KeptImage
from experts.filesystem import remove_empty, unlink_below

if TYPE_CHECKING:
    from collections.abc import Iterator

    from experts.expert import Verdict

EXPLANATION = ".error.json"


@dataclass(frozen=True, slots=True)
class Shelf:
    """Folder of judged files. ``is_dated``: in folders by day; else beside explanations."""

    folder: Path
    verdict: Verdict
    is_dated: bool = True


@dataclass(frozen=True, slots=True)
class FileSeen:
    """Regular file, by its stat."""

    path: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    device: int

    @property
    def changed_s(self) -> float:
        return max(self.mtime_ns, self.ctime_ns) / 1e9


def archived(folder: Path) -> Iterator[FileSeen]:
    for day in _days(folder):
        for entry in _entries(day):
            if KEPT.fullmatch(entry.name) and (seen := _seen(entry.path)):
                yield seen


def shelved(shelf: Shelf) -> Iterator[KeptImage]:
    if shelf.folder.is_symlink():
        return
    if not shelf.is_dated:
        paths = set(_below(str(shelf.folder)))
        for path in sorted(paths):
            if f"{path}{EXPLANATION}" in paths and (seen := _seen(path)):
                yield _image(seen, shelf.verdict, seen.changed_s)
        return
    for day in _days(shelf.folder):
        begin = datetime.combine(date.fromisoformat(Path(day).name), time()).astimezone()
        end_s = (begin + timedelta(days=1)).timestamp()
        for path in _below(day):
            if seen := _seen(path):
                yield _image(seen, shelf.verdict, min(max(seen.mtime_ns / 1e9, begin.timestamp()), end_s))


def remove(path: Path, changed_ns: int, shelf: Path) -> bool:
    """Remove an unchanged file with its explanation, and folders that become empty; False if the file changed."""
    watched = shelf.parent  # the shelf is no link either
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not S_ISREG(status.st_mode) or status.st_mtime_ns != changed_ns:
            return False
        unlink_below(path, watched)
    with suppress(OSError):  # no explanation, or under a shortened name
        unlink_below(path.with_name(path.name + EXPLANATION), watched)
    if path.parent != shelf:
        remove_empty(path.parent, shelf)
    return True


def _image(seen: FileSeen, verdict: Verdict, at_s: float) -> KeptImage:
    return KeptImage(seen.path, verdict, at_s, seen.changed_s, seen.size_bytes, seen.mtime_ns, seen.device)


def _days(folder: Path) -> Iterator[str]:
    for entry in _entries(str(folder)):
        if DAY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with suppress(ValueError):  # 2026-99-99
                date.fromisoformat(entry.name)
                yield entry.path


def _below(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):  # links to folders are not followed
        yield from (f"{parent}/{name}" for name in names)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _seen(path: str) -> FileSeen | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not S_ISREG(status.st_mode):
        return None
    return FileSeen(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev)
