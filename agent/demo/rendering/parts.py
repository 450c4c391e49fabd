"""Parts drawn from the shapes of their package, with the defect that their label names."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from agent.demo.rendering.canvas import Canvas
from agent.demo.rendering.packages import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.demo.rendering.canvas import Point
    from agent.demo.rendering.components import Colour, ComponentType
    from agent.demo.rendering.packages import Shape

TERM = re.compile(r"([+-]?[\d.]*)([whp]?)")
DARK, LIGHT = (22, 18, 15), (202, 196, 184)  # of cracks, whichever shows


class Part:
    """One part with its three layers; its pose (shifted, reversed) is not the drawing's business."""

    def __init__(self, type_: ComponentType, label: str, rng: np.random.Generator) -> None:
        self.type, self.label, self.rng = type_, label, rng
        w, h = type_.width_px / 2, type_.height_px / 2
        self.units = {"w": w, "h": h, "p": 2 * w / max(type_.pins - 1, 1), "": 1.0}
        self.own = self.tinted(type_.colour, 0.07)
        self.side = float(rng.choice((-1.0, 1.0)))
        side_px = round(type_.window_px * 1.25)
        self.layers = {name: Canvas(side_px) for name in ("footprint", "body", "cover")}
        for shape in PACKAGES[type_.package]:
            is_listed = label in shape.when.removeprefix("!").split()
            is_there = label != "missing" or shape.layer == "footprint"
            if is_there and (not shape.when or is_listed != shape.when.startswith("!")):
                FORMS[shape.form](self, self.layers[shape.layer], shape)

    def tinted(self, colour: Colour | float, spread: float) -> Colour:
        if isinstance(colour, float):
            mixed = np.asarray(self.own) * colour
        else:
            mixed = np.asarray(colour) * self.rng.normal(1.0, spread / 2) * self.rng.normal(1.0, spread / 4, 3)
        red, green, blue = np.clip(mixed, 0, 255).astype(int).tolist()
        return red, green, blue

    def length(self, words: str) -> float:
        return sum(factor * self.units[unit] for factor, unit in terms(words))

    def lengths(self, words: str) -> list[float]:
        return [self.length(each) for each in words.split()]

    def places(self, at: str) -> list[Point]:
        groups = [[self.along(each) for each in group.split()] for group in at.split(";")]
        return [(x, y) for xs, ys in groups for y in ys for x in xs]

    def along(self, words: str) -> list[float]:
        """One coordinate of places, as ``at`` spells it."""
        if ":" in words:
            count, reach = words.split(":")
            spread = np.linspace(-1, 1, self.type.pins if count == "n" else int(count)) * self.length(reach)
            return [float(place) for place in spread]
        reach_px = self.length(words.lstrip("±?~"))
        chosen = {"±": (-1.0, 1.0), "?": (self.side,)}.get(words[0], (1.0,))
        return [self.rng.uniform(-reach_px, reach_px)] if words[0] == "~" else [sign * reach_px for sign in chosen]

    def around(self, point: Point, far: float) -> Point:
        """A point this far off, in a random direction."""
        angle = self.rng.uniform(0, 2 * math.pi)
        return point[0] + far * math.cos(angle), point[1] + far * math.sin(angle)


@cache
def terms(words: str) -> list[tuple[float, str]]:
    found = [each for each in TERM.findall(words) if any(each)]
    return [(float(f"{number}1" if number in {"", "+", "-"} else number), unit) for number, unit in found]


def draw_stamped(part: Part, canvas: Canvas, shape: Shape) -> None:
    x, y = part.lengths(shape.size)
    colour, radius = part.tinted(shape.colour, shape.spread), part.length(shape.radius)
    canvas.stamp(shape.form, (x, y), part.places(shape.at), colour, shape.shade, radius)


def draw_polygon(part: Part, canvas: Canvas, shape: Shape) -> None:
    corners = part.lengths(shape.size)
    canvas.polygon(list(zip(corners[::2], corners[1::2], strict=True)), part.tinted(shape.colour, shape.spread))


def draw_text(part: Part, canvas: Canvas, shape: Shape) -> None:
    date = f"{part.rng.integers(19, 26)}{part.rng.integers(1, 53):02d}"
    words = {"": part.type.marking, "date": date}.get(shape.words, shape.words)
    colour = part.tinted(shape.colour, shape.spread)
    for place in part.places(shape.at):
        canvas.text(place, words, part.length(shape.size), colour)


def draw_cross(part: Part, canvas: Canvas, shape: Shape) -> None:
    reach, width = part.lengths(shape.size)
    x, y = part.around((0.0, 0.0), reach)
    for end in ((x, y), (-y, x)):
        canvas.line([(-end[0], -end[1]), end], part.tinted(shape.colour, 0.0), width)


def draw_crack(part: Part, canvas: Canvas, shape: Shape) -> None:
    """A jagged line from edge to edge, with a chip broken off at its end."""
    w, h = part.lengths(shape.size)
    colour = LIGHT if sum(part.own) < 200 else DARK
    top = part.rng.uniform(-0.45, 0.45) * w
    bottom = top + part.rng.uniform(-0.4, 0.4) * w
    canvas.line(jagged((top, -h), (bottom, h), part.rng), colour, max(2.6, 0.05 * part.type.window_px))
    size = part.rng.uniform(0.5, 0.65) * h
    canvas.polygon([(bottom - size, h), (bottom + size, h), (bottom, h - size)], colour)


def draw_scratch(part: Part, canvas: Canvas, shape: Shape) -> None:
    (middle,) = part.places(shape.at)
    start = part.around(middle, part.length(shape.size) * part.rng.uniform(0.82, 1.18))
    end = 2 * middle[0] - start[0], 2 * middle[1] - start[1]
    canvas.line(jagged(start, end, part.rng), part.tinted(shape.colour, 0.0), 3.4)


def jagged(start: Point, end: Point, rng: np.random.Generator) -> list[Point]:
    steps = np.linspace(0.0, 1.0, 7)[:, None]
    points = np.asarray(start) * (1 - steps) + np.asarray(end) * steps
    points[1:-1] += rng.normal(0.0, 0.07 * math.dist(start, end), (5, 2))
    return [(x, y) for x, y in points.tolist()]


def draw_dent(part: Part, canvas: Canvas, shape: Shape) -> None:
    """A dark hollow with a bright slope."""
    (place,) = part.places("~.55w ~.35h")
    x, y = np.multiply(part.lengths(shape.size), part.rng.uniform(0.86, 1.14)).tolist()
    canvas.stamp("disc", (x, y), [place], part.tinted(shape.colour, 0.0))
    canvas.stamp("disc", (0.67 * x, 0.69 * y), [(place[0] + 2.5, place[1] + 2.5)], (228, 230, 232))


def draw_blot(part: Part, canvas: Canvas, shape: Shape) -> None:
    """An irregular stain: flux, glue or electrolyte."""
    (middle,) = part.places(shape.at)
    radius, chance = part.length(shape.size) * part.rng.uniform(0.87, 1.13), part.rng.uniform
    circles = [(part.around(middle, chance(0.0, 0.6) * radius), chance(0.4, 0.75) * radius) for _ in range(7)]
    canvas.blot(circles, part.tinted(shape.colour, shape.spread), 0.85)


def draw_bridge(part: Part, canvas: Canvas, shape: Shape) -> None:
    """Solder that joins two neighbouring legs."""
    places = part.places(shape.at)
    first = places[part.rng.integers(len(places))]
    second = min((place for place in places if place != first), key=lambda place: math.dist(place, first))
    thick = part.rng.uniform(0.045, 0.055) * part.type.window_px
    half = abs(second[0] - first[0]) / 2 + thick, abs(second[1] - first[1]) / 2 + thick
    middle = (first[0] + second[0]) / 2, (first[1] + second[1]) / 2
    canvas.stamp("box", half, [middle], part.tinted(shape.colour, shape.spread), shape.shade, thick)


def draw_bent_pin(part: Part, canvas: Canvas, shape: Shape) -> None:
    """A pin that lies askew across the others; its socket is empty."""
    places, (long, width) = part.places(shape.at), part.lengths(shape.size)
    place = places[part.rng.integers(len(places))]
    canvas.stamp("box", (13, 13), [place], (20, 20, 22), radius=2.0)
    canvas.line([place, part.around(place, long)], part.tinted(shape.colour, shape.spread), width)


FORMS: dict[str, Callable[[Part, Canvas, Shape], None]] = {
    **dict.fromkeys(("box", "disc", "segment"), draw_stamped),
    "polygon": draw_polygon,
    "text": draw_text,
    "cross": draw_cross,
    "crack": draw_crack,
    "scratch": draw_scratch,
    "dent": draw_dent,
    "blot": draw_blot,
    "bridge": draw_bridge,
    "bent-pin": draw_bent_pin,
}
