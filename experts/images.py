"""Images: complete files only, decoded to the pixels that an expert was trained on.

A file without the end that its format declares (`experts.image_files.completeness`) is refused, and so is one that is
damaged before: its decoder warns, or a checksum is wrong. What follows the first picture's end does not count.

Pixels are returned as stored, with their EXIF orientation: ultralytics' loader applies it, most others drop it, so each
expert decides. (Pillow itself turns a TIFF.) Alpha is dropped. Of more than 8 bits each expert's input, or the file,
states what becomes 0 to 255 (`experts.image_files.depth`).
"""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, replace
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from experts.errors import ImageTooLarge, ImageUnreadable
from experts.expert import Orientation
from experts.image_files.completeness import Completeness, completeness
from experts.image_files.depth import as_rgb, deep_samples, eight_bits, shown
from experts.image_files.jpeg import CUT, START, jpeg_pixels, jpeg_size
from experts.image_files.png import SIGNATURE, png_damage, png_stop
from experts.image_files.tiff import TIFF_STARTS, tiff_damage
from experts.image_files.webp import is_read_to_its_end

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from experts.expert import AnomalyMap, Expert

JPEG = frozenset({"JPEG", "MPO"})  # MPO: several pictures, of which a phone shows the first
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")
ENDINGS = frozenset({  # of their files' names
    ".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".tif", ".tiff", ".webp",
})  # fmt: skip
NOT_AN_IMAGE = f"not an image in any of {', '.join(FORMATS)}"
OTHER_TIFF = "a TIFF whose layout of pixels is not read: export it with 8 or 16 bits a channel, from black to white"
DEFAULT_MAX_PIXELS = 64_000_000
LARGEST_MAX_PIXELS = 178_000_000  # beyond, Pillow itself refuses to open a file
MAX_BYTES_PER_PIXEL = 16  # four channels of 32 bits, the largest supported format
DECODED_BYTES_PER_PIXEL = 12  # the decoder's at most four channels, a conversion of them, and RGB
HEADER_ALLOWANCE_BYTES = 4 * 1024 * 1024  # metadata beside the pixels
STRIP_BYTES = 64 * 1024  # of one copy from the decoder; larger copies measured up to four times slower
REDUCTIONS = (8, 4, 2, 1)  # of a JPEG's sides, in its decoder: one pixel, four or sixteen of each block of 64
TAG = 0x0112  # of EXIF orientation, also in TIFF; from SWAPPED on rows and columns are swapped, then some are mirrored
UPRIGHT, SWAPPED, LAST = 1, 5, 8
COLUMNS_MIRRORED, ROWS_MIRRORED = frozenset({2, 3, 6, 7}), frozenset({3, 4, 7, 8})
BROKEN = (  # exceptions of Pillow on hostile bytes; Warning where warnings are errors
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError,
    MemoryError, NotImplementedError, struct.error, zlib.error, Warning, Image.DecompressionBombError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decoded:
    """One image: uint8 RGB, (height, width, 3), each side a ``reduction``-th of the file's where that is not 1.

    Pixels, height and width are as stored; ``orientation`` says how they are turned to be seen upright. Of more than 8
    bits: uint16, (height, width, 1 or 3), of which ``bits`` count by the file. ``name``: the file's; empty: no file.
    """

    pixels: NDArray[Any]
    height: int  # of the file's image
    width: int
    reduction: int = 1
    is_jpeg: bool = False
    orientation: int = UPRIGHT
    bits: int | None = None
    name: str = ""

    def turned(self, wanted: Orientation) -> NDArray[np.uint8]:
        """Pixels for people, and for whatever knows no expert."""
        return self._turned(self.pixels if self.pixels.dtype == np.uint8 else shown(self.pixels, self.bits), wanted)

    def seen_by(self, expert: Expert) -> NDArray[np.uint8]:
        """Pixels as the expert's input wants them. Raises ImageUnreadable where nothing says what becomes 0 to 255."""
        spec, pixels = expert.pixels, self.pixels
        try:
            if pixels.dtype == np.uint16:
                pixels = eight_bits(pixels, self.bits, spec)
            elif self.name and spec.window is not None:
                raise ValueError(f"8 bits, of which `window: {list(spec.window)}` says nothing: send the camera's own,")
        except ValueError as error:
            raise ImageUnreadable(self.name, f"{error} at experts.{expert.id}.input") from None
        return self._turned(pixels, spec.orientation)

    def upright(self) -> Decoded:
        pixels = upright(self.pixels, self.orientation)
        return replace(self, pixels=pixels, height=pixels.shape[0], width=pixels.shape[1], orientation=UPRIGHT)

    def _turned(self, pixels: NDArray[np.uint8], wanted: Orientation) -> NDArray[np.uint8]:
        return upright(pixels, self.orientation) if wanted is Orientation.EXIF else pixels

    def serves(self, least: tuple[int, int] | None) -> bool:
        """True where decoding the file for ``least`` would give these pixels."""
        return self.reduction == (reduction(self.height, self.width, least) if self.is_jpeg else 1)


def reduction(height: int, width: int, least: tuple[int, int] | None) -> int:
    """Factor by which a JPEG's decoder shrinks an image of which ``least`` (height, width) pixels are enough."""
    if least is None:
        return 1
    spare = min(height // least[0], width // least[1])
    return max((each for each in REDUCTIONS if each <= spare), default=1)


def read_image(
    source: Path | bytes,
    name: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    room_for: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> NDArray[np.uint8]:
    return decode_image(source, name, max_pixels, room_for).turned(Orientation.STORED)


def decode_image(
    source: Path | bytes,
    name: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    room_for: Callable[[int], AbstractContextManager[object]] = nullcontext,
    least: tuple[int, int] | None = None,
) -> Decoded:
    """One image, decoded. ``name`` is what errors call it.

    PNG, JPEG, BMP, TIFF or WebP, recognised by the bytes. The size is checked before anything is decoded.
    ``room_for`` is entered, and may wait, with the bytes that decoding takes at most.
    ``least``: (height, width) that are enough; a JPEG is decoded to a half, a quarter or an eighth of its sides then.
    Raises ImageTooLarge, or ImageUnreadable for what is not permitted, not an image, cut, or holds several images; and
    MemoryError, which says nothing of the image.
    """
    content = source if isinstance(source, bytes) else read_image_file(source, name, max_pixels)
    if not content:
        raise ImageUnreadable(name, "the file is empty")
    _check_length(len(content), name, max_pixels)
    ended = completeness(io.BytesIO(content))
    is_cut = ended is Completeness.CUT
    if is_cut and not content.startswith(START):  # of a JPEG the decoder says where
        raise ImageUnreadable(name, CUT)
    damage = png_damage(content) if content.startswith(SIGNATURE) else None
    if damage or ended is Completeness.HOLED:
        raise ImageUnreadable(name, f"is damaged {damage or 'before its end: zeros stand for its data'}")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            (width, height), is_jpeg = image.size, image.format in JPEG
            if width * height > max_pixels:
                raise ImageTooLarge(name, f"{width} x {height} pixels are more than max_pixels {max_pixels}")
            if not is_jpeg and (frames := getattr(image, "n_frames", 1)) > 1:
                raise ImageUnreadable(name, f"holds {frames} images: send one image a file")
            smaller = reduction(height, width, least) if is_jpeg else 1
            with room_for(width * height // smaller**2 * DECODED_BYTES_PER_PIXEL):
                if is_jpeg:
                    pixels, bits = _of_jpeg(image, content, name, smaller), None
                else:
                    pixels, bits = _loaded(image, content, name)
                return Decoded(pixels, height, width, smaller, is_jpeg, _orientation(image), bits, name)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(name, f"{error} - the limit is {max_pixels}") from error
    except MemoryError:  # the size was checked: the box lacks memory
        raise
    except BROKEN as error:
        is_known = not isinstance(error, UnidentifiedImageError)
        unknown = OTHER_TIFF if content.startswith(TIFF_STARTS) else NOT_AN_IMAGE
        other = f"cannot be decoded ({error or type(error).__name__})" if is_known else unknown
        raise ImageUnreadable(name, CUT if is_cut else other) from error


def upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """An image (height, width, ...) turned as its orientation says; itself where there is nothing to turn."""
    if orientation == UPRIGHT:
        return stored
    turned = stored.swapaxes(0, 1) if orientation >= SWAPPED else stored
    rows, columns = (slice(None, None, -1 if orientation in each else 1) for each in (ROWS_MIRRORED, COLUMNS_MIRRORED))
    return np.ascontiguousarray(turned[rows, columns])


def upright_corners(
    corners: tuple[float, float, float, float], height: int, width: int, orientation: int
) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a stored image of this size, in coordinates of the upright one."""
    left, top, right, bottom = corners
    if orientation >= SWAPPED:
        left, top, right, bottom, height, width = top, left, bottom, right, width, height
    if orientation in COLUMNS_MIRRORED:
        left, right = width - right, width - left
    if orientation in ROWS_MIRRORED:
        top, bottom = height - bottom, height - top
    return left, top, right, bottom


def upright_map(stored: AnomalyMap, orientation: int) -> AnomalyMap:
    values = upright(np.frombuffer(stored.values, np.uint8).reshape(stored.height, stored.width), orientation)
    return replace(stored, height=values.shape[0], width=values.shape[1], values=values.tobytes())


def stored_size(content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
    """(height, width) by the header alone. Raises ImageTooLarge and ImageUnreadable, before anything is decoded."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(name, f"{error} - the limit is {max_pixels}") from error
    except BROKEN as error:
        raise ImageUnreadable(name, f"its header cannot be read ({error or type(error).__name__})") from error
    if width * height > max_pixels:
        raise ImageTooLarge(name, f"{width} x {height} pixels are more than max_pixels {max_pixels}")
    return height, width


def upright_size(path: Path) -> tuple[int, int]:
    """(height, width) of an image as viewers show it, by its header. Raises ImageUnreadable."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            return (width, height) if _orientation(image) >= SWAPPED else (height, width)
    except BROKEN as error:
        raise ImageUnreadable(path.name, f"its header cannot be read ({error or type(error).__name__})") from error


def is_turned(path: Path) -> bool:
    """True for an image with an EXIF orientation; False also for a file that is none."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            return _orientation(image) != UPRIGHT
    except BROKEN:
        return False


def largest_file_bytes(max_pixels: int) -> int:
    return max_pixels * MAX_BYTES_PER_PIXEL + HEADER_ALLOWANCE_BYTES


def read_image_file(path: Path, name: str, max_pixels: int) -> bytes:
    """Bytes of a regular file. Raises ImageError."""
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise ImageUnreadable(name, "not a regular file")
        _check_length(status.st_size, name, max_pixels)
        return path.read_bytes()
    except OSError as error:
        raise ImageUnreadable(name, f"cannot be read ({error.strerror})") from error


def _check_length(size_bytes: int, name: str, max_pixels: int) -> None:
    if size_bytes > largest_file_bytes(max_pixels):
        raise ImageTooLarge(name, f"{size_bytes} bytes are more than any image of {max_pixels} pixels has")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation of a loaded image, as some formats keep it behind the pixels; a broken block counts as none."""
    try:
        found: int = image.getexif().get(TAG, UPRIGHT)
    except BROKEN:
        return UPRIGHT
    return found if found in range(UPRIGHT, LAST + 1) else UPRIGHT


def _of_jpeg(image: Image.Image, content: bytes, name: str, smaller: int) -> NDArray[np.uint8]:
    if (image.height, image.width) != jpeg_size(content):  # by two decoders: the limit holds for both
        raise ImageUnreadable(name, "its header states two sizes")
    pixels = jpeg_pixels(content, name, image.mode == "CMYK", smaller)
    if image.mode != "CMYK":
        return pixels
    image.draft(None, (image.width // smaller, image.height // smaller))  # None: its own mode
    return _rgb(image, name)  # Pillow knows how to convert it


def _loaded(image: Image.Image, content: bytes, name: str) -> tuple[NDArray[Any], int | None]:
    damage = tiff_damage(content, image.tag_v2, image.mode == "CMYK") if isinstance(image, TiffImageFile) else None
    if image.format == "WEBP" and not is_read_to_its_end(content):
        damage = "in its data: a part of them makes the whole picture"
    if damage is not None:
        raise ImageUnreadable(name, f"is damaged {damage}")
    try:
        image.load()
    except MemoryError:
        raise
    except BROKEN as error:
        stop = png_stop(content) if image.format == "PNG" else None
        raise ImageUnreadable(name, f"is damaged {stop or 'in its data'} ({error or type(error).__name__})") from error
    found = deep_samples(image, content, name) or (_rgb(image, name), None)
    last = found[0][-1]  # of one value, as Pillow leaves rows of which a PNG has no data
    if image.format == "PNG" and (last == last[-1]).all() and (stop := png_stop(content)):
        raise ImageUnreadable(name, f"is damaged: its data stop {stop}")
    return found


def _rgb(image: Image.Image, name: str) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):  # 16 bits of which at most 8 count
        return as_rgb(np.asarray(image)[:, :, None] >> 8)
    if image.mode == "F":
        raise ImageUnreadable(name, "floating-point pixels: export the image with 8 or 16 bits")
    if image.mode in {"P", "PA"}:
        image = image.convert("RGBA")
    return _pixels(image if image.mode == "RGB" else image.convert("RGB"))


def _pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Copy pixels strip by strip: Pillow exports a whole image as bytes in freshly cleared pages.

    Measured: a quarter of the time for a photograph of 12 megapixels.
    """
    width, height = image.size
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    rows = max(STRIP_BYTES // (3 * width), 1)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, width, bottom)))
    return pixels
