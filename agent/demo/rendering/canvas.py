"""Drawing surface of one part, supersampled, with its origin in its centre; and its picture as it lies on a board."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from agent.demo.rendering.components import Colour

SUPERSAMPLING = 2
LIT = 160  # brightness at which a surface has its own colour
Point: TypeAlias = "tuple[float, float]"


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, so that a rendering looks the same on every machine."""
    return ImageFont.load_default(size)


class Canvas:
    """Transparent at first. Coordinates in board pixels, x to the right, y down; colours premultiplied by alpha."""

    def __init__(self, side_px: int) -> None:
        self.side_px = side_px
        # As RGBA, Pillow would not premultiply what it draws through a mask.
        self.image = Image.new("RGBX", (side_px * SUPERSAMPLING, side_px * SUPERSAMPLING))

    def stamp(
        self, form: str, half: Point, places: Sequence[Point], colour: Colour, shade: str = "flat", radius: float = 0.0
    ) -> None:
        """Draw a box with round corners, a disc or else a segment, of these half sides, around each place."""
        width, height = (max(round(2 * side * SUPERSAMPLING), 1) for side in half)
        mask = Image.new("L", (width, height))
        draw, box = ImageDraw.Draw(mask), (0, 0, width - 1, height - 1)
        if form == "box":
            draw.rounded_rectangle(box, radius=radius * SUPERSAMPLING, fill=255)
        elif form == "disc":
            draw.ellipse(box, fill=255)
        else:
            draw.chord(box, -54, 54, fill=255)
        ink = shaded(colour, width, height, shade)
        for x, y in places:
            left, top = self._pixel((x - half[0], y - half[1]))
            self.image.paste(ink, (round(left), round(top)), mask)

    def polygon(self, points: Sequence[Point], colour: Colour) -> None:
        ImageDraw.Draw(self.image).polygon([self._pixel(point) for point in points], fill=(*colour, 255))

    def line(self, points: Sequence[Point], colour: Colour, width: float) -> None:
        pixels, width_px = [self._pixel(point) for point in points], max(round(width * SUPERSAMPLING), 1)
        ImageDraw.Draw(self.image).line(pixels, fill=(*colour, 255), width=width_px, joint="curve")

    def text(self, place: Point, words: str, height_px: float, colour: Colour) -> None:
        """Draw words centred on a place."""
        letters = font(max(round(height_px * SUPERSAMPLING), 6))
        ImageDraw.Draw(self.image).text(self._pixel(place), words, font=letters, anchor="mm", fill=(*colour, 255))

    def blot(self, circles: Sequence[tuple[Point, float]], colour: Colour, alpha: float) -> None:
        """Draw a translucent, soft stain of circles: centres and radii."""
        layer = Image.new("L", self.image.size)
        for centre, radius in circles:
            ImageDraw.Draw(layer).circle(self._pixel(centre), radius * SUPERSAMPLING, fill=round(255 * alpha))
        self.image.paste((*colour, 255), mask=layer.filter(ImageFilter.GaussianBlur(1.2 * SUPERSAMPLING)))

    def seen(
        self, quarter_turns: int, x_px: float = 0.0, y_px: float = 0.0, turn_deg: float = 0.0
    ) -> NDArray[np.uint8]:
        """The picture shifted, turned clockwise about its centre, then by quarter turns: (side, side, 4) premultiplied.

        In one step, which also takes it from its supersampling to board pixels.
        """
        turn, quarter = math.radians(turn_deg), math.radians(90 * quarter_turns)
        back = np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
        upright = np.array([[math.cos(quarter), math.sin(quarter)], [-math.sin(quarter), math.cos(quarter)]])
        matrix = SUPERSAMPLING * back @ upright
        middle = self.side_px / 2 - 0.5
        offset = (middle + 0.5) * SUPERSAMPLING - 0.5 - matrix @ (middle, middle) - SUPERSAMPLING * back @ (x_px, y_px)
        seen: NDArray[np.uint8] = cv2.warpAffine(  # type: ignore[assignment]
            np.asarray(self.image),
            np.column_stack([matrix, offset]),
            (self.side_px, self.side_px),
            flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        )
        return seen

    def _pixel(self, point: Point) -> Point:
        half = self.image.width / 2
        return half + point[0] * SUPERSAMPLING, half + point[1] * SUPERSAMPLING


def shaded(colour: Colour, width: int, height: int, shade: str) -> Image.Image | tuple[int, int, int, int]:
    """Paint a rectangle of one colour under light from the upper left. ``shade``: flat, or one of ``light``."""
    if shade == "flat":
        return (*colour, 255)
    shades = np.full((256, 4), 255, np.uint8)
    shades[:, :3] = np.minimum(np.arange(256)[:, None] / LIT * colour, 255)
    pixels = shades.view(np.uint32)[light(shade, width, height), 0]
    return Image.frombuffer("RGBX", (width, height), pixels.tobytes())


@cache
def light(shade: str, width: int, height: int) -> NDArray[np.uint8]:
    """Brightness of a tilted plate ("tilt"), a cylinder that lies along x ("lying"), or else a dome."""
    x = np.linspace(-1.0, 1.0, width)[None, :]
    y = np.linspace(-1.0, 1.0, height)[:, None]
    if shade == "tilt":
        brightness = 1.0 - 0.10 * x - 0.14 * y
    elif shade == "lying":
        brightness = 0.62 + 0.62 * np.exp(-(((y + 0.3) / 0.45) ** 2)) + 0.0 * x
    else:
        brightness = 0.66 + 0.75 * np.exp(-(((x + 0.25) / 0.5) ** 2) - ((y + 0.3) / 0.5) ** 2)
    return (brightness * LIT).astype(np.uint8)
