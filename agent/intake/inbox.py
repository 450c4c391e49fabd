"""The folder itself: what lies in it, and the renames that claim a file and put it away. No decision, no thread.

Layout below the watched folder, all on its filesystem so that every step is one rename:
    .work/OWNER/[SUB/]INODE-SIZE-MTIME~NAME   claimed; the prefix keeps the identity even where inodes change
    done/YYYY-MM-DD/...  ng/YYYY-MM-DD/...    judged
    failed/...  failed/NAME.error.json        could not be judged, and why
Nothing is ever overwritten, and of two agents that claim one file only one succeeds.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import signal
from dataclasses import dataclass
from fnmatch import fnmatchcase
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING

from agent.intake.readiness import Lease, Sighting
from experts.images import Completeness, completeness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORK = ".work"
DONE = "done"
NG = "ng"
FAILED = "failed"
SHELVES = frozenset({DONE, NG, FAILED})
MARKER = ".done"
UNFINISHED = ("*.part", "*.tmp", "*.filepart", "*.crdownload", "~$*", ".~lock*", f"*{MARKER}")
CLAIMED = re.compile(r"([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)~(.+)", re.DOTALL)
NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EACCES, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class Found:
    """One entry of the folder. ``objection`` says why it can never be an image."""

    relpath: str
    sighting: Sighting
    is_marked: bool = False
    objection: str | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A file that this agent deals with: where it lay, what it was, where it lies. One that was not claimed by a rename
    may be replaced by another at any time."""

    relpath: str
    sighting: Sighting
    path: Path
    is_ours: bool = True


@dataclass(frozen=True, slots=True)
class Probe:
    """What opening a file tells."""

    lease: Lease
    completeness: Completeness


class Inbox:
    """One watched folder. Every method may raise OSError: the filesystem decides."""

    def __init__(self, root: Path, owner: str) -> None:
        self.root = root
        self.work = root / WORK / owner
        self._source = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]

    def key(self, relpath: str, sighting: Sighting) -> str:
        """The identity of one file's content in this folder: it survives claiming, crashes and restarts."""
        return f"{self._source}/{relpath}@{_identity(sighting)}"

    def is_sound(self, *, is_claimed: bool) -> bool:
        """Whether the folder can be listed; with the place of claimed files, which an empty mount point has not."""
        try:
            with os.scandir(self.work if is_claimed else self.root):
                return True
        except OSError:
            return False

    def scan(self) -> Iterator[Found]:
        """Everything below the folder that could be an image, or that must be told why not. Follows no link."""
        yield from self._scan(self.root, "")

    def look(self, relpath: str) -> Found | None:
        """One file as it is now; None if it is gone, is a folder, or is none of our business."""
        if is_ignored(relpath):
            return None
        path = self.root / relpath
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if S_ISDIR(status.st_mode):
            return None
        names = (relpath + MARKER, os.path.splitext(relpath)[0] + MARKER)
        is_marked = any((self.root / name).exists() for name in names)
        return Found(relpath, _sighting(status), is_marked, _objection(relpath, status))

    def probe(self, relpath: str) -> Probe:
        """Who writes to the file, and whether its bytes say that it ends. Raises PermissionError among others."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self.root / relpath, flags), "rb") as file:
            return Probe(lease_of(file.fileno()), completeness(file))

    def claim(self, relpath: str, sighting: Sighting) -> Claimed:
        """Take the file. Raises FileNotFoundError where another agent, or its owner, was faster."""
        folder, _, name = relpath.rpartition("/")
        target = self.work / folder / f"{_identity(sighting)}~{name}"
        self._make(target.parent)
        (self.root / relpath).rename(target)
        return Claimed(relpath, sighting, target)

    def unclaimed(self, relpath: str, sighting: Sighting) -> Claimed:
        """The file, left where it is."""
        return Claimed(relpath, sighting, self.root / relpath, is_ours=False)

    def sighting(self, claimed: Claimed) -> Sighting:
        """The file as it is now."""
        return _sighting(claimed.path.lstat())

    def unclaim(self, claimed: Claimed) -> None:
        """Put the file back, because its writer was not done; a newer file of its name wins, under another name."""
        target = self.root / claimed.relpath
        self._make(target.parent)
        place_without_overwriting(claimed.path, target, _identity(claimed.sighting))

    def drop_marker(self, relpath: str) -> None:
        """Remove the marker that lay beside a claimed file, if there was one."""
        for name in (relpath + MARKER, os.path.splitext(relpath)[0] + MARKER):
            (self.root / name).unlink(missing_ok=True)

    def recover(self) -> Iterator[Claimed]:
        """What an earlier run of the same owner claimed and did not put away, oldest first."""
        found = []
        for folder, _, names in os.walk(self.work):
            below = os.path.relpath(folder, self.work)
            for name in names:
                parts = CLAIMED.fullmatch(name)
                if parts:
                    sighting = Sighting(*(int(part, 16) for part in parts.group(1, 2, 3)))
                    relpath = parts[4] if below == "." else f"{below}/{parts[4]}"
                    found.append(Claimed(relpath, sighting, self.work / os.path.relpath(f"{folder}/{name}", self.work)))
        yield from sorted(found, key=lambda claimed: (claimed.sighting.mtime_ns, claimed.relpath))

    def put_away(self, path: Path, relpath: str, shelf: str, identity: str) -> Path:
        """Move a file to a shelf (`done/2026-05-01`), under another name where that is taken. Returns where it lies."""
        target = self.root / shelf / relpath
        self._make(target.parent)
        return place_without_overwriting(path, target, identity)

    def explain(self, failed: Path, explanation: dict[str, object]) -> None:
        """Write `NAME.error.json` beside a failed file, whole or not at all."""
        target = failed.with_name(failed.name + ".error.json")
        draft = target.with_name(f".{target.name}.tmp")
        draft.write_text(json.dumps(explanation, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(target)

    def _make(self, folder: Path) -> None:
        """Make a folder below the watched one, but never that one: where a share is gone, nothing takes its place."""
        if not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self.root))
        folder.mkdir(parents=True, exist_ok=True)

    def _scan(self, folder: Path, prefix: str) -> Iterator[Found]:
        with os.scandir(folder) as entries:
            listed = list(entries)
        names = {entry.name for entry in listed}
        for entry in listed:
            relpath = prefix + entry.name
            if is_ignored(relpath):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._scan(folder / entry.name, f"{relpath}/")
                    continue
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EACCES}:
                    continue  # gone meanwhile, or a subfolder that is not ours to read
                raise
            stem = os.path.splitext(entry.name)[0]
            is_marked = entry.name + MARKER in names or stem + MARKER in names
            yield Found(relpath, _sighting(status), is_marked, _objection(relpath, status))


def is_ignored(relpath: str) -> bool:
    """Whether a path below the folder is hidden, unfinished by its name, a marker, or the agent's own."""
    parts = relpath.split("/")
    if parts[0] in SHELVES:
        return True
    return any(part.startswith(".") or any(fnmatchcase(part.lower(), name) for name in UNFINISHED) for part in parts)


def lease_of(descriptor: int) -> Lease:
    """Whether anybody has this file, open for reading here, open for writing. Disturbs no other reader.

    The kernel signals a holder whose lease is broken; the default signal would end the process, SIGURG is ignored.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return Lease.HELD
    except (OSError, AttributeError):  # no permission, no leases on this filesystem, or on this system
        return Lease.UNKNOWN
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return Lease.FREE


def place_without_overwriting(source: Path, target: Path, identity: str) -> Path:
    """Rename ``source``; where the name is taken, to `NAME~IDENTITY.SUFFIX`. Safe to repeat after a crash."""
    for name in (target.name, f"{target.stem}~{identity}{target.suffix}"):
        place = target.with_name(name)
        try:
            os.link(source, place, follow_symlinks=False)
        except FileExistsError:
            if not _is_same(place, source):
                continue
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            if os.path.lexists(place):
                continue
            source.rename(place)
            return place
        source.unlink()
        return place
    raise FileExistsError(errno.EEXIST, "both its name and its name with identity are taken", str(target))


def _is_same(one: Path, other: Path) -> bool:
    first, second = one.lstat(), other.lstat()
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _identity(sighting: Sighting) -> str:
    return f"{sighting.inode:x}-{sighting.size_bytes:x}-{sighting.mtime_ns:x}"


def _sighting(status: os.stat_result) -> Sighting:
    return Sighting(status.st_ino, status.st_size, status.st_mtime_ns)


def _objection(relpath: str, status: os.stat_result) -> str | None:
    try:
        relpath.encode()
    except UnicodeEncodeError:
        return "the name is not UTF-8"
    if S_ISLNK(status.st_mode):
        return "a symbolic link: it may lead out of the folder"
    if not S_ISREG(status.st_mode):
        return "not a regular file"
    return None
