"""A picture as the bytes of an image file, without loss: PNG, or the very JPEG that the camera sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np

from experts.errors import CameraFailed

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from numpy.typing import NDArray

    from agent.sources.cameras.pictures.source import Picture


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """An image file, and its size in pixels."""

    content: bytes
    height: int
    width: int


def encode(picture: Picture, max_pixels: int) -> EncodedFrame | None:
    """None where it is a JPEG that cannot be decoded. Raises CameraFailed where it has more than ``max_pixels``."""
    if isinstance(picture, bytes):
        decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_UNCHANGED)
        if decoded is None:
            return None
        height, width = decoded.shape[:2]
        check_size(height, width, max_pixels)
        return EncodedFrame(picture, height, width)
    height, width = _size(picture)
    check_size(height, width, max_pixels)
    pixels = picture if isinstance(picture, np.ndarray) else picture.to_ndarray(format="bgr24")
    is_encoded, content = cv2.imencode(".png", pixels)
    if not is_encoded:
        raise CameraFailed(f"a picture of {height} x {width} {pixels.dtype} pixels cannot be written as PNG")
    return EncodedFrame(content.tobytes(), height, width)


def can_be_seen(picture: Picture, max_pixels: int) -> bool:
    """True if ``encode`` would accept the picture; decodes only where it must. Raises as ``encode``."""
    if isinstance(picture, bytes):
        return encode(picture, max_pixels) is not None
    check_size(*_size(picture), max_pixels)
    return True


def _size(picture: NDArray[np.uint8] | NDArray[np.uint16] | VideoFrame) -> tuple[int, int]:
    return picture.shape[:2] if isinstance(picture, np.ndarray) else (picture.height, picture.width)


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raises CameraFailed."""
    if height * width > max_pixels:
        raise CameraFailed(
            f"its frames of {width} x {height} pixels are more than max_pixels {max_pixels} - raise max_pixels:, or "
            "lower the camera's resolution"
        )
