"""Filesystems and their mounts: local ones report changes and lock safely, shared ones do neither, and may be away."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from experts.filesystem import make_folder, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator

MOUNTS = Path("/proc/self/mountinfo")
FSTAB = Path("/etc/fstab")
SHARED = re.compile(r"nfs.*|cifs|smb.*|ncpfs|afs|9p|virtiofs|ceph|glusterfs|lustre|fuse|fuse\..*|fuseblk|vboxsf|prl_fs")
LOCAL = re.compile(
    r"ext[234]|xfs|btrfs|f2fs|zfs|bcachefs|tmpfs|ramfs|overlay|aufs|vfat|exfat|ntfs3|apfs|hfs|hfsplus|jfs|reiserfs"
)
ESCAPED = re.compile(r"\\([0-7]{3})")


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
