"""WebP: whether its pixels need all of their data.

libwebp goes on after a damage, and stops where the picture is full: before the end of the data, unless these are sound.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

PIXELS = frozenset({b"VP8 ", b"VP8L"})
SPARE = 8  # bytes; a sound picture needed the last four of them, and the last of lossless ones


def is_read_to_its_end(content: bytes) -> bool:
    """True if no picture comes out of all but the last bytes of its data."""
    for kind, data in _chunks(content):
        if kind in PIXELS:
            short = data[:-SPARE] + bytes(len(data) % 2)
            body = b"WEBP" + kind + (len(data) - SPARE).to_bytes(4, "little") + short
            try:
                Image.open(io.BytesIO(b"RIFF" + len(body).to_bytes(4, "little") + body)).load()
            except (OSError, ValueError):
                return True
            return len(data) <= SPARE
    return True


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 12
    while at + 8 <= len(content):
        length = int.from_bytes(content[at + 4 : at + 8], "little")
        yield content[at : at + 4], content[at + 8 : at + 8 + length]
        at += 8 + length + length % 2
