"""Sources of a request's pixels: an array, encoded bytes, a file, or a part of a shared frame.

Guarantees: a frame is decoded once, when the first of its parts is prepared. An error of the frame is raised for each
part.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experts.errors import ImageError, ImageUnreadable
from experts.images import DEFAULT_MAX_PIXELS, Decoded, decode_image, read_image_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    RoomFor = Callable[[int], AbstractContextManager[object]]

BYTES_OF_PIXELS = 10  # bytes of pixels per byte of a file, roughly; arbitrary


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file. An image of more pixels is rejected, and so are other bytes than those with this digest.

    ``sha256``: its first digits suffice; empty: any.
    """

    path: Path
    max_pixels: int
    sha256: str = ""

    def read(self, name: str) -> bytes:
        """Raises ImageError."""
        content = read_image_file(self.path, name, self.max_pixels)
        if self.sha256 and not hashlib.sha256(content).hexdigest().startswith(self.sha256):
            raise ImageUnreadable(name, f"{self.path} holds another image now than the one that was judged")
        return content


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image file's bytes. ``name``: for rejections. An image of more pixels is rejected."""

    content: bytes
    name: str
    max_pixels: int


class Frame:
    """Image whose parts belong to several requests, in upright pixels. Thread-safe.

    ``size``: (height, width) that its layout requires; None: any.
    """

    def __init__(self, image: EncodedImage, size: tuple[int, int] | None) -> None:
        self.image = image
        self.size = size
        self._lock = threading.Lock()
        self._decoded: Decoded | None = None
        self._error: ImageError | None = None

    @property
    def name(self) -> str:
        return self.image.name

    @property
    def stored_bytes(self) -> int:
        return len(self.image.content) if self._decoded is None else 0

    def decoded(self, room_for: RoomFor) -> Decoded:
        """Upright. Raises ImageError, the same object each time."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._decoded is None:
                try:
                    self._decoded = self._decode(room_for)
                except ImageError as error:
                    self._error = error
                    raise
            return self._decoded

    def _decode(self, room_for: RoomFor) -> Decoded:
        image = self.image
        found = decode_image(image.content, image.name, image.max_pixels, room_for).upright()
        if self.size is not None and (found.height, found.width) != self.size:
            (height, width), (wanted_height, wanted_width) = (found.height, found.width), self.size
            raise ImageUnreadable(
                image.name, f"it is {width} x {height} pixels, and its layout is for {wanted_width} x {wanted_height}"
            )
        return found


@dataclass(frozen=True, slots=True)
class FramePart:
    """``box``: (left, top, right, bottom) in pixels of the frame."""

    frame: Frame
    box: tuple[int, int, int, int]
    name: str


# Pixels are (height, width, 3), uint8 RGB. Bytes and paths have DEFAULT_MAX_PIXELS.
ImageSource = np.ndarray | bytes | Path | EncodedImage | ImageFile | FramePart


def decoded(
    image: ImageSource, name: str, room_for: RoomFor = nullcontext, least: tuple[int, int] | None = None
) -> Decoded:
    """Pixels of an image; of a JPEG smaller ones if ``least`` suffices. Raises as ``decode_image`` does."""
    if isinstance(image, np.ndarray):
        return Decoded(image, *image.shape[:2]) if image.ndim > 1 else Decoded(image, 0, 0)  # experts refuse these
    if isinstance(image, FramePart):
        return _cut(image, room_for)
    if isinstance(image, EncodedImage):
        return decode_image(image.content, name, image.max_pixels, room_for, least)
    if isinstance(image, ImageFile):
        return decode_image(image.read(name), name, image.max_pixels, room_for, least)
    return decode_image(image, name, DEFAULT_MAX_PIXELS, room_for, least)


def _cut(part: FramePart, room_for: RoomFor) -> Decoded:
    """Raises ImageUnreadable for a box that leaves the frame."""
    left, top, right, bottom = part.box
    whole = part.frame.decoded(room_for)
    if right > whole.width or bottom > whole.height:
        size = f"{whole.width} x {whole.height}"
        raise ImageUnreadable(part.name, f"its box {list(part.box)} leaves the frame of {size}")
    pixels = np.ascontiguousarray(whole.pixels[top:bottom, left:right])
    return Decoded(pixels, bottom - top, right - left, bits=whole.bits, name=part.name)


def stored_bytes(image: ImageSource) -> int | None:
    """Bytes that decoding reads; None for a file, which is not opened here. Pixels count for scaling only."""
    if isinstance(image, np.ndarray):
        return image.nbytes // BYTES_OF_PIXELS
    if isinstance(image, bytes):
        return len(image)
    if isinstance(image, EncodedImage):
        return len(image.content)
    if isinstance(image, FramePart):
        return image.frame.stored_bytes
    return None


def image_name(image: ImageSource, request: int) -> str:
    if isinstance(image, EncodedImage | FramePart):
        return image.name
    if isinstance(image, ImageFile):
        return image.path.name
    return image.name if isinstance(image, Path) else f"image of request {request}"
