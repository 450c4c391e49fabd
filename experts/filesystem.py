"""Filesystems: their kinds, folders without links, and atomic files.

Local filesystems report changes and lock safely, shared ones do neither. ``whole_file`` is the project's only writer of
files that other processes read. In a folder that other users may write to, no link is followed (``below``): a link
would let another user have any file overwritten, moved or deleted.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

MOUNTS = Path("/proc/self/mountinfo")
FSTAB = Path("/etc/fstab")
SHARED = re.compile(r"nfs.*|cifs|smb.*|ncpfs|afs|9p|virtiofs|ceph|glusterfs|lustre|fuse|fuse\..*|fuseblk|vboxsf|prl_fs")
LOCAL = re.compile(
    r"ext[234]|xfs|btrfs|f2fs|zfs|bcachefs|tmpfs|ramfs|overlay|aufs|vfat|exfat|ntfs3|apfs|hfs|hfsplus|jfs|reiserfs"
)
ESCAPED = re.compile(r"\\([0-7]{3})")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def filesystem_type(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Type of the filesystem that holds ``path``, which need not exist; None if unknown."""
    resolved = path.resolve()
    above = {str(resolved), *(str(parent) for parent in resolved.parents)}
    found: tuple[int, str] | None = None
    for point, type_ in _mounted(mounts):
        if point in above and (found is None or len(point) >= found[0]):  # later mounts hide earlier ones
            found = (len(point), type_)
    return found[1] if found else None


def _mounted(mounts: Path = MOUNTS) -> Iterator[tuple[str, str]]:
    """Mount points with the types of their filesystems; none where the system does not tell."""
    with suppress(OSError):
        for line in mounts.read_text().splitlines():
            left, _, right = line.partition(" - ")
            yield ESCAPED.sub(lambda match: chr(int(match[1], 8)), left.split(" ")[4]), right.split(" ")[0]


class MountedFolder:
    """Folder that may be on a share or another disk: while that is away it is waited for, not made in its stead.

    A folder that was there is remembered with its mount point, by a file in ``memory``; without one, until the process
    ends. The mount point tells a share that is back from its bare mount point: device and inode of a share may change
    with each mount. A mount of ``fstab`` is waited for from the first start on.
    """

    def __init__(self, folder: Path, memory: Path | None = None, *, fstab: Path = FSTAB) -> None:
        self.folder = folder
        digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()
        self._note = None if memory is None else memory / digest[:16]
        self._fstab = fstab
        self._mount: Path | None = None  # its mount point, once it was there

    def find(self) -> None:
        """Raises OSError if the folder was there and is away, or on a mount of fstab that is away."""
        self._recall()
        resolved = self.folder.resolve()
        above = (resolved, *resolved.parents)
        for mount in (self._mount, *_mounts_of(self._fstab)):
            if mount in above and not (mount.is_mount() or str(mount) in dict(_mounted())):  # a bind mount
                raise self._away(f"nothing is mounted at {mount} - mount its share or disk there")
        if self.folder.is_dir():
            self._remember(next(each for each in above if each.is_mount()))
        elif self._mount is not None:
            raise self._away("it was there and is gone - mount its share or disk, or make the folder")

    def make(self) -> None:
        """``find``; makes a folder that was never there, but no folder above it. Raises OSError as ``find``, and for an
        empty folder above it, which may be the mount point of an absent share."""
        if self._note is not None:
            self._note.parent.mkdir(parents=True, exist_ok=True)
        self.find()
        if not self.folder.is_dir():
            parent = self.folder.parent
            if not parent.is_dir() or not (parent.is_mount() or any(parent.iterdir())):
                what = "empty, as where a share is not mounted" if parent.is_dir() else "missing"
                raise self._away(f"{parent} is {what} - mount its share, or make the folder")
            make_folder(self.folder)
            self.find()

    def _away(self, reason: str) -> OSError:
        return OSError(errno.ENODEV, f"OFFLINE: {reason}", str(self.folder))

    def _recall(self) -> None:
        if self._mount is None and self._note is not None:
            with suppress(FileNotFoundError):
                self._mount = Path(os.fsdecode(self._note.read_bytes()))

    def _remember(self, mount: Path) -> None:
        if mount != self._mount and self._note is not None:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self._note) as file:
                file.write(os.fsencode(mount))
        self._mount = mount


def _mounts_of(fstab: Path) -> Iterator[Path]:
    with suppress(OSError):
        for line in fstab.read_text(errors="surrogateescape").splitlines():
            fields = line.split()
            if len(fields) > 1 and not line.lstrip().startswith("#"):
                yield Path(ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[1]))


def is_shared(filesystem: str | None) -> bool:
    """True for a filesystem of another machine or a program: its locks and events cannot be trusted."""
    return filesystem is not None and bool(SHARED.fullmatch(filesystem))


def tells_changes(filesystem: str | None) -> bool:
    """True where the kernel reports every change; False for unknown types."""
    return filesystem is not None and bool(LOCAL.fullmatch(filesystem))


@contextmanager
def whole_file(path: Path, *, below: Path | None = None, has_rivals: bool = False) -> Iterator[BinaryIO]:
    """Atomic file: takes its name once complete and synced; an error leaves nothing.

    ``below``: a folder that others may write to; links between it and the file are refused as OSError. ``has_rivals``:
    several processes may write the file at once. Else the next writer removes the draft of a killed one.
    """
    with open_folder(path.parent, below) as folder:
        draft = _draft_name(path.name, f".{os.getpid()}.tmp" if has_rivals else ".tmp", folder)
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        try:
            with open(os.open(draft, NEW_FILE, 0o666, dir_fd=folder), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)
        os.fsync(folder)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Atomic folder of files and folders: takes its name, which an empty folder may have, once complete and synced.

    An error leaves nothing. Raises OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        yield made
        for path in (made, *made.rglob("*")):
            if path.is_dir():
                sync_folder(path)
            else:
                with path.open("rb") as written:
                    os.fsync(written.fileno())
        if folder.is_dir():
            folder.rmdir()
        made.rename(folder)
    sync_folder(folder.parent)


def is_taken(folder: Path) -> bool:
    """True if something other than an empty folder is there."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def file_sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def take_name(draft: Path, path: Path) -> None:
    """Rename a finished file: a crash leaves the earlier file, or this one whole."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


@contextmanager
def whole_text_file(path: Path) -> Iterator[TextIO]:
    """``whole_file`` for text in UTF-8."""
    with whole_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        try:
            yield text
        finally:
            text.detach()


def _draft_name(name: str, ending: str, folder: int) -> str:
    if len(os.fsencode(f".{name}{ending}")) > os.fpathconf(folder, "PC_NAME_MAX"):
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return f".{name}{ending}"


@contextmanager
def open_folder(folder: Path, below: Path | None = None, *, makes: bool = False) -> Iterator[int]:
    """Descriptor of a folder. ``below``: no link is followed from there on; ``makes``: missing folders are made.

    Raises OSError, NotADirectoryError for a link among them.
    """
    descriptor = os.open(below or folder, FOLDER)
    try:
        for name in () if below is None else folder.relative_to(below).parts:
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            outer, descriptor = descriptor, _open_inner(name, descriptor, folder)
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_inner(name: str, outer: int, folder: Path) -> int:
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=outer)
    except OSError as error:
        if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        told = f"{name!r} is a link or a file where a folder belongs: nothing is done through it - remove it"
        raise NotADirectoryError(errno.ENOTDIR, told, str(folder)) from error


def unlink_below(path: Path, below: Path) -> None:
    """Remove a file; no link is followed from ``below`` on. Raises OSError, FileNotFoundError if it is not there."""
    with open_folder(path.parent, below) as folder:
        os.unlink(path.name, dir_fd=folder)


def remove_empty(folder: Path, below: Path) -> None:
    """Remove a folder, and those above it up to ``below``, as long as they are empty. Follows no link."""
    with suppress(OSError):  # not empty, or no permission
        while below in folder.parents:
            with open_folder(folder.parent, below) as above:
                os.rmdir(folder.name, dir_fd=above)
            folder = folder.parent


def make_folder(folder: Path) -> None:
    """Make a folder, and sync it with all parents, which may be new, too."""
    folder.mkdir(parents=True, exist_ok=True)
    for above in folder.parents:
        with suppress(OSError):  # no permission: the folder existed before
            sync_folder(above)


def sync_folder(folder: Path) -> None:
    with open_folder(folder) as descriptor:
        os.fsync(descriptor)
