"""Images as detectors are trained on them: scaled pixel for pixel as ultralytics does, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2

from experts.backends.base import Prepared
from experts.backends.pixels import normalized, require_rgb

if TYPE_CHECKING:
    import numpy as np

    from experts.expert import InputSpec

BORDER = (114, 114, 114)  # grey of the padding


def letterboxed(image: np.ndarray, spec: InputSpec) -> Prepared:
    """Whole image with its aspect ratio, centred in the expert's size, with grey padding."""
    require_rgb(image)
    height, width = image.shape[:2]
    scale = min(spec.height / height, spec.width / width)
    scaled_height, scaled_width = (max(round(extent * scale), 1) for extent in (height, width))  # at least a pixel
    top, left = _padding(spec.height - scaled_height), _padding(spec.width - scaled_width)
    bottom, right = spec.height - scaled_height - top, spec.width - scaled_width - left
    scaled = _scaled(image, scaled_height, scaled_width)
    padded = cv2.copyMakeBorder(scaled, top, bottom, left, right, cv2.BORDER_CONSTANT, value=BORDER)
    scales = scaled_width / width, scaled_height / height
    return Prepared(normalized(padded, "unit"), height, width, *scales, pad_left=left, pad_top=top)


def filled(image: np.ndarray, spec: InputSpec) -> Prepared:
    """The whole image, scaled to the expert's size without keeping its proportions."""
    require_rgb(image)
    height, width = image.shape[:2]
    scaled = _scaled(image, spec.height, spec.width)
    return Prepared(normalized(scaled, "unit"), height, width, spec.width / width, spec.height / height)


def _scaled(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return image if image.shape[:2] == (height, width) else cv2.resize(image, (width, height))


def _padding(room: int) -> int:
    return round(room / 2 - 0.1)  # as ultralytics rounds an odd room
