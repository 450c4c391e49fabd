"""Identity of a file in an inbox: in its key, in the name of its claim, and in names on its shelf.

INODE-SIZE-MTIME         a claim of an earlier version, or any sighting
INODE-SIZE-MTIME-nCLAIM  claimed: a claim has a random number of its own, which survives an end of the agent in its name
INODE-SIZE-MTIME-tCTIME  judged where it lies: kept or refused
Guarantees: a writer who controls name, size and mtime, and a disk that uses an inode again, never make one file look
like another. A file of any name can be named: a name that would become too long is cut, and a digest keeps it unique.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.sources.folder.files.readiness import Sighting

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = ".work"
IDENTITY = r"([0-9a-f]+)-([0-9a-f]+)-(-?[0-9a-f]+)(?:-n([0-9a-f]+))?~"  # files may be older than 1970
VISIBLE = r"[^./][^/]*"  # hidden files are never claimed
CLAIMED = re.compile(rf"(?P<sub>(?:{VISIBLE}/)*)(?:{IDENTITY}|\.{IDENTITY}/)(?P<name>{VISIBLE})")
CLAIM_BITS = 64
NAME_BYTES = 255  # some filesystems take only shorter names
LONGEST_SUFFIX = 16  # a longer one is no format


@dataclass(frozen=True, slots=True)
class Claimed:
    """File held by this agent: original path, what was seen, current path.

    ``is_ours``: claimed by a rename; otherwise its owner may replace it at any time. ``sidecar``: seen beside it.
    ``claim``: its number; None for a claim of an earlier version, and for a file in its place.
    """

    relpath: str
    sighting: Sighting
    path: Path
    is_ours: bool = True
    sidecar: Sighting | None = None
    claim: int | None = None

    @property
    def identity(self) -> str:
        seen = seen_identity(self.sighting)
        if not self.is_ours:
            return f"{seen}-t{self.sighting.ctime_ns:x}"
        return seen if self.claim is None else f"{seen}-n{self.claim:x}"


def seen_identity(sighting: Sighting) -> str:
    return f"{sighting.inode:x}-{sighting.size_bytes:x}-{sighting.mtime_ns:x}"


def claim_at(path: str, below_work: str) -> Claimed | None:
    """Claim in a file of the owner's folder; None for a sidecar, and a foreign file."""
    parts = CLAIMED.fullmatch(below_work)
    if parts is None:
        return None
    inode, size, mtime, claim = parts.group(2, 3, 4, 5) if parts[2] else parts.group(6, 7, 8, 9)
    sighting = Sighting(int(inode, 16), int(size, 16), int(mtime, 16))
    return Claimed(parts["sub"] + parts["name"], sighting, Path(path), claim=int(claim, 16) if claim else None)


def claim_names(identity: str, name: str) -> tuple[str, str]:
    """Below the owner's folder: the usual one, and that of a long name."""
    return f"{identity}~{name}", f".{identity}~/{name}"


def claims_of(root: Path, relpath: str, identity: str) -> Iterator[Path]:
    """Possible places of a claimed file until it is put away."""
    folder, _, name = relpath.rpartition("/")
    for owner in (root / WORK).glob("*"):
        yield from (owner / folder / place for place in claim_names(identity, name))


def sighting_in(status: os.stat_result) -> Sighting:
    return Sighting(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def sighting_of(path: Path) -> Sighting | None:
    """Sighting of a path; None if there is no file, or the name is too long."""
    try:
        return sighting_in(path.lstat())
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
            return None
        raise


def fitted(name: str, ending: str, limit_bytes: int) -> str:
    """``name`` with ``ending``; a too long name is cut, and gets its digest."""
    if len(os.fsencode(name + ending)) <= limit_bytes:
        return name + ending
    ending = f"~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}{ending}"
    while name and len(os.fsencode(name + ending)) > limit_bytes:
        name = name[:-1]  # a whole character
    return name + ending


def printable(text: str) -> str:
    """Text with bytes outside UTF-8 escaped, for logs, JSON and people."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def other_name(target: Path, identity: str, limit_bytes: int = NAME_BYTES) -> str:
    suffix = target.suffix if len(target.suffix) <= LONGEST_SUFFIX else ""
    return fitted(target.name.removesuffix(suffix), f"~{identity}{suffix}", limit_bytes)
