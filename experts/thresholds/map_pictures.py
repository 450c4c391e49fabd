"""Anomaly maps as pictures: stored as small grey PNGs, and drawn over the image.

A stored picture is a PNG of the map's size. Black is the lowest value and white the highest; the PNG's texts ``lowest``
and ``highest`` give both on the model's scale.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageFilter, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from experts.expert import AnomalyMap

if TYPE_CHECKING:
    from experts.expert import Anomaly

STRONGEST = 0.65  # opacity at the highest score
WEAK, STRONG = np.array((255, 225, 60), np.float32), np.array((225, 0, 40), np.float32)  # yellow to red
OUTLINE = (255, 255, 255)
OUTLINE_PX = 3  # odd, as Pillow's filter requires


def map_png(shown: AnomalyMap) -> bytes:
    """Stored form of a map."""
    texts = PngInfo()
    texts.add_text("lowest", repr(shown.lowest))
    texts.add_text("highest", repr(shown.highest))
    buffer = io.BytesIO()
    _grey(shown).save(buffer, "PNG", pnginfo=texts)
    return buffer.getvalue()


def map_of(png: bytes) -> AnomalyMap:
    """Map of a stored picture. Raises ValueError for other files."""
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as picture:
            lowest, highest = float(picture.info["lowest"]), float(picture.info["highest"])
            if picture.mode != "L" or not math.isfinite(lowest) or not math.isfinite(highest):
                raise ValueError("it is not grey between two numbers")
            return AnomalyMap(picture.height, picture.width, lowest, highest, picture.tobytes())
    except (OSError, KeyError, SyntaxError, Image.DecompressionBombError, UnidentifiedImageError) as error:
        raise ValueError(f"no map: {error}") from error


def drawn_over(image: Image.Image, anomaly: Anomaly) -> Image.Image:
    """Image with its anomaly map over it, yellow to red, more opaque with a higher score.

    Areas that reach the threshold are outlined if the score is the map's highest value: only then do both share a
    scale. Without a map the image is returned unchanged.
    """
    if anomaly.map is None:
        return image
    heat = _grey(anomaly.map).resize(image.size, Image.Resampling.BILINEAR)
    strength = np.asarray(heat, np.float32)[..., None] / 255
    cover = STRONGEST * strength
    coloured = np.asarray(image, np.float32) * (1 - cover) + (WEAK + (STRONG - WEAK) * strength) * cover
    picture = Image.fromarray(np.round(coloured).astype(np.uint8))
    level = _level(anomaly, anomaly.map)
    if level is not None:
        inside = heat.point([255 if value >= level else 0 for value in range(256)])
        inner = np.asarray(inside.filter(ImageFilter.MinFilter(OUTLINE_PX)))
        picture.paste(OUTLINE, mask=Image.fromarray(np.asarray(inside) - inner))
    return picture


def heat_png(stored: bytes) -> bytes:
    """Heat colours of a stored map, more opaque with a higher score, to be laid over its image. Raises ValueError."""
    strength = np.asarray(_grey(map_of(stored)), np.float32)[..., None] / 255
    colours = np.concatenate((WEAK + (STRONG - WEAK) * strength, 255 * STRONGEST * strength), axis=2)
    buffer = io.BytesIO()
    Image.fromarray(np.round(colours).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _grey(shown: AnomalyMap) -> Image.Image:
    return Image.frombytes("L", (shown.width, shown.height), shown.values)


def _level(anomaly: Anomaly, shown: AnomalyMap) -> int | None:
    """Grey value from which a map reaches the threshold; None if unknown."""
    extent = shown.highest - shown.lowest
    if not extent or not math.isclose(anomaly.score, shown.highest, rel_tol=1e-5):
        return None
    return max(math.ceil((anomaly.threshold - shown.lowest) / extent * 255), 0)
