"""PNG: its chunks and their checksums, which Pillow does not compare where they are pixels."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SIGNATURE, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
HEADER = struct.Struct(">IIBBBBB")  # width, height, bits, colours, compression, filter, interlace
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colours
PIECE = 4096  # bytes inflated at once: at most a thousand times as many come out
MOST_CHUNKS = 1 << 17  # an image of 178 megapixels has at most as many of 8 KiB
LOWER_CASE = 0x20  # of a kind's first letter: the image can be shown without the chunk


def png_end(file: BinaryIO, size: int) -> int | None:
    """Place behind the last chunk of an open file; None if it is missing, or behind MOST_CHUNKS."""
    for kind, _, end in _chunks(file):
        if end + 4 > size or not kind.isalpha():  # zeros, where the rest is to be written
            return None
        if kind == b"IEND":
            return end + 4
    return None


def png_damage(content: bytes) -> str | None:
    """Place of the first wrong checksum or non-chunk in a file that has its end; None without one."""
    for kind, start, end in _chunks(io.BytesIO(content)):
        if kind.isalpha() and kind[0] & LOWER_CASE:
            continue
        if zlib.crc32(memoryview(content)[start - 4 : end]) != int.from_bytes(content[end : end + 4], "big"):
            first, last = (100 * place // len(content) for place in (start, min(end, len(content))))
            what = f"a checksum of {kind.decode()} is wrong" if kind.isalpha() else "a chunk is missing"
            return f"between {first} and {last} % of its data: {what}"
    return None


def png_stop(content: bytes) -> str | None:
    """Row at which the pixels' data stop or go wrong; None where all are there, or rows are interlaced."""
    width, height, bits, colours, *_, is_interlaced = HEADER.unpack_from(content, len(SIGNATURE) + 8)
    found, view = 0, memoryview(content)
    with suppress(zlib.error):
        for more in inflated(view[start:end] for kind, start, end in _chunks(io.BytesIO(content)) if kind == b"IDAT"):
            found += more
    row = found // (1 + -(-width * bits * CHANNELS[colours] // 8))
    return None if is_interlaced or row >= height else f"at row {row} of {height}"


def inflated(parts: Iterable[memoryview]) -> Iterator[int]:
    """Lengths of what comes out of a zlib stream, piece by piece. Raises zlib.error where it is damaged."""
    inflating = zlib.decompressobj()
    for part in parts:
        for at in range(0, len(part), PIECE):
            if inflating.eof:
                return
            yield len(inflating.decompress(part[at : at + PIECE]))


def png_bits(content: bytes) -> tuple[int, int | None]:
    """Bits of a sample in the file, and those that count, if it states them (sBIT, equal for all channels)."""
    stated = None
    for kind, start, end in _chunks(io.BytesIO(content)):
        if kind == b"IDAT":
            break
        if kind == b"sBIT" and len(set(content[start:end])) == 1:
            stated = content[start]
    return HEADER.unpack_from(content, len(SIGNATURE) + 8)[2], stated


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Kind, and start and end of the data, of each chunk to the last, or to MOST_CHUNKS."""
    start = len(SIGNATURE) + 8
    for _ in range(MOST_CHUNKS):
        file.seek(start - 8)
        head = file.read(8)
        if len(head) < 8:
            return
        kind, end = head[4:], start + int.from_bytes(head[:4], "big")
        yield kind, start, end
        if kind == b"IEND":
            return
        start = end + 12
