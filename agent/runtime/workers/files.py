"""Packed files on their way to a worker: linked on one filesystem, copied piece by piece where not.

Guarantees: a file takes its name once it is complete and has its sha256; a link is verified as every packed file is,
at its first read.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from experts.errors import CoServeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from experts.packed.weights import PackedExpert, SegmentStore

PIECE_BYTES = 8 * 1024 * 1024
SEGMENTS, PROGRAMS = "segments", "programs"


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file. ``kind``: its folder; ``path``: of the agent, to link where both share a filesystem."""

    kind: str
    sha256: str
    size_bytes: int
    path: str


def files_of(packed: Iterable[PackedExpert], segments: SegmentStore) -> tuple[PackedFile, ...]:
    """Packed files of these experts, each once. Raises FileNotFoundError for one that is not there."""
    sizes = {(SEGMENTS, part.sha256): part.size_bytes for each in packed for part in each.segments}
    found = {key: PackedFile(*key, size, str(segments.segment_path(key[1]))) for key, size in sizes.items()}
    for each in packed:
        if each.program_sha256 is not None:
            path = segments.program_path(each.program_sha256)
            key = PROGRAMS, each.program_sha256
            found[key] = PackedFile(*key, path.stat().st_size, str(path))
    return tuple(found.values())


def pieces_of(file: PackedFile, segments: SegmentStore) -> Iterator[bytes]:
    """Bytes of a packed file here. Raises FileNotFoundError."""
    path_of = segments.segment_path if file.kind == SEGMENTS else segments.program_path
    with path_of(file.sha256).open("rb") as opened:
        while content := opened.read(PIECE_BYTES):
            yield content


@dataclass(slots=True)
class _Draft:
    file: BinaryIO
    sha256: hashlib._Hash = field(default_factory=hashlib.sha256)
    written_bytes: int = 0


class FileReceiver:
    """Packed files of one worker's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drafts: dict[str, _Draft] = {}
        for kind in (SEGMENTS, PROGRAMS):
            (folder / kind).mkdir(parents=True, exist_ok=True)

    def link(self, files: Iterable[PackedFile]) -> tuple[PackedFile, ...]:
        """Link files from the agent's folder; returns those that are not here afterwards."""
        return tuple(file for file in files if not (self._is_here(file) or self._link(file)))

    def write(self, file: PackedFile, content: bytes) -> None:
        """Write the next piece of a file. Raises CoServeError for one whose sha256 is another."""
        path = self._path(file)
        draft_path = path.with_suffix(".tmp")
        draft = self._drafts.get(file.sha256)
        if draft is None:
            draft = self._drafts[file.sha256] = _Draft(draft_path.open("wb"))
        draft.file.write(content)
        draft.sha256.update(content)
        draft.written_bytes += len(content)
        if draft.written_bytes < file.size_bytes:
            return
        del self._drafts[file.sha256]
        with draft.file as opened:
            opened.flush()
            os.fsync(opened.fileno())
        if draft.sha256.hexdigest() != file.sha256:
            draft_path.unlink()
            raise CoServeError(f"{path.name} arrived with other bytes than it was packed with - start the worker again")
        draft_path.replace(path)

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
