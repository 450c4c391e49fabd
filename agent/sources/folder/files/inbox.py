"""Watched folder: its files, and the renames that claim a file and put it away. No decisions, no thread.

Layout below the watched folder, all on its filesystem so that every step is one rename:
    .work/OWNER/[SUB/]IDENTITY~NAME           claimed (``identity``)
    .work/OWNER/[SUB/].IDENTITY~/NAME         claimed; the name is too long for the prefix
    .work/OWNER/[SUB/].IDENTITY~.json         the sidecar of the claimed image with this identity
    done/YYYY-MM-DD/...  ng/YYYY-MM-DD/...    judged, with the sidecar beside its image
    failed/...  failed/NAME.error.json        could not be judged, with the reason
Guarantees: nothing is overwritten, and one of two agents that claim a file succeeds. No link below the watched folder
is followed when a file is moved or written. A folder of claims is removed with its last claim. A file of any name can
be claimed, put away and explained.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import signal
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING

from agent.sources.folder.files.identity import (
    CLAIM_BITS,
    NAME_BYTES,
    WORK,
    Claimed,
    claim_at,
    claim_names,
    fitted,
    other_name,
    seen_identity,
    sighting_in,
    sighting_of,
)
from agent.sources.folder.files.readiness import Lease, Probe, Sighting
from agent.sources.folder.files.selection import MARKER, FileSelection
from agent.sources.folder.files.sidecar import SUFFIX as SIDECAR_SUFFIX
from agent.sources.folder.files.sidecar import sidecar_beside, sidecar_of, spellings
from experts.filesystem import open_folder, unlink_below, whole_file
from experts.image_files.completeness import completeness

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

DONE = "done"
NG = "ng"
FAILED = "failed"
SHELVES = (DONE, NG, FAILED)
OWN = frozenset({*SHELVES, WORK})
MAKE_ATTEMPTS = 10
DEFAULT_SELECTION = FileSelection()
# gone meanwhile, no permission, or a path that is too long
PASSED_OVER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENAMETOOLONG})
NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EACCES, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class Found:
    """Entry of the folder. ``objection``: why it can never be an image."""

    relpath: str
    sighting: Sighting
    is_marked: bool = False
    objection: str | None = None
    sidecar: Sighting | None = None


class Inbox:
    """Watched folder. Every method may raise OSError. ``has_sidecars``: `STEM.json` is the sidecar of `STEM.png`.

    ``left_alone``: files of the last scan whose ending is no image's, by ending.
    """

    def __init__(
        self, root: Path, owner: str, *, has_sidecars: bool = False, selection: FileSelection = DEFAULT_SELECTION
    ) -> None:
        self.root = root
        self.has_sidecars = has_sidecars
        self.left_alone: Mapping[str, int] = {}
        self._tops: frozenset[str] = frozenset()  # as listed: names that are the agent's but for their case
        self._selection = selection
        self.work = root / WORK / owner
        self.source = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]  # of its keys

    def key(self, file: Claimed) -> str:
        """Key of a claimed, kept or refused file; it survives crashes and restarts."""
        return f"{self.source}/{file.relpath}@{file.identity}"

    def seen_key(self, relpath: str, sighting: Sighting) -> str:
        """Beginning of the keys of all files that looked like this one."""
        return f"{self.source}/{relpath}@{seen_identity(sighting)}"

    def relpath_of(self, key: str) -> str | None:
        """Path of the file with this image's key; None for a key of another folder."""
        source, _, rest = key.partition("/")
        relpath, at, _ = rest.rpartition("@")
        return relpath if source == self.source and at else None

    def is_sound(self, *, is_claimed: bool) -> bool:
        """True if the folder can be listed; ``is_claimed``: also its claims, which an empty mount point lacks."""
        try:
            with os.scandir(self.work if is_claimed else self.root):
                return True
        except OSError:
            return False

    def scan(self) -> Iterator[Found]:
        """List all files below the folder that could be images, or must be refused. Follows no link."""
        folders = [(self.root, "")]  # a stack: folders may be nested deeper than calls
        left_alone = Counter[str]()
        while folders:
            yield from self._listed(*folders.pop(), folders, left_alone)
        self.left_alone = left_alone

    def shared_shelf(self) -> str | None:
        """Shelf that another program uses for a folder of its own, on a disk that compares names without case.

        Its name as listed; None if there is none. Images in it count as put away by the agent.
        """
        for name in sorted(self._tops - OWN):
            if self.is_own(name):
                return name
        for own in (DONE, NG):  # the agent's files there are below folders of days
            is_blind = own in self._tops and own.upper() not in self._tops and os.path.lexists(self.root / own.upper())
            with suppress(OSError):  # no folder, which the next file to be put away tells
                if is_blind and any(entry.is_file() for entry in _entries(self.root / own)):
                    return own
        return None

    def inode(self) -> int:
        """Inode of the folder: it changes when a share is mounted or unmounted there, or the folder is recreated."""
        return self.root.stat().st_ino

    def is_empty(self) -> bool:
        with os.scandir(self.root) as entries:
            return next(entries, None) is None

    def look(self, relpath: str) -> Found | None:
        """Entry of one file now; None if it is gone, a folder, or ignored."""
        if self._is_ignored(relpath) or not self._selection.takes(relpath):
            return None
        path = self.root / relpath
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if S_ISDIR(status.st_mode):
            return None
        is_marked = any(os.path.exists(self.root / name) for name in markers_of(relpath))  # False if too long
        sidecar = sighting_of(sidecar_beside(path)) if self.has_sidecars else None
        return Found(relpath, sighting_in(status), is_marked, _objection(relpath, status), sidecar)

    def probe(self, relpath: str) -> Probe:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self.root / relpath, flags), "rb") as file:
            return Probe(lease_of(file.fileno()), completeness(file))

    def claim(self, relpath: str, sighting: Sighting) -> Claimed:
        """Claim the file. Raises FileNotFoundError if another agent, or the owner, was faster."""
        folder, _, name = relpath.rpartition("/")
        claimed = Claimed(relpath, replace(sighting, ctime_ns=0), self.work, claim=secrets.randbits(CLAIM_BITS))
        usual, long = claim_names(claimed.identity, name)
        target = self.work / folder / (usual if len(os.fsencode(usual)) <= self._name_limit else long)
        self._make(target.parent)
        try:
            self._move(self.root / relpath, target)
        except OSError:
            self._tidy(target.parent)
            raise
        return replace(claimed, path=target)

    def claim_sidecar(self, claimed: Claimed) -> Claimed:
        """Claim the sidecar of a claimed file, unless already claimed. Raises FileNotFoundError if there is none."""
        place = self.sidecar(claimed)
        if (seen := sighting_of(place)) is None:
            self._move(sidecar_beside(self.root / claimed.relpath), place)
            seen = sighting_in(place.lstat())
        return replace(claimed, sidecar=seen)

    def sidecar(self, file: Claimed) -> Path:
        """Path of the file's sidecar: beside the file, or with its claim."""
        if not file.is_ours:
            return sidecar_beside(file.path)
        folder = self.work / file.relpath.rpartition("/")[0]
        return folder / f".{file.identity}~{SIDECAR_SUFFIX}"

    def unclaimed(self, relpath: str, sighting: Sighting, sidecar: Sighting | None = None) -> Claimed:
        return Claimed(relpath, sighting, self.root / relpath, is_ours=False, sidecar=sidecar)

    def sighting(self, claimed: Claimed) -> Sighting:
        return sighting_in(claimed.path.lstat())

    def unclaim(self, claimed: Claimed) -> None:
        """Put the file back, because its writer was not done: under another name if a newer file has its name."""
        target = self.root / claimed.relpath
        self._make(target.parent)
        self._place(claimed, target, claimed.identity)

    def drop_marker(self, relpath: str) -> None:
        """Remove the marker of a claimed file, if there is one."""
        for name in markers_of(relpath):
            try:
                unlink_below(self.root / name, self.root)
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ENAMETOOLONG}:
                    raise

    def recover(self, held: Container[str] = ()) -> Iterator[Claimed]:
        """Claims of this owner whose path is not among ``held``, oldest first."""
        found = []
        for folder, folders, names in os.walk(self.work):
            if not folders and not names:
                self._tidy(Path(folder))
            for path in (f"{folder}/{name}" for name in names):
                claimed = None if path in held else claim_at(path, os.path.relpath(path, self.work))
                if claimed is not None:
                    found.append(claimed)
        yield from sorted(found, key=lambda claimed: (claimed.sighting.mtime_ns, claimed.relpath))

    def put_away(self, file: Claimed, shelf: str, identity: str) -> Path:
        """Move a file and its sidecar to a shelf (`done/2026-05-01`), under a free name; returns its place."""
        file.path.lstat()  # if the file is gone with its share, create no shelf on the mount point
        target = self.root / shelf / file.relpath
        self._make(target.parent)
        return self._place(file, target, identity)

    def delete(self, claimed: Claimed) -> None:
        """Delete the file and its sidecar, if present."""
        gone = (self.sidecar(claimed), claimed.path) if self._is_with_its_sidecar(claimed) else (claimed.path,)
        for path in gone:
            with suppress(FileNotFoundError):
                unlink_below(path, self.root)
        self._tidy(claimed.path.parent)

    def leave(self) -> None:
        """Remove the folder of this owner's claims, and that of all owners, if they are empty."""
        with suppress(OSError):
            self.work.rmdir()
            self.work.parent.rmdir()

    def explain(self, failed: Path, explanation: dict[str, object]) -> None:
        """Write `NAME.error.json` beside a failed file, whole or not at all."""
        target = failed.with_name(fitted(failed.name, ".error.json", self._name_limit))
        with whole_file(target, below=self.root) as file:
            file.write(f"{json.dumps(explanation, indent=2, ensure_ascii=False)}\n".encode())

    def _make(self, folder: Path) -> None:
        """Create a folder below the watched one, never that one: it may be the mount point of a missing share."""
        if not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self.root))
        for attempt in range(MAKE_ATTEMPTS):
            try:
                with open_folder(folder, self.root, makes=True):
                    return
            except FileNotFoundError:  # another agent removed the empty `.work` meanwhile
                if attempt + 1 == MAKE_ATTEMPTS:
                    raise

    def _move(self, source: Path, target: Path) -> None:
        with self._folders(source, target) as (out_of, into):
            os.rename(source.name, target.name, src_dir_fd=out_of, dst_dir_fd=into)

    @contextmanager
    def _folders(self, source: Path, target: Path) -> Iterator[tuple[int, int]]:
        with open_folder(source.parent, self.root) as out_of, open_folder(target.parent, self.root) as into:
            yield out_of, into

    def _place(self, file: Claimed, target: Path, identity: str) -> Path:
        if self.has_sidecars:
            target = self._place_sidecar(file, target, identity)
        place = self._place_without_overwriting(file.path, target, identity)
        self._tidy(file.path.parent)
        return place

    def _place_without_overwriting(self, source: Path, target: Path, identity: str) -> Path:
        """Rename ``source``; if the name is taken, to `NAME~IDENTITY.SUFFIX`. Idempotent after a crash."""
        with self._folders(source, target) as (out_of, into):
            for name in (target.name, other_name(target, identity, self._name_limit)):
                if _is_placed(source.name, name, out_of, into):
                    return target.with_name(name)
        raise FileExistsError(errno.EEXIST, "both its name and its name with identity are taken", str(target))

    def _place_sidecar(self, file: Claimed, target: Path, identity: str) -> Path:
        """Move the sidecar, before its file, to a free pair of names; returns the path for the file.

        After a crash between the two moves, the sidecar's name shows if the first choice was taken.
        """
        names = [target, target.with_name(other_name(target, identity, self._name_limit))]
        beside = [name.with_name(fitted(name.stem, SIDECAR_SUFFIX, self._name_limit)) for name in names]
        if not self._is_with_its_sidecar(file):
            return names[os.path.lexists(beside[1])]
        sidecar = self.sidecar(file)
        is_other = _is_taken(names[0], file.path) or _is_taken(beside[0], sidecar)
        self._place_without_overwriting(sidecar, beside[is_other], identity)
        return names[is_other]

    def _is_with_its_sidecar(self, file: Claimed) -> bool:
        """True if the sidecar seen with this file is still there."""
        if file.sidecar is None:
            return False
        seen = sighting_of(self.sidecar(file))
        return seen is not None and (file.is_ours or seen.is_like(file.sidecar))

    def _tidy(self, folder: Path) -> None:
        """Remove an empty folder of claims, and empty folders above it; this owner's folder stays until `leave`."""
        with suppress(OSError):
            while self.work in folder.parents:
                folder.rmdir()
                folder = folder.parent

    @property
    def _name_limit(self) -> int:
        """Longest name here, in bytes."""
        try:
            return min(os.pathconf(self.root, "PC_NAME_MAX"), NAME_BYTES)
        except OSError:
            return NAME_BYTES

    def _listed(
        self, folder: Path, prefix: str, folders: list[tuple[Path, str]], left_alone: Counter[str]
    ) -> Iterator[Found]:
        """Files of one folder; its subfolders are added to ``folders``, and endings of no image to ``left_alone``."""
        try:
            listed = _entries(folder)
        except OSError as error:
            if prefix and error.errno in PASSED_OVER:
                return
            raise
        names = {entry.name.casefold() for entry in listed}  # whether a file of such a name is there, the disk says
        if not prefix:
            self._tops = frozenset(entry.name for entry in listed if entry.name.casefold() in OWN)
        for entry in listed:
            relpath = prefix + entry.name
            if self._is_ignored(relpath):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append((folder / entry.name, f"{relpath}/"))
                    continue
                if not self._selection.takes(relpath):
                    left_alone[os.path.splitext(entry.name)[1].lower()] += 1
                    continue
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                if error.errno in PASSED_OVER:
                    continue
                raise
            is_marked = any(name.casefold() in names for name in markers_of(entry.name)[:2]) and any(
                os.path.lexists(folder / name) for name in markers_of(entry.name)
            )
            has_sidecar = self.has_sidecars and sidecar_of(entry.name).casefold() in names
            sidecar = sighting_of(sidecar_beside(folder / entry.name)) if has_sidecar else None
            yield Found(relpath, sighting_in(status), is_marked, _objection(relpath, status), sidecar)

    def _is_ignored(self, relpath: str) -> bool:
        is_sidecar = self.has_sidecars and relpath.lower().endswith(SIDECAR_SUFFIX)
        return is_sidecar or self._selection.ignores(relpath) or self.is_own(relpath)

    def is_own(self, relpath: str) -> bool:
        """True for the agent's own folders, and all below them: on a disk without case `NG/` is `ng/`."""
        top = relpath.partition("/")[0]
        return top in OWN or (top.casefold() in OWN and self._is_same(top, top.casefold()))

    def _is_same(self, name: str, own: str) -> bool:
        """Compare by device and inode; disks with another inode for each spelling (FUSE) find ours without listing
        it."""
        try:
            theirs, ours = (os.stat(self.root / each, follow_symlinks=False) for each in (name, own))
        except FileNotFoundError:
            return False
        return os.path.samestat(theirs, ours) or own not in self._tops


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def markers_of(relpath: str) -> tuple[str, ...]:
    """Names of a file's marker: `R1.png.done` or `R1.done`, however the ending is written."""
    return tuple(of + ending for ending in spellings(MARKER) for of in (relpath, os.path.splitext(relpath)[0]))


def is_claim(relpath: str) -> bool:
    return relpath.partition("/")[0] == WORK


def is_own(relpath: str) -> bool:
    """True for the agent's own folders and all below them, by their usual names."""
    return relpath.partition("/")[0] in OWN


def lease_of(descriptor: int) -> Lease:
    """Lease of a file opened here for reading. Disturbs no other reader.

    The kernel signals the holder of a broken lease: the default SIGIO would end the process, SIGURG is ignored.
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


def _is_placed(source: str, name: str, out_of: int, into: int) -> bool:
    """Rename a file of one open folder into another; False if another file has the name."""
    try:
        os.link(source, name, src_dir_fd=out_of, dst_dir_fd=into, follow_symlinks=False)
    except FileExistsError:
        ours = os.stat(source, dir_fd=out_of, follow_symlinks=False)
        if not os.path.samestat(ours, os.stat(name, dir_fd=into, follow_symlinks=False)):
            return False
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=into, follow_symlinks=False)
            return False
        os.rename(source, name, src_dir_fd=out_of, dst_dir_fd=into)
        return True
    os.unlink(source, dir_fd=out_of)
    return True


def _is_taken(place: Path, source: Path) -> bool:
    return os.path.lexists(place) and not os.path.samestat(place.lstat(), source.lstat())


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
