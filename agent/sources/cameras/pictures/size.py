"""Size of a camera's pictures, checked before they are decoded: a JPEG of a megabyte may hold gigabytes of pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.faults.errors import CameraFailed
from experts.errors import ImageTooLarge, ImageUnreadable
from experts.images import read_image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ADVICE = "raise max_pixels:, or lower the camera's resolution"


def decoded_jpeg(content: bytes, max_pixels: int) -> NDArray[np.uint8] | None:
    """Pixels, RGB; None for a damaged frame. Raises CameraFailed for more than ``max_pixels``."""
    try:
        return read_image(content, "its frame", max_pixels)
    except ImageTooLarge as error:
        raise CameraFailed(f"{error} - {ADVICE}") from None
    except ImageUnreadable:
        return None


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raises CameraFailed."""
    if height * width > max_pixels:
        raise CameraFailed(f"its frames of {width} x {height} pixels are more than max_pixels {max_pixels} - {ADVICE}")
