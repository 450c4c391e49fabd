"""What kind of filesystem holds a path: local ones tell of changes and lock safely, shared ones do neither."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
SHARED = re.compile(r"nfs.*|cifs|smb.*|ncpfs|afs|9p|virtiofs|ceph|glusterfs|lustre|fuse|fuse\..*|fuseblk|vboxsf|prl_fs")
LOCAL = re.compile(
    r"ext[234]|xfs|btrfs|f2fs|zfs|bcachefs|tmpfs|ramfs|overlay|aufs|vfat|exfat|ntfs3|apfs|hfs|hfsplus|jfs|reiserfs"
)
ESCAPED = re.compile(r"\\([0-7]{3})")


def filesystem_type(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the filesystem that holds ``path``, which need not exist; None where it cannot be told."""
    try:
        text = mounts.read_text()
    except OSError:
        return None
    resolved = path.resolve()
    above = {str(resolved), *(str(parent) for parent in resolved.parents)}
    found: tuple[int, str] | None = None
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        point = ESCAPED.sub(lambda match: chr(int(match[1], 8)), left.split(" ")[4])
        if point in above and (found is None or len(point) >= found[0]):  # a later mount hides an earlier one
            found = (len(point), right.split(" ")[0])
    return found[1] if found else None


def is_shared(filesystem: str | None) -> bool:
    """Whether other machines, or a program, may serve it: no locks to trust, no events."""
    return filesystem is not None and bool(SHARED.fullmatch(filesystem))


def tells_changes(filesystem: str | None) -> bool:
    """Whether the kernel reports every change in it; a type that nobody knows does not."""
    return filesystem is not None and bool(LOCAL.fullmatch(filesystem))


def sync_folder(folder: Path) -> None:
    """Have what was made, renamed or removed in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
