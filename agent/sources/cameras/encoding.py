"""Lossless encoding of a picture as an image file: PNG, or the JPEG that the camera sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from experts.errors import CameraFailed

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from numpy.typing import NDArray

    from agent.sources.cameras.pictures.source import Picture


def encode(picture: Picture, max_pixels: int) -> bytes | None:
    """The image file; None for a JPEG that cannot be decoded. Raises CameraFailed for more than ``max_pixels``."""
    if isinstance(picture, bytes):
        decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_UNCHANGED)
        if decoded is None:
            return None
        _check_size(decoded, max_pixels)
        return picture
    _check_size(picture, max_pixels)
    pixels = picture if isinstance(picture, np.ndarray) else picture.to_ndarray(format="bgr24")
    is_encoded, content = cv2.imencode(".png", pixels)
    if not is_encoded:
        raise CameraFailed(f"a picture of {pixels.shape} {pixels.dtype} pixels cannot be written as PNG")
    return content.tobytes()


def is_decodable(picture: Picture, max_pixels: int) -> bool:
    """True if ``encode`` would accept the picture; decodes only where it must. Raises as ``encode``."""
    if isinstance(picture, bytes):
        return encode(picture, max_pixels) is not None
    _check_size(picture, max_pixels)
    return True


def _check_size(picture: NDArray[Any] | VideoFrame, max_pixels: int) -> None:
    height, width = picture.shape[:2] if isinstance(picture, np.ndarray) else (picture.height, picture.width)
    if height * width > max_pixels:
        raise CameraFailed(
            f"its frames of {width} x {height} pixels are more than max_pixels {max_pixels} - raise max_pixels:, or "
            "lower the camera's resolution"
        )
