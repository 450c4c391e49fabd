"""A disk that loses its power: what is left of a folder whose every change write_log.c wrote down.

Sure to be left is what was synced before the cut: of a file its bytes, of a folder its names. What was not may be there
or not, bytes a sector at a time and in any order, names in theirs: `Survivors` say how much of it is.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD = struct.Struct("<cQQQ")
SECTOR_BYTES = 512
SOURCE = Path(__file__).with_name("write_log.c")


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    file: int
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Survivors:
    """Parts of unsynced changes that are left: the first so many ``names``; ``piece`` of a write or a cut to size."""

    names: Callable[[int], int]
    piece: Callable[[Entry], Entry | None]


NOTHING = Survivors(lambda count: 0, lambda entry: None)
EVERYTHING = Survivors(lambda count: count, lambda entry: entry)


def some(chance):
    """As chance has it: whole writes, the first sectors of one, none."""

    def piece(entry):
        kept = chance.choice(("whole", "torn", "none"))
        if kept == "torn" and entry.kind == "W":
            sectors = chance.randint(0, len(entry.content) // SECTOR_BYTES)
            return Entry("W", entry.file, entry.offset, entry.content[: sectors * SECTOR_BYTES])
        return entry if kept == "whole" else None

    return Survivors(lambda count: chance.randint(0, count), piece)


@dataclass(slots=True, eq=False)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[Entry] = field(default_factory=list)

    def sync(self):
        for entry in self.pending:
            _apply(entry, self.synced)
        self.pending = []

    def left(self, survivors):
        content = bytearray(self.synced)
        for entry in self.pending:
            if (piece := survivors.piece(entry)) is not None:
                _apply(piece, content)
        return bytes(content)


@dataclass(slots=True, eq=False)
class _Renaming:
    """A change of names. ``made``: the file, or None for a folder, that gets the name ``to``."""

    kind: str
    name: str
    to: str
    made: _File | None
    unsynced: set[str]  # folders whose names it changes


class Disk:
    """What was done up to a moment, and what of it was synced."""

    def __init__(self, folder, entries):
        self._folder = str(folder)
        self._files = {}
        self._folders = {folder.stat().st_ino: str(folder)}
        self._names = []
        for entry in entries:
            self._do(entry)

    def leave(self, survivors, into):
        """Write what is left into an empty folder."""
        for path, file in self._tree(survivors).items():
            target = into / os.path.relpath(path, self._folder)
            if file is None:
                target.mkdir()
            else:
                target.write_bytes(file.left(survivors))

    def _do(self, entry):
        if entry.kind in "WT":
            self._file(entry.file).pending.append(entry)
        elif entry.kind == "S":
            self._sync(entry.file)
        elif entry.kind in "CMRUD":
            self._rename(entry)

    def _file(self, number):
        return self._files.setdefault(number, _File())

    def _sync(self, number):
        folder = self._folders.get(number)
        if folder is None:
            self._file(number).sync()
        for change in self._names:
            change.unsynced.discard(str(folder))

    def _rename(self, entry):
        name, _, to = os.fsdecode(entry.content).partition("\0")
        made = None
        if entry.kind == "C":
            made = self._files[entry.file] = _File()  # its number may be that of a file that is gone
            self._folders.pop(entry.file, None)
        elif entry.kind == "M":
            self._folders[entry.file] = name
        self._names.append(
            _Renaming(entry.kind, name, to, made, {str(Path(each).parent) for each in (name, to) if each})
        )

    def _tree(self, survivors):
        """Files, and None for folders, by their names; folders before what they hold."""
        first = survivors.names(len(self._names))
        tree = {self._folder: None}
        for number, change in enumerate(self._names):
            if number < first or not change.unsynced:
                _change(tree, change)
        del tree[self._folder]
        return {path: tree[path] for path in sorted(tree)}


def _change(tree, change):
    """As far as it can be: what lies in a folder that is not there is not there either."""
    is_there = change.name in tree
    before = tree.pop(change.name, None)
    if str(Path(change.to or change.name).parent) not in tree:
        return
    if change.kind in "CM":
        tree[change.name] = change.made
    elif change.kind == "R" and is_there:
        tree[change.to] = before


def _apply(entry, content):
    size = entry.offset + len(entry.content)
    if len(content) < size:
        content.extend(bytes(size - len(content)))
    if entry.kind == "W":
        content[entry.offset : size] = entry.content
    else:
        del content[entry.offset :]


def read_log(path):
    return list(_entries(path.read_bytes()))


def _entries(log):
    at = 0
    while at < len(log):
        kind, file, offset, length = HEAD.unpack_from(log, at)
        at += HEAD.size
        yield Entry(kind.decode(), file, offset, log[at : at + length])
        at += length


def built(folder):
    """The library to preload. Raises FileNotFoundError where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc), without which no power cut can be tried: make tools")
    library = folder / "write_log.so"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *options, "-o", library, SOURCE, "-ldl"], check=True)
    return library
