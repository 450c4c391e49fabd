"""WebP: whether the data of a file is damaged, which libwebp does not report.

libwebp decodes past a damage, and stops once the picture is full. A sound picture needs its data to their end, a
damaged one does not. So the data are decoded without their last bytes: if that gives a picture, they are damaged.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

PIXELS = frozenset({b"VP8 ", b"VP8L"})
SPARE = 8  # bytes left out: a sound picture needed its last four, a lossless one its last


def is_read_to_its_end(content: bytes) -> bool:
    """True for sound data: without their last bytes they give no picture. True also for a file without pixels."""
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
