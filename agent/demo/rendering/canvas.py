"""A small supersampled drawing surface whose origin is its centre: shapes with shading, text, cracks."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.demo.rendering.components import Colour

SUPERSAMPLING = 2
Point: TypeAlias = "tuple[float, float]"
Box: TypeAlias = "tuple[float, float, float, float]"  # left, top, right, bottom


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, so that a rendering looks the same on every machine."""
    return ImageFont.load_default(size)


class Canvas:
    """Transparent at first. Coordinates in board pixels, x to the right, y down."""

    def __init__(self, side_px: int, rng: np.random.Generator) -> None:
        self.side_px = side_px
        self.rng = rng
        self.image = Image.new("RGBA", (side_px * SUPERSAMPLING, side_px * SUPERSAMPLING))

    def rectangle(self, box: Box, colour: Colour, *, radius: float = 0.0, shade: str = "flat") -> None:
        """``radius``: of its round corners."""
        rounded = radius * SUPERSAMPLING
        self._fill(box, colour, shade, lambda draw, at: draw.rounded_rectangle(at, radius=rounded, fill=255))

    def ellipse(
        self, x: float, y: float, radius_x: float, radius_y: float, colour: Colour, *, shade: str = "flat"
    ) -> None:
        box = (x - radius_x, y - radius_y, x + radius_x, y + radius_y)
        self._fill(box, colour, shade, lambda draw, at: draw.ellipse(at, fill=255))

    def polygon(self, points: Sequence[Point], colour: Colour, *, shade: str = "flat") -> None:
        xs, ys = zip(*points, strict=True)
        left, top = min(xs), min(ys)
        corners = [((x - left) * SUPERSAMPLING, (y - top) * SUPERSAMPLING) for x, y in points]
        self._fill((left, top, max(xs), max(ys)), colour, shade, lambda draw, _: draw.polygon(corners, fill=255))

    def line(self, points: Sequence[Point], colour: Colour, width: float) -> None:
        pixels, width_px = [self._pixel(point) for point in points], max(round(width * SUPERSAMPLING), 1)
        ImageDraw.Draw(self.image).line(pixels, fill=(*colour, 255), width=width_px, joint="curve")

    def text(self, x: float, y: float, words: str, height_px: float, colour: Colour, alpha: float = 1.0) -> None:
        """Words centred on (x, y)."""
        ImageDraw.Draw(self.image, "RGBA").text(
            self._pixel((x, y)), words, font=font(max(round(height_px * SUPERSAMPLING), 6)), anchor="mm",
            fill=(*colour, round(255 * alpha)),
        )  # fmt: skip

    def crack(self, start: Point, end: Point, colour: Colour, width: float) -> None:
        (left, top), (right, bottom) = start, end
        points = []
        for step in np.linspace(0.0, 1.0, 7):
            x, y = self.rng.normal(0.0, 0.07 * math.dist(start, end), 2) if 0.0 < step < 1.0 else (0.0, 0.0)
            points.append((left + (right - left) * step + x, top + (bottom - top) * step + y))
        self.line(points, colour, width)

    def blot(self, x: float, y: float, radius: float, colour: Colour, alpha: float) -> None:
        """A translucent, irregular stain: flux, glue or electrolyte."""
        layer = Image.new("L", self.image.size)
        draw = ImageDraw.Draw(layer)
        for _ in range(7):
            angle, far = self.rng.uniform(0, 2 * math.pi), self.rng.uniform(0.0, 0.6) * radius
            centre = self._pixel((x + far * math.cos(angle), y + far * math.sin(angle)))
            size = self.rng.uniform(0.4, 0.75) * radius * SUPERSAMPLING
            draw.circle(centre, size, fill=round(255 * alpha))
        layer = layer.filter(ImageFilter.GaussianBlur(1.2 * SUPERSAMPLING))
        stain = Image.new("RGBA", self.image.size, (*colour, 0))
        stain.putalpha(layer)
        self.image.alpha_composite(stain)

    def moved(self, x_px: float, y_px: float, turn_deg: float) -> Image.Image:
        """The picture shifted, and turned clockwise about its centre; premultiplied, so that edges stay clean."""
        premultiplied = self.image.convert("RGBa")
        if not (x_px or y_px or turn_deg):
            return premultiplied
        centre = self.image.width / 2
        cosine, sine = math.cos(math.radians(turn_deg)), math.sin(math.radians(turn_deg))
        right, down = centre + x_px * SUPERSAMPLING, centre + y_px * SUPERSAMPLING
        matrix = (
            cosine, sine, centre - cosine * right - sine * down,
            -sine, cosine, centre + sine * right - cosine * down,
        )  # fmt: skip
        return premultiplied.transform(premultiplied.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)

    def _pixel(self, point: Point) -> Point:
        half = self.image.width / 2
        return half + point[0] * SUPERSAMPLING, half + point[1] * SUPERSAMPLING

    def _fill(
        self, box: Box, colour: Colour, shade: str, draw_mask: Callable[[ImageDraw.ImageDraw, Box], None]
    ) -> None:
        left, top = self._pixel((box[0], box[1]))
        width = max(round((box[2] - box[0]) * SUPERSAMPLING), 1)
        height = max(round((box[3] - box[1]) * SUPERSAMPLING), 1)
        mask = Image.new("L", (width, height))
        draw_mask(ImageDraw.Draw(mask), (0, 0, width - 1, height - 1))
        self.image.paste(shaded(colour, width, height, shade), (round(left), round(top)), mask)


def shaded(colour: Colour, width: int, height: int, shade: str) -> Image.Image | tuple[int, int, int, int]:
    """A rectangle of one colour under light from the upper left: flat, tilted, a cylinder, a dome."""
    if shade == "flat":
        return (*colour, 255)
    x = np.linspace(-1.0, 1.0, width)[None, :]
    y = np.linspace(-1.0, 1.0, height)[:, None]
    if shade == "tilt":
        light = 1.0 - 0.10 * x - 0.14 * y
    elif shade == "lying":  # a cylinder along x
        light = 0.62 + 0.62 * np.exp(-(((y + 0.3) / 0.45) ** 2)) + 0.0 * x
    else:  # dome
        light = 0.66 + 0.75 * np.exp(-(((x + 0.25) / 0.5) ** 2) - ((y + 0.3) / 0.5) ** 2)
    pixels = np.empty((height, width, 4), np.uint8)
    pixels[..., :3] = np.clip(light[..., None] * np.asarray(colour, np.float64), 0, 255)
    pixels[..., 3] = 255
    return Image.fromarray(pixels, "RGBA")
