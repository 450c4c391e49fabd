"""Files read past the page cache, several parts at once, straight into memory that the caller owns.

Guarantees: a call that returns has filled every byte from the file as it is now. A file of another size, or one that
shrinks under the read, is WeightsCorrupt; an absent one WeightsMissing; any other refusal of the system LoadError.
Assumes: the file's size is a multiple of ALIGNMENT_BYTES.
Why this structure: one thread's direct reads leave half of an NVMe drive idle, four reach its limit; the page cache
would hold every expert a second time. Where a filesystem refuses direct reads (EINVAL on open, or on reading into
unaligned memory) the bytes go through the page cache, and are dropped from it afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from experts.daemon_threads import DaemonThreads
from experts.errors import LoadError, WeightsCorrupt, WeightsMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

Result = TypeVar("Result")

READERS = 4  # parallel preadv of one file: enough to reach the drive's limit
CLOSE_S = 5.0  # a read without an answer by then is abandoned
PIECE_BYTES = 1024 * 1024  # of a range with a waiting caller: short, so that several threads share it
PAGE_BYTES = 4096
PART_BYTES = 8 * 1024 * 1024  # one read: long enough for the drive, short enough to hash while the next one runs

_DIRECT_FLAG = getattr(os, "O_DIRECT", 0)
_NO_CACHE = getattr(fcntl, "F_NOCACHE", None)  # macOS: the same, set after opening


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Stamp of a file's content, from its status alone."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(inode=status.st_ino, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class DigestedFile:
    """A file's stamp at opening, and the sha256 of the bytes that were read."""

    stamp: FileStamp
    sha256: str


@dataclass(frozen=True, slots=True)
class FilePart:
    """Part of a file in the staging memory: its bytes from ``start_bytes`` on, at ``at_bytes`` there."""

    start_bytes: int
    at_bytes: int
    content: memoryview


class DirectReader:
    """Thread pool that reads parts of files, for several callers at once."""

    def __init__(self, readers: int = READERS) -> None:
        self._threads = DaemonThreads(readers, "direct-read")

    def close(self) -> None:
        self._threads.stop(CLOSE_S)

    def read(
        self, path: Path, target: memoryview, expert: str, on_part: Callable[[FilePart], None] | None = None
    ) -> FileStamp:
        """Fill ``target`` with the whole file and return its stamp at opening.

        ``on_part`` gets each part, in order, as soon as it has arrived (to hash it while later ones are read). As in
        ``stream``, the parts may start over from the first one.
        """
        return _read_file(path, expert, lambda file: self._read_parts(file, path, target, expert, on_part))

    def read_part(self, path: Path, start_bytes: int, target: memoryview, size_bytes: int, expert: str) -> FileStamp:
        """Fill ``target`` from the middle of a file of that size; start and length are aligned as the file is."""

        def read(file: int) -> FileStamp:
            stamp = _stamp_of(file, path, size_bytes, expert)
            self._fill(file, path, start_bytes, target, expert)
            return stamp

        return _read_file(path, expert, read)

    def _fill(self, file: int, path: Path, start_bytes: int, target: memoryview, expert: str) -> None:
        """Read a range in pieces on all threads; a single piece is read on the caller's thread."""
        pieces = [(at, target[at : at + PIECE_BYTES]) for at in range(0, len(target), PIECE_BYTES)]
        reads = [self._threads.submit(_read_part, file, start_bytes + at, piece) for at, piece in pieces[1:]]
        try:
            counts = [_read_part(file, start_bytes, pieces[0][1]), *(read.result() for read in reads)]
        finally:
            _settle(reads)
        if counts != [len(piece) for _, piece in pieces]:
            raise WeightsCorrupt(expert, f"{path} ended while it was read: pack it again")

    def stream(
        self, path: Path, size_bytes: int, staging: memoryview, expert: str, on_part: Callable[[FilePart], None]
    ) -> FileStamp:
        """Pass a whole file of that size through ``staging``, which holds some of its parts at a time.

        ``staging``: READERS pages at least. ``on_part`` gets each part, in order; its bytes stay in place until it
        returns. Where a filesystem refuses direct reads, the parts start over from the first one.
        """
        return _read_file(
            path, expert, lambda file: self._stream_parts(file, path, size_bytes, staging, expert, on_part)
        )

    def digest(self, path: Path, size_bytes: int, expert: str) -> DigestedFile:
        """Digest of a whole file of that size, read from the disk, in little memory."""

        def read(file: int) -> DigestedFile:
            stamp = _stamp_of(file, path, size_bytes, expert)
            _drop_from_cache(file)
            with open(file, "rb", closefd=False) as stream:
                return DigestedFile(stamp, hashlib.file_digest(stream, "sha256").hexdigest())

        return _read_file(path, expert, read, direct=False)

    def _read_parts(
        self, file: int, path: Path, target: memoryview, expert: str, on_part: Callable[[FilePart], None] | None
    ) -> FileStamp:
        stamp = _stamp_of(file, path, len(target), expert)
        parts = [(start, target[start : start + PART_BYTES]) for start in range(0, len(target), PART_BYTES)]
        reads = [self._threads.submit(_read_part, file, start, part) for start, part in parts]
        try:
            for (start, part), read in zip(parts, reads, strict=True):
                if read.result() != len(part):
                    raise WeightsCorrupt(expert, f"{path} ended while it was read: pack it again")
                if on_part is not None and part:
                    on_part(FilePart(start, start, part))
        finally:
            _settle(reads)  # no thread may still write into the caller's memory, or read a closed file
        return stamp

    def _stream_parts(
        self,
        file: int,
        path: Path,
        size_bytes: int,
        staging: memoryview,
        expert: str,
        on_part: Callable[[FilePart], None],
    ) -> FileStamp:
        stamp = _stamp_of(file, path, size_bytes, expert)
        part_bytes = min(PART_BYTES, len(staging) // READERS & -PAGE_BYTES)
        places = len(staging) // part_bytes
        under_way: deque[tuple[FilePart, Future[int]]] = deque()
        try:
            for number, start in enumerate(range(0, size_bytes, part_bytes)):
                if len(under_way) == places:
                    _pass_on(*under_way.popleft(), path, expert, on_part)
                at = number % places * part_bytes
                part = FilePart(start, at, staging[at : at + min(part_bytes, size_bytes - start)])
                under_way.append((part, self._threads.submit(_read_part, file, start, part.content)))
            while under_way:
                _pass_on(*under_way.popleft(), path, expert, on_part)
        finally:
            _settle([read for _, read in under_way])
        return stamp


def _read_file(path: Path, expert: str, read: Callable[[int], Result], *, direct: bool = True) -> Result:
    """Call ``read`` with a descriptor, and again through the page cache where the filesystem refuses direct reads."""
    with _opened(path, expert, direct=direct) as (file, is_direct):
        try:
            result = read(file)
            if not is_direct:
                _drop_from_cache(file)
            return result
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise _load_failed(path, expert, error) from error
    return _read_file(path, expert, read, direct=False)


def _pass_on(part: FilePart, read: Future[int], path: Path, expert: str, on_part: Callable[[FilePart], None]) -> None:
    if read.result() != len(part.content):
        raise WeightsCorrupt(expert, f"{path} ended while it was read: pack it again")
    on_part(part)


def _stamp_of(file: int, path: Path, size_bytes: int, expert: str) -> FileStamp:
    stamp = FileStamp.of(os.fstat(file))
    if stamp.size_bytes != size_bytes:
        raise WeightsCorrupt(expert, f"{path} has {stamp.size_bytes} bytes, {size_bytes} expected: pack it again")
    return stamp


def _settle(reads: list[Future[int]]) -> None:
    for read in reads:
        read.cancel()
    for read in reads:
        if not read.cancelled():
            read.exception()


@contextmanager
def _opened(path: Path, expert: str, *, direct: bool) -> Iterator[tuple[int, bool]]:
    """An open descriptor, and whether reading from it is direct."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    wants_direct = direct and bool(_DIRECT_FLAG)
    try:
        try:
            file = os.open(path, flags | (_DIRECT_FLAG if wants_direct else 0))
        except OSError as error:
            if not wants_direct or error.errno != errno.EINVAL:
                raise
            wants_direct = False
            file = os.open(path, flags)
    except FileNotFoundError as error:
        raise WeightsMissing(expert, f"{path} is not there: put it back, or pack the line again") from error
    except OSError as error:
        raise _load_failed(path, expert, error) from error
    try:
        if direct and _NO_CACHE is not None:
            fcntl.fcntl(file, _NO_CACHE, 1)
        yield file, wants_direct
    finally:
        os.close(file)


def _read_part(file: int, start: int, part: memoryview) -> int:
    """Read until the part is full or the file ends; return the number of bytes."""
    done = 0
    while done < len(part):
        count = os.preadv(file, [part[done:]], start + done)
        if count == 0:
            break
        done += count
    return done


def _drop_from_cache(file: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _load_failed(path: Path, expert: str, error: OSError) -> LoadError:
    return LoadError(expert, f"{path} cannot be read: {error.strerror or error}")
