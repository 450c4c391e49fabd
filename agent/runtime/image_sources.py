"""Where a request's pixels come from: an array, encoded bytes, a file, or a part of a frame that many requests share.

Guarantees: a frame is decoded once, by the first of its parts that is prepared, and held no longer than its parts are;
what is wrong with it is wrong with each of them.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experts.errors import ImageError, ImageUnreadable
from experts.expert import Orientation
from experts.images import DEFAULT_MAX_PIXELS, Decoded, decode_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    RoomFor = Callable[[int], AbstractContextManager[object]]

BYTES_OF_PIXELS = 10  # a byte of a file is worth so many of pixels, about; arbitrary


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image's file, with a limit of its own: one that has more pixels is rejected."""

    path: Path
    max_pixels: int


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image file's bytes, with the name that a rejection calls it by and a limit of pixels of its own."""

    content: bytes
    name: str
    max_pixels: int


class Frame:
    """One image of which several requests want a part each, in pixels as viewers show it. For any thread.

    ``size``: (height, width) that it must have, else none of its parts can be where they should; None for any.
    """

    def __init__(self, image: EncodedImage, size: tuple[int, int] | None) -> None:
        self._image = image
        self._size = size
        self._lock = threading.Lock()
        self._pixels: NDArray[np.uint8] | None = None
        self._error: ImageError | None = None

    @property
    def name(self) -> str:
        return self._image.name

    @property
    def stored_bytes(self) -> int:
        return len(self._image.content) if self._pixels is None else 0

    def pixels(self, room_for: RoomFor) -> NDArray[np.uint8]:
        """uint8 RGB, (height, width, 3). Raises ImageError, the same one each time."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._pixels is None:
                try:
                    self._pixels = self._decoded(room_for)
                except ImageError as error:
                    self._error = error
                    raise
            return self._pixels

    def _decoded(self, room_for: RoomFor) -> NDArray[np.uint8]:
        image = self._image
        pixels = decode_image(image.content, image.name, image.max_pixels, room_for).turned(Orientation.EXIF)
        if self._size is not None and pixels.shape[:2] != self._size:
            (height, width), (wanted_height, wanted_width) = pixels.shape[:2], self._size
            raise ImageUnreadable(
                image.name, f"it is {width} x {height} pixels, and its layout is for {wanted_width} x {wanted_height}"
            )
        return pixels


@dataclass(frozen=True, slots=True)
class FramePart:
    """A part of a frame. ``box``: (left, top, right, bottom) in pixels, inside of it."""

    frame: Frame
    box: tuple[int, int, int, int]
    name: str


# pixels (height, width, 3) uint8 RGB, an encoded file's bytes, or a file: with the agent's limit of pixels or its own;
# or a part of a frame
ImageSource = np.ndarray | bytes | Path | EncodedImage | ImageFile | FramePart


def pixels_of(
    image: ImageSource, name: str, max_pixels: int = DEFAULT_MAX_PIXELS, room_for: RoomFor = nullcontext
) -> NDArray[np.uint8]:
    """uint8 RGB, (height, width, 3), all of it; see ``decoded``."""
    return decoded(image, name, max_pixels, room_for).pixels


def decoded(
    image: ImageSource,
    name: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    room_for: RoomFor = nullcontext,
    least: tuple[int, int] | None = None,
) -> Decoded:
    """An image's pixels, or of a whole JPEG smaller ones where ``least`` are enough: see ``decode_image``.

    ``max_pixels`` is for sources without a limit of their own. Raises as ``decode_image`` does.
    """
    if isinstance(image, np.ndarray):
        return Decoded(image, *image.shape[:2]) if image.ndim > 1 else Decoded(image, 0, 0)  # experts refuse others
    if isinstance(image, FramePart):
        pixels = _cut(image, room_for)
        return Decoded(pixels, *pixels.shape[:2])
    if isinstance(image, EncodedImage):
        return decode_image(image.content, name, image.max_pixels, room_for, least)
    if isinstance(image, ImageFile):
        return decode_image(image.path, name, image.max_pixels, room_for, least)
    return decode_image(image, name, max_pixels, room_for, least)


def _cut(part: FramePart, room_for: RoomFor) -> NDArray[np.uint8]:
    """Raises ImageUnreadable where the box leaves the frame: a rest of a part is not the part."""
    left, top, right, bottom = part.box
    pixels = part.frame.pixels(room_for)
    height, width = pixels.shape[:2]
    if right > width or bottom > height:
        raise ImageUnreadable(part.name, f"its box {list(part.box)} leaves the frame of {width} x {height} pixels")
    return np.ascontiguousarray(pixels[top:bottom, left:right])


def stored_bytes(image: ImageSource) -> int | None:
    """Bytes that a source is decoded from; None where only reading would tell. Pixels count for scaling alone."""
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
