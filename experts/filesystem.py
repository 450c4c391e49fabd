"""Folders without links, and atomic files.

``whole_file`` is the project's only writer of files that other processes read. In a folder that other users may write
to, no link is followed (``below``): a link would let another user have any file overwritten, moved or deleted.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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
        message = f"{name!r} is a link or a file where a folder belongs: nothing is done through it - remove it"
        raise NotADirectoryError(errno.ENOTDIR, message, str(folder)) from error


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
