"""End of a TIFF's pixels, by its first directory, at a bounded cost.

Pillow reads as many bytes as each tag claims. This module reads at most a directory of ``LARGEST_DIRECTORY`` entries,
and the tables of ``LARGEST_TABLE`` strips and as many tiles.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from experts.errors import ImageUnreadable
from experts.image_files.jpeg import END, HOLE, START, jpeg_pixels
from experts.image_files.png import inflated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

TIFF_STARTS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
LARGEST_DIRECTORY = 4096  # entries; images have about thirty
LARGEST_TABLE = 1 << 20  # strips or tiles, more than Pillow opens
TABLES = ((273, 279), (324, 325))  # tags: strip offsets and byte counts, tile offsets and byte counts
COMPRESSION, JPEG_TABLES = 259, 347
RAW, JPEG, DEFLATE = 1, 7, frozenset({8, 32946})  # compressions; JPEG: each strip or tile is a file, less its tables
LAST_STANDARD = 532  # later tags are extensions: wrong ones do not keep a file from decoding
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
UNSIGNED = frozenset({3, 4, 13, 16, 18})  # types of numbers that are offsets and counts


@dataclass(frozen=True, slots=True)
class TiffPixels:
    """Verdict on a TIFF's pixels: within the file, and stored raw. ``end``: place behind the last of them."""

    are_within: bool
    are_raw: bool
    end: int


@dataclass(frozen=True, slots=True)
class _Tag:
    """Tag of the directory: type, count, and place and length of its values."""

    type: int
    count: int
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class _TiffFile:
    """Reads within the file's size; reading beyond raises EOFError."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._file = file

    def tags(self) -> dict[int, _Tag]:
        """First directory; the last of duplicate tags wins, as in decoders."""
        start = self._read(0, 4)
        self._order = order = "<" if start.startswith(b"II") else ">"
        word, number = (f"{order}u8", f"{order}u8") if b"+" in start else (f"{order}u4", f"{order}u2")
        entry = np.dtype([("tag", f"{order}u2"), ("type", f"{order}u2"), ("count", word), ("value", word)])
        word_bytes = entry["value"].itemsize
        begin = self._one(word, word_bytes)
        length, place = self._one(number, begin), begin + np.dtype(number).itemsize
        if length > LARGEST_DIRECTORY:  # garbage where a directory should be
            raise EOFError
        tags = {}
        for name, kind, count, value in self._array(entry, place, length).tolist():
            place += entry.itemsize
            size_bytes = count * ITEM_BYTES.get(kind, 0)
            tags[name] = _Tag(kind, count, place - word_bytes if size_bytes <= word_bytes else value, size_bytes)
        return tags

    def numbers(self, tag: _Tag) -> NDArray[np.uint64]:
        kind = np.dtype(f"{self._order}u{ITEM_BYTES[tag.type]}")
        return self._array(kind, tag.offset, tag.count).astype(np.uint64)

    def _one(self, kind: str, offset: int) -> int:
        return int(self._array(np.dtype(kind), offset, 1)[0])

    def _array(self, kind: np.dtype[Any], offset: int, length: int) -> NDArray[Any]:
        return np.frombuffer(self._read(offset, length * kind.itemsize), kind)

    def _read(self, offset: int, length: int) -> bytes:
        if offset + length > self.size:
            raise EOFError
        self._file.seek(offset)
        content = self._file.read(length)
        if len(content) < length:  # it was cut meanwhile
            raise EOFError
        return content


def tiff_pixels(file: BinaryIO, size: int) -> TiffPixels | None:
    """Verdict of the first directory on the pixels; None with more strips or tiles than LARGEST_TABLE.

    Raises EOFError if the directory or its targets are missing, and OSError.
    """
    tiff = _TiffFile(file, size)
    tags = tiff.tags()
    if any(tag.end > size for name, tag in tags.items() if name <= LAST_STANDARD):
        raise EOFError
    if sum(tag.size_bytes for tag in tags.values() if tag.end <= size) > size:
        raise EOFError  # tags claim the same bytes repeatedly, and a decoder would read them as often
    tables = [(tags[offsets], tags[counts]) for offsets, counts in TABLES if {offsets, counts} <= tags.keys()]
    tables = [table for table in tables if all(tag.type in UNSIGNED and tag.count for tag in table)]
    if not tables:
        raise EOFError  # no pixels yet
    if any(tag.count > LARGEST_TABLE for table in tables for tag in table):
        return None
    is_raw = COMPRESSION not in tags or tags[COMPRESSION].type not in UNSIGNED or _is_raw(tiff, tags[COMPRESSION])
    ends = [_end_within(tiff, *table) for table in tables]
    return TiffPixels(None not in ends, is_raw, max(end or 0 for end in ends))


def _end_within(tiff: _TiffFile, offsets: _Tag, counts: _Tag) -> int | None:
    """Place behind a table's last byte; None if it is beyond the file."""
    length = min(offsets.count, counts.count)
    starts, sizes = tiff.numbers(offsets)[:length], tiff.numbers(counts)[:length]
    end = np.uint64(tiff.size)
    is_within = (starts <= end).all() and (sizes <= end - starts).all()  # in this order nothing can overflow
    return int((starts + sizes).max()) if is_within else None


def _is_raw(tiff: _TiffFile, tag: _Tag) -> bool:
    return tag.count == 1 and int(tiff.numbers(tag)[0]) == RAW


def tiff_damage(content: bytes, tags: Mapping[int, Any], is_cmyk: bool) -> str | None:
    """Place of the first damaged strip or tile of compressed data; None without one that shows.

    libtiff fills a lost part with grey, or with whatever zeros stand for in its compression.
    """
    if (kind := tags.get(COMPRESSION, RAW)) == RAW:
        return None
    offsets, counts = next(((tags[starts], tags[sizes]) for starts, sizes in TABLES if starts in tags), ((), ()))
    for number, (start, size) in enumerate(zip(offsets, counts, strict=True)):
        part = content[start : start + size]
        try:
            if kind == JPEG:
                jpeg_pixels(tags.get(JPEG_TABLES, START + END)[: -len(END)] + part[len(START) :], "", is_cmyk)
            elif kind in DEFLATE:
                deque(inflated([memoryview(part)]), maxlen=0)
            elif HOLE in part.rstrip(b"\0"):
                raise ValueError("zeros stand for its data")
        except ImageUnreadable as error:
            return f"in part {number + 1} of {len(offsets)}: {error.message.removeprefix('is damaged: ')}"
        except (zlib.error, ValueError) as error:
            return f"in part {number + 1} of {len(offsets)}: {error}"
    return None
