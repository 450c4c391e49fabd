"""EXIF orientation: how the stored pixels of an image are turned to be seen upright.

From 5 on rows and columns are swapped; then some are mirrored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from experts.expert import AnomalyMap

TAG = 0x0112  # of EXIF and of TIFF
UPRIGHT, SWAPPED, LAST = 1, 5, 8
COLUMNS_MIRRORED, ROWS_MIRRORED = frozenset({2, 3, 6, 7}), frozenset({3, 4, 7, 8})


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
    """Left, top, right, bottom of a stored image of this size, as they lie in the upright one."""
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
