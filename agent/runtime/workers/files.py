"""Packed files on their way to a worker: linked on one filesystem, copied piece by piece where not.

Guarantees: a file takes its name once it is complete. Its sha256 is verified as that of every packed file, at its first
read: a file with other bytes is dropped then. As it may be the agent's own, it comes again once the agent has looked at
its file, and has packed a corrupt one anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.errors import CoServeError
from experts.packed.weights import LOCK_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from experts.packed.weights import PackedExpert, SegmentStore

PIECE_BYTES = 1024 * 1024  # an image waits for one piece: 8 ms at 1 Gbit/s
SEGMENTS, PROGRAMS = "segments", "programs"


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file. ``kind``: its folder; ``path``: the agent's file, to link where both share a filesystem."""

    kind: str
    sha256: str
    size_bytes: int
    path: str


def files_of(packed: Iterable[PackedExpert], segments: SegmentStore) -> tuple[PackedFile, ...]:
    """Packed files of these experts, each once. Raises FileNotFoundError for a program that is not there."""
    found = {}
    for each in packed:
        for part in each.segments:
            path = segments.segment_path(part.sha256)
            found[part.sha256] = PackedFile(SEGMENTS, part.sha256, part.size_bytes, str(path))
        if each.program_sha256 is not None:
            path = segments.program_path(each.program_sha256)
            found[each.program_sha256] = PackedFile(PROGRAMS, each.program_sha256, path.stat().st_size, str(path))
    return tuple(found.values())


def files_in(packed: PackedExpert) -> set[str]:
    """sha256 of its packed files."""
    return {part.sha256 for part in packed.segments} | {packed.program_sha256 or ""}


def piece_of(file: PackedFile, offset: int, segments: SegmentStore) -> bytes:
    """Bytes of a packed file here, wherever the other end has it; empty once it is gone, or at its end."""
    path_of = segments.segment_path if file.kind == SEGMENTS else segments.program_path
    try:
        with path_of(file.sha256).open("rb") as opened:
            opened.seek(offset)
            return opened.read(PIECE_BYTES)
    except FileNotFoundError:
        return b""


class FileReceiver:
    """Packed files of one worker's folder. ``awaited``: sha256 of those that the agent has been asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.awaited: set[str] = set()
        for kind in (SEGMENTS, PROGRAMS):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / LOCK_NAME).touch()  # files of a folder without it are never looked into: see SegmentStore.is_there

    def link(self, files: Iterable[PackedFile]) -> tuple[PackedFile, ...]:
        """Link files from the agent's folder; returns those that are not here afterwards, and awaits them."""
        lacking = tuple(file for file in files if not (self._is_here(file) or self._link(file)))
        self.awaited.update(file.sha256 for file in lacking)
        return lacking

    def write(self, file: PackedFile, offset: int, content: bytes) -> None:
        """Write the next piece of a file; an empty one ends the wait for a file that the agent lacks."""
        path = self._path(file)
        draft = path.with_suffix(".tmp")
        with draft.open("r+b" if offset else "wb") as opened:
            opened.seek(offset)
            opened.write(content)
        if offset + len(content) == file.size_bytes:
            draft.replace(path)
            self.awaited.discard(file.sha256)
        elif not content:
            draft.unlink()
            self.awaited.discard(file.sha256)

    def keep(self, files: Iterable[PackedFile]) -> None:
        """Remove all other files that are complete."""
        kept = {self._path(file) for file in files}
        for kind in (SEGMENTS, PROGRAMS):
            for path in (self._folder / kind).glob("*.bin"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def _path(self, file: PackedFile) -> Path:
        if file.kind not in (SEGMENTS, PROGRAMS) or not file.sha256.isalnum():
            raise CoServeError(f"{file.kind}/{file.sha256} is no packed file")
        return self._folder / file.kind / f"{file.sha256}.bin"

    def _is_here(self, file: PackedFile) -> bool:
        try:
            return self._path(file).stat().st_size == file.size_bytes
        except FileNotFoundError:
            return False

    def _link(self, file: PackedFile) -> bool:
        path = self._path(file)
        path.unlink(missing_ok=True)  # of another size
        try:
            os.link(file.path, path)
        except OSError:  # another box or filesystem, or links are not allowed
            return False
        return self._is_here(file)
