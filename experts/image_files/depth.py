"""More than 8 bits: which values of an image become 0 to 255.

A file of 16 bits may hold 10, 12, 14 or 16. A PNG states them (sBIT), and holds values shifted to the top; a TIFF of
fewer than 16 bits has just these. Where nothing is stated, a used 16th bit shows that all 16 are.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from experts.errors import ImageUnreadable
from experts.image_files.png import SIGNATURE, png_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    from experts.expert import InputSpec

BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # tags of TIFF, and a value
HEADER_END = len(SIGNATURE) + 25  # of a PNG
FULL = 16


def deep_samples(image: Image.Image, content: bytes, name: str) -> tuple[NDArray[np.uint16], int | None] | None:
    """Values (height, width, 1 or 3) of a loaded image of more than 8 bits, and how many bits count by its file."""
    stored, stated = png_bits(content) if image.format == "PNG" else (8, None)
    if image.format == "TIFF":
        stored = max(image.tag_v2.get(BITS_PER_SAMPLE, (1,)))  # type: ignore[attr-defined]
        stated = stored if 8 < stored < FULL else None
    if stored <= 8 or image.mode == "F" or (stated is not None and stated <= 8):
        return None
    if image.format == "TIFF" and image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # type: ignore[attr-defined]
        raise ImageUnreadable(name, "its 16 bits go from white to black, which decoders ignore: export it otherwise")
    samples = _grey(image, name) if image.mode.startswith("I") else _colours(image, content, name)
    shift = FULL - stated if stated and image.format == "PNG" else 0
    return samples >> np.uint16(shift), stated


def _grey(image: Image.Image, name: str) -> NDArray[np.uint16]:
    grey = np.asarray(image)
    if grey.min() < 0 or grey.max() > 0xFFFF:
        raise ImageUnreadable(name, "32-bit pixels: export the image with 8 or 16 bits")
    return grey.astype(np.uint16)[:, :, None]


def _colours(image: Image.Image, content: bytes, name: str) -> NDArray[np.uint16]:
    """Colours by OpenCV, as Pillow keeps their upper 8 bits only, with which they are compared."""
    import cv2

    found = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    if found is None or found.dtype != np.uint16 or found.ndim != 3:
        raise ImageUnreadable(name, "16-bit colours that cannot be read: export the image with 8 bits")
    colours = found[:, :, 2::-1].astype(np.uint16)
    if not np.array_equal(colours >> 8, np.asarray(image.convert("RGB"))):
        raise ImageUnreadable(name, "16-bit colours that decoders read differently: export the image with 8 bits")
    return colours


def eight_bits(samples: NDArray[np.uint16], stated: int | None, spec: InputSpec) -> NDArray[np.uint8]:
    """RGB. The upper 8 of the bits that count, or the window: rounded, a half upwards. Raises ValueError."""
    if stated is not None and (spec.bits or stated) != stated:
        raise ValueError(f"its file states {stated} bits, and `bits: {spec.bits}` is written")
    if spec.window is None:
        bits = spec.bits or stated
        return as_rgb(samples >> (_counting(int(samples.max()), bits) - 8))
    low, high = spec.window
    if stated is not None and high >> stated:
        raise ValueError(f"its file states {stated} bits, and the window goes up to {high}")
    inside = np.clip(samples, low, high).astype(np.uint32) - low
    return as_rgb((inside * 510 + (high - low)) // (2 * (high - low)))


def _counting(largest: int, bits: int | None) -> int:
    used = largest.bit_length()
    if bits is None and used == FULL:
        return FULL
    if bits is None:
        raise ValueError(
            f"its values go up to {largest}, in 16 bits, and nothing states how many bits count: write "
            f"`bits: {max(used, 9)}` (if so), or `window: [low, high]`,"
        )
    if used > bits:
        raise ValueError(f"it has values up to {largest}, which are more than {bits} bits: correct `bits`")
    return bits


def shown(samples: NDArray[np.uint16], stated: int | None) -> NDArray[np.uint8]:
    """RGB for people, by the stated bits, else by the brightest value."""
    return as_rgb(samples >> max((stated or int(samples.max()).bit_length()) - 8, 0))


def as_rgb(values: NDArray[np.integer]) -> NDArray[np.uint8]:
    eight = values.astype(np.uint8)
    return eight if eight.shape[2] == 3 else np.repeat(eight, 3, axis=2)


def deep_png(samples: NDArray[np.uint16], bits: int | None) -> bytes:
    """PNG of values (height, width) or (height, width, 3), RGB, that states their bits."""
    import cv2

    shifted = samples << (FULL - (bits or FULL))
    is_encoded, found = cv2.imencode(".png", shifted if samples.ndim == 2 else shifted[:, :, ::-1])
    if not is_encoded:
        raise ValueError(f"pixels of {samples.shape} cannot be written as PNG")
    content = found.tobytes()
    if bits is None:
        return content
    stated = b"sBIT" + bytes([bits] * (1 if samples.ndim == 2 else 3))
    chunk = struct.pack(">I", len(stated) - 4) + stated + struct.pack(">I", zlib.crc32(stated))
    return content[:HEADER_END] + chunk + content[HEADER_END:]
