"""PNG: its chunks and their checksums, which Pillow does not compare where they are pixels."""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER = struct.Struct(">IIBBBBB")  # width, height, bits, colours, compression, filter, interlace
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colours
PIECE = 4096  # bytes inflated at once: at most a thousand times as many come out
AROUND = 12  # bytes of a chunk beside its data: length, kind, checksum
MOST_CHUNKS = 1 << 17  # an image of 178 megapixels has at most as many of 8 KiB
LOWER_CASE = 0x20  # of a kind's first letter: the image can be shown without the chunk


def png_end(file: BinaryIO, size: int) -> int | None:
    """Place behind the last chunk of an open file; None if it is missing, or behind MOST_CHUNKS."""
    at = len(SIGNATURE)
    for _ in range(MOST_CHUNKS):
        file.seek(at)
        head = file.read(8)
        at += AROUND + int.from_bytes(head[:4], "big")
        if at > size or not head[4:].isalpha():  # zeros, where the rest is to be written
            return None
        if head[4:] == b"IEND":
            return at
    return None


def png_damage(content: bytes) -> str | None:
    """Where the first wrong checksum is, of a whole file; None without one."""
    for kind, start, end in _chunks(content):
        if kind[0] & LOWER_CASE:
            continue
        if zlib.crc32(memoryview(content)[start - 4 : end]) != int.from_bytes(content[end : end + 4], "big"):
            first, last = (100 * place // len(content) for place in (start, end))
            return f"between {first} and {last} % of its data: a checksum of {kind.decode('latin-1')} is wrong"
    return None


def png_stop(content: bytes) -> str | None:
    """Row at which the pixels' data stop or go wrong; None where all are there, or rows are interlaced."""
    width, height, bits, colours, *_, is_interlaced = HEADER.unpack_from(content, len(SIGNATURE) + 8)
    found, inflating = 0, zlib.decompressobj()
    with suppress(zlib.error):
        for kind, start, end in _chunks(content):
            for at in range(start, end, PIECE) if kind == b"IDAT" else ():
                found += len(inflating.decompress(content[at : min(at + PIECE, end)]))
    row = found // (1 + -(-width * bits * CHANNELS[colours] // 8))
    return None if is_interlaced or row >= height else f"at row {row} of {height}"


def png_bits(content: bytes) -> tuple[int, int | None]:
    """Bits of a sample in the file, and those that count, if it states them (sBIT, equal for all channels)."""
    stated = None
    for kind, start, end in _chunks(content):
        if kind == b"IDAT":
            break
        if kind == b"sBIT" and len(set(content[start:end])) == 1:
            stated = content[start]
    return HEADER.unpack_from(content, len(SIGNATURE) + 8)[2], stated


def _chunks(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, and start and end of the data, of each chunk."""
    at, kind = len(SIGNATURE), b""
    while kind != b"IEND" and at + AROUND <= len(content):
        kind, start = content[at + 4 : at + 8], at + 8
        end = start + int.from_bytes(content[at : at + 4], "big")
        yield kind, start, end
        at = end + 4
