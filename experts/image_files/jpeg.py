"""JPEG: decoded strictly, and how far a damaged file goes.

Where data are missing libjpeg puts grey, with a warning that most libraries drop. simplejpeg raises it; its pixels are
Pillow's, as both are libjpeg-turbo's. A file of several scans may lose the later ones without any warning: each scan
states which coefficients it brings, down to which bit (ITU-T T.81, B.2.3 and G.1).
What follows the end of the picture does not count: trailers of cameras, padding, further pictures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import simplejpeg

from experts.errors import ImageUnreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

START, END = b"\xff\xd8", b"\xff\xd9"
MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")  # in a scan too, whose own bytes and restarts are the excepted ones
SOI, EOI, SOS, DQT, TEM = 0xD8, 0xD9, 0xDA, 0xDB, 0x01
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = frozenset({0xC2, 0xCA})
LOSSLESS = frozenset({0xC3, 0xCB})  # their scans state no coefficients
COEFFICIENTS = 64  # of a block
TWO_BYTES = 0x10  # of each divisor, from this on
DAMAGE = ("Corrupt JPEG data", "Premature end of JPEG", "Inconsistent progression")  # libjpeg-turbo's jerror.h
NOISE = bytes(range(1, 255)) * 16  # what no scan goes on with
HOLE = bytes(256)  # so many zeros in a row hardly any coder writes
CUT = "the file is cut: its last bytes are missing"
STEPS = 10  # of the search for a damage, each decoding a small image


@dataclass(frozen=True, slots=True)
class _Scan:
    """``header``: place of its parameters; ``low``: the last bit of its coefficients that it brings."""

    header: int
    components: bytes
    first: int
    last: int
    low: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Frame and scans of the first picture. ``end``: place behind it; None: not found.

    ``has_divisors``: no zero is among them, by which no encoder divides.
    """

    frame: int | None
    components: bytes
    scans: tuple[_Scan, ...]
    end: int | None
    has_divisors: bool


def picture_end(content: bytes) -> int | None:
    """Place behind the first picture of a file; None if its end is missing."""
    return _layout(content).end


def jpeg_size(content: bytes) -> tuple[int, int]:
    """Height and width. Raises ValueError."""
    height, width, *_ = simplejpeg.decode_jpeg_header(content, strict=False)
    return height, width


def jpeg_pixels(content: bytes, name: str, is_cmyk: bool = False, smaller: int = 1) -> NDArray[np.uint8]:
    """Pixels, RGB or CMYK as stored, of a whole picture; each side a ``smaller``-th. Raises ImageUnreadable."""
    for _ in range(len(BLEMISHES) + 1):
        try:
            pixels = _decoded(content, is_cmyk, smaller)
        except ValueError as error:
            message = str(error)
        else:
            _refuse_lost_parts(content, name)
            return pixels
        mended = next((mend(content) for words, mend in BLEMISHES.items() if words in message), content)
        if mended == content:
            break
        content = mended
    if picture_end(content) is None:
        raise ImageUnreadable(name, f"{CUT}, {_place(content)}")
    if message.startswith(DAMAGE):
        raise ImageUnreadable(name, f"is damaged: its data stop, or go wrong, {_place(content, message)} ({message})")
    raise ImageUnreadable(name, f"cannot be decoded ({message})")


def _decoded(content: bytes, is_cmyk: bool = False, smaller: int = 1, strict: bool = True) -> NDArray[np.uint8]:
    least = (-(-side // smaller) for side in jpeg_size(content)) if smaller > 1 else (0, 0)
    height, width = least
    colours = "CMYK" if is_cmyk else "RGB"
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        content, colours, min_height=height, min_width=width, strict=strict
    )
    return pixels


def _layout(content: bytes, until_first_scan: bool = False) -> _Layout:
    frame, components, scans, end, has_divisors = None, b"", [], None, True
    for kind, at in _segments(content):
        if kind == EOI:
            end = at
            break
        if kind in FRAMES:
            frame, components = kind, content[at + 8 : at + 8 + 3 * content[at + 7] : 3]
        if kind == DQT and content[at + 2] < TWO_BYTES:
            tables = content[at + 2 : at + int.from_bytes(content[at : at + 2], "big")]
            has_divisors &= not any(0 in tables[each + 1 : each + 65] for each in range(0, len(tables), 65))
        if kind == SOS:
            count = content[at + 2]
            first, last, bits = content[at + 3 + 2 * count : at + 6 + 2 * count]
            scans.append(_Scan(at, content[at + 3 : at + 3 + 2 * count : 2], first, last, bits & 15))
            if until_first_scan:
                break
    return _Layout(frame, components, tuple(scans), end, has_divisors)


def _segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Kind and place of each whole segment, behind its marker; of EOI, the place behind it."""
    found = MARKER.search(content, len(START))
    while found is not None:
        kind, at = found[1][0], found.end()
        length = 0 if kind in {SOI, EOI, TEM} else int.from_bytes(content[at : at + 2], "big")
        least = 8 if kind in FRAMES else 6 + 2 * int.from_bytes(content[at + 2 : at + 3]) if kind == SOS else 0
        if at + max(length, least) > len(content):
            return
        yield kind, at
        found = MARKER.search(content, at + length)


def _refuse_lost_parts(content: bytes, name: str) -> None:
    """Raise ImageUnreadable if scans or divisors are missing that libjpeg does without."""
    begun = _layout(content, until_first_scan=True)
    if not begun.has_divisors:
        raise ImageUnreadable(name, "is damaged in its header: a table of its coefficients has zeros")
    if begun.frame in LOSSLESS or not begun.scans:
        return
    if set(begun.scans[0].components) == set(begun.components) and _is_all(begun.scans[0]):
        return
    lows = np.full((256, COEFFICIENTS), 0xFF)
    for scan in _layout(content).scans:
        lows[list(scan.components), scan.first : scan.last + 1] = scan.low
    of_frame = lows[list(set(begun.components))]
    if of_frame.any():
        whole = f"{(of_frame == 0).sum()} of {of_frame.size}"
        raise ImageUnreadable(name, f"is damaged: its later scans are missing, {whole} coefficients are complete")


def _is_all(scan: _Scan) -> bool:
    return scan.first == 0 and scan.last == COEFFICIENTS - 1 and scan.low == 0


def _place(content: bytes, message: str | None = None) -> str:
    """Row at which a damaged picture stops, else the share of its data; of a cut one, without a warning, its end.

    The damage is where zeros stand for data, else in the shortest beginning with which libjpeg says the same.
    """
    layout = _layout(content)
    stop = size = layout.end or len(content)
    sound = layout.scans[0].header if layout.scans else 0
    hole = content.find(HOLE, sound, stop)
    if message is not None and hole >= 0:
        stop = hole
    elif message is not None:
        for _ in range(STEPS):
            middle = (sound + stop) // 2
            sound, stop = (sound, middle) if _decoder_message(content[:middle]) == message else (middle, stop)
    try:
        ends, goes_on = (_decoded(content[:stop].removesuffix(END) + more, strict=False) for more in (END, NOISE + END))
    except ValueError:
        return "in its header"
    changed = np.flatnonzero((ends != goes_on).any((1, 2)))
    if not len(changed) or (changed[0] == 0 and layout.frame in PROGRESSIVE):
        return f"at {100 * stop / size:.0f} % of its data"
    return f"at row {changed[0]} of {len(ends)}"


def _decoder_message(content: bytes) -> str | None:
    """First warning of libjpeg."""
    try:
        simplejpeg.decode_jpeg(content, min_height=1, min_width=1)
    except ValueError as error:
        return str(error)
    return None


def _with_known_revision(content: bytes) -> bytes:
    at = content.find(b"JFIF\0") + 5
    return content[:at] + b"\x01" + content[at + 1 :]


def _with_parameters(content: bytes) -> bytes:
    """Set the parameters that each scan of a sequential file has."""
    for scan in _layout(content).scans:
        at = scan.header + 3 + 2 * len(scan.components)
        content = content[:at] + bytes([0, COEFFICIENTS - 1, 0]) + content[at + 3 :]
    return content


def _without_padding(content: bytes) -> bytes:
    """Without zeros between the last scan and the end."""
    end = picture_end(content)
    return content if end is None else content[: end - len(END)].rstrip(b"\0") + END


BLEMISHES = {  # words of warnings after which the pixels are right nevertheless, and what silences them
    "unknown JFIF revision": _with_known_revision,
    "Invalid SOS parameters for sequential JPEG": _with_parameters,
    "bad ICC marker": lambda content: content.replace(b"ICC_PROFILE\0", b"ICC_PROFILE\1"),
    "extraneous bytes before marker 0xd9": _without_padding,
}
