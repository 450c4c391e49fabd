"""Completeness of a file by its bytes: whether the end that its format declares is there, without decoding.

A file that decodes may still be incomplete: a preallocated baseline JPEG, BMP, TIFF or WebP decodes to black where
bytes are missing. What follows the end does not count.
"""

from __future__ import annotations

import io
import struct
from enum import StrEnum
from typing import BinaryIO

from experts.image_files.jpeg import END, START, picture_end
from experts.image_files.png import PNG_END, SIGNATURE, png_end
from experts.image_files.tiff import TIFF_STARTS, tiff_pixels

TAIL_BYTES = 4096  # so many zeros at the end look like preallocation
MOST_BYTES = 32 * 1024 * 1024  # of a JPEG, read for the end of its picture where other bytes follow it
BMP_HEADER = struct.Struct("<2sIHHIIiiHHI")  # signature .. compression
BMP_INFO_HEADER_BYTES = 40  # shorter headers have another layout
BMP_UNCOMPRESSED = frozenset({0, 3})  # plain pixels, and plain pixels with bit masks


class Completeness(StrEnum):
    """Verdict of a file's bytes on its end."""

    WHOLE = "whole"
    ZERO_TAILED = "zero-tailed"  # black pixels, or bytes not yet written
    HOLED = "holed"  # its last bytes are there, and zeros before them: damaged, or written in another order
    CUT = "cut"
    UNKNOWN = "unknown"  # unknown format; decoding decides


def completeness(file: BinaryIO) -> Completeness:
    """Completeness of an open, seekable file by its bytes, without decoding.

    At most 33 MiB are read (a TIFF's tables, a JPEG's data), whatever the file claims. An empty file, or one of zeros,
    is CUT. Raises OSError when reading fails.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(64)
    tail_size = min(TAIL_BYTES, max(size // 4, 1))
    tail = _before(file, size, tail_size)
    if not any(head):
        return Completeness.CUT
    if head.startswith(SIGNATURE):
        is_whole = png_end(file, size) is not None
        return Completeness.HOLED if not is_whole and PNG_END in tail else _whole_if(is_whole)
    if head.startswith(START):
        return _whole_if(_is_whole_jpeg(file, size))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _ended(file, 8 + int.from_bytes(head[4:8], "little"), size, tail)
    if head.startswith(b"BM"):
        return _whole_if(size >= _bmp_bytes(head), tail)
    if head.startswith(TIFF_STARTS):
        return _tiff(file, size, tail)
    return Completeness.UNKNOWN


def _whole_if(is_whole: bool, tail: bytes = b"-") -> Completeness:
    """``tail``: last bytes, for formats where zeros may be black pixels."""
    if not is_whole:
        return Completeness.CUT
    return Completeness.WHOLE if any(tail) else Completeness.ZERO_TAILED


def _ended(file: BinaryIO, end: int, size: int, tail: bytes) -> Completeness:
    """``end``: place behind the data, in which zeros are no pixels."""
    if size >= end and any(_before(file, end, len(tail))):
        return Completeness.WHOLE
    return Completeness.HOLED if size > end and any(tail) else Completeness.CUT


def _before(file: BinaryIO, end: int, length: int) -> bytes:
    file.seek(max(end - length, 0))
    return file.read(length)


def _is_whole_jpeg(file: BinaryIO, size: int) -> bool:
    """True where the picture's end is the file's, or lies before other bytes."""
    if _before(file, size, len(END)) == END:
        return True
    file.seek(0)
    return picture_end(file.read(MOST_BYTES)) is not None


def _bmp_bytes(head: bytes) -> int:
    """Least length of the BMP: by its pixels where they are not compressed, else as its header claims."""
    if len(head) < BMP_HEADER.size:
        return BMP_HEADER.size
    _, claimed, _, _, offset, header, width, height, _, bits, compression = BMP_HEADER.unpack_from(head)
    if header < BMP_INFO_HEADER_BYTES or compression not in BMP_UNCOMPRESSED:
        return int(claimed)
    stride = (abs(width) * bits + 31) // 32 * 4
    return int(offset + stride * abs(height))


def _tiff(file: BinaryIO, size: int, tail: bytes) -> Completeness:
    try:
        pixels = tiff_pixels(file, size)
    except EOFError:
        return Completeness.CUT
    if pixels is None:
        return Completeness.UNKNOWN
    if pixels.are_raw or not pixels.are_within:
        return _whole_if(pixels.are_within, tail)
    return _ended(file, pixels.end, size, tail)
