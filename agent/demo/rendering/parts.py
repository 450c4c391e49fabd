"""The drawing of each package, layer by layer: what the board shows under a part, the part, what is on top.

A package draws three layers. ``footprint`` belongs to the board and never moves: pads, solder, silkscreen. ``body``
moves with the part. ``cover`` is on top in the board's frame: solder bridges, stains. The part's mark for pin 1,
cathode or plus is drawn on the left, or at the upper left. ``w`` and ``h`` are half the part's width and height.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agent.demo.rendering.canvas import Canvas

if TYPE_CHECKING:
    from agent.demo.rendering.canvas import Box, Point
    from agent.demo.rendering.components import Colour, ComponentType

SILK = (226, 230, 222)
GOLD = (206, 176, 98)
SOLDER = (176, 180, 184)
METAL = (196, 198, 200)
INK = (214, 216, 214)
FLUX = (190, 132, 44)
PASTE = (150, 152, 152)
GROUND_PLANE = (28, 104, 62)
SIDES = (-1, 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One part to draw: its type, the label it shall show, its three layers, and its source of chance."""

    type: ComponentType
    label: str
    footprint: Canvas
    body: Canvas
    cover: Canvas
    rng: np.random.Generator

    @property
    def half(self) -> tuple[float, float]:
        return self.type.width_px / 2, self.type.height_px / 2

    @property
    def is_present(self) -> bool:
        return self.label != "missing"

    def tint(self, colour: Colour, spread: float = 0.07) -> Colour:
        factors = self.rng.normal(1.0, spread / 2) * self.rng.normal(1.0, spread / 4, 3)
        red, green, blue = np.clip(np.asarray(colour) * factors, 0, 255).astype(int)
        return int(red), int(green), int(blue)

    def plate(self, x: float, y: float, colour: Colour | None = None, shade: str = "tilt", radius: float = 0.0) -> None:
        """A rectangle around the body's centre, of these half sides; by default of the type's colour."""
        self.body.rectangle((-x, -y, x, y), self.tint(colour or self.type.colour), radius=radius, shade=shade)

    def disc(self, x: float, y: float, colour: Colour | None = None, shade: str = "dome") -> None:
        self.body.ellipse(0, 0, x, y, self.tint(colour or self.type.colour), shade=shade)

    def mark(self, height_px: float, colour: Colour = INK, alpha: float = 1.0, at: Point = (0, 0)) -> None:
        self.body.text(*at, self.type.marking, height_px, colour, alpha)


def draw_part(type_: ComponentType, label: str, rng: np.random.Generator) -> Part:
    """One part with the defect that its label names; its pose (shifted, reversed) is not the drawing's business."""
    side_px = round(type_.window_px * 1.25)
    part = Part(type_, label, Canvas(side_px, rng), Canvas(side_px, rng), Canvas(side_px, rng), rng)
    w, h = part.half
    PACKAGES[type_.package](part, w, h)
    if label == "contaminated":
        reach = 0.32 * min(type_.width_px, type_.height_px)
        x, y = rng.uniform(-0.4, 0.4) * w, rng.uniform(-0.4, 0.4) * h
        part.cover.blot(x, y, reach * rng.uniform(1.0, 1.3), part.tint(FLUX), 0.88)
        part.cover.blot(x + reach, y, reach * 0.8, part.tint(FLUX), 0.75)
    return part


def draw_crack(part: Part, colour: Colour, half_width: float, half_height: float) -> None:
    if part.label != "cracked":
        return
    top = part.rng.uniform(-0.45, 0.45) * half_width
    bottom = top + part.rng.uniform(-0.4, 0.4) * half_width
    width = max(2.6, 0.05 * part.type.window_px)
    part.body.crack((top, -half_height), (bottom, half_height), colour, width)
    size = part.rng.uniform(0.5, 0.65) * half_height
    chip = [(bottom - size, half_height), (bottom + size, half_height), (bottom, half_height - size)]
    part.body.polygon(chip, colour)


def pads(part: Part, boxes: list[Box], *, soldered: bool | None = None) -> None:
    """Bare pads carry dull paste; soldered ones a shining fillet: those of a part that is present."""
    is_soldered = part.is_present if soldered is None else soldered
    for left, top, right, bottom in boxes:
        part.footprint.rectangle((left, top, right, bottom), part.tint(GOLD, 0.04), radius=1.5)
        inset = 1.0 if is_soldered else 0.12 * min(right - left, bottom - top) + 1.0
        colour, shade = (SOLDER, "dome") if is_soldered else (PASTE, "tilt")
        inner = (left + inset, top + inset, right - inset, bottom - inset)
        part.footprint.rectangle(inner, part.tint(colour, 0.12), radius=2.0, shade=shade)


def two_pads(part: Part, inner: float, outer: float, h: float) -> None:
    pads(part, [(-outer, -h, -inner, h), (inner, -h, outer, h)])


def around(points: list[Point], x: float, y: float) -> list[Box]:
    return [(at[0] - x, at[1] - y, at[0] + x, at[1] + y) for at in points]


def outline(part: Part, margin: float) -> None:
    w, h = part.half[0] + margin, part.half[1] + margin
    for y in (-h, h):
        part.footprint.line([(-w * 0.55, y), (w * 0.55, y)], SILK, 1.6)


def polarity_bar(part: Part, x: float) -> None:
    """The silkscreen bar at the cathode, plus or pin 1 side."""
    h = part.half[1]
    part.footprint.rectangle((x - 3.0, -h, x, h), SILK, radius=1.0)


def spread_out(count: int, reach: float) -> list[float]:
    return [float(place) for place in np.linspace(-reach, reach, count)]


def bridge(part: Part, legs: list[Point]) -> None:
    """Solder that joins two neighbouring legs."""
    first = int(part.rng.integers(len(legs) - 1))
    (x0, y0), (x1, y1) = legs[first], legs[first + 1]
    thick = part.rng.uniform(0.045, 0.055) * part.type.window_px
    box = (min(x0, x1) - thick, min(y0, y1) - thick, max(x0, x1) + thick, max(y0, y1) + thick)
    part.cover.rectangle(box, part.tint((206, 210, 214)), radius=thick, shade="dome")


def draw_chip(part: Part, w: float, h: float) -> None:
    two_pads(part, w * 0.52, w + 0.2 * part.type.height_px, h * 1.08)
    if part.type.height_px > 20:
        outline(part, 5.0)
    if part.label == "tombstone":
        draw_tombstone(part, w, h)
    elif part.is_present:
        is_flipped = part.label == "flipped"
        body = part.tint((232, 232, 226) if is_flipped else part.type.colour)
        part.plate(w, h, METAL, radius=2.0)
        part.body.rectangle((-w * 0.62, -h, w * 0.62, h), body, shade="tilt")
        if part.type.marking and not is_flipped:
            part.mark(h * 0.95, alpha=0.9)
        draw_crack(part, (24, 20, 18) if sum(body) > 200 else (206, 202, 192), w * 0.62, h)


def draw_tombstone(part: Part, w: float, h: float) -> None:
    """The part stands upright on one pad: its end face looks up, the other pad is bare."""
    side = -1 if part.rng.random() < 0.5 else 1
    x = side * w * 0.95
    near, far = w * 0.52, w + 0.4 * h
    left, right = (near, far) if side < 0 else (-far, -near)
    part.footprint.rectangle((left, -h * 1.08, right, h * 1.08), part.tint(GOLD, 0.05), radius=1.5, shade="tilt")
    part.body.rectangle((x - h * 0.75, -h, x + h * 0.75, h), part.tint(part.type.colour), radius=1.0, shade="tilt")
    face = (x - h * 0.55, -h * 0.8, x + h * 0.55, h * 0.8)
    part.body.rectangle(face, part.tint((222, 224, 226)), radius=1.5, shade="dome")


def draw_diode(part: Part, w: float, h: float) -> None:
    two_pads(part, w * 0.62, w + 8, h * 0.6)
    polarity_bar(part, -w - 10)
    if part.is_present:
        for left, right in ((-w, -w * 0.6), (w * 0.6, w)):
            part.body.rectangle((left, -h * 0.32, right, h * 0.32), part.tint(METAL), shade="tilt")
        part.plate(w * 0.74, h, radius=2.0)
        part.body.rectangle((-w * 0.6, -h, -w * 0.34, h), part.tint((206, 206, 202)), shade="tilt")
        part.mark(h * 0.8, alpha=0.8, at=(w * 0.2, 0))
        draw_crack(part, (196, 190, 178), w * 0.5, h)


def draw_melf(part: Part, w: float, h: float) -> None:
    two_pads(part, w * 0.6, w + 7, h * 1.08)
    polarity_bar(part, -w - 10)
    if part.is_present:
        part.plate(w, h, (206, 208, 210), "lying", 3.0)
        part.plate(w * 0.66, h, shade="lying")
        part.body.rectangle((-w * 0.56, -h, -w * 0.28, h), part.tint((40, 38, 40)), shade="lying")
        draw_crack(part, (30, 20, 16), w * 0.5, h)


def draw_led(part: Part, w: float, h: float) -> None:
    two_pads(part, w * 0.52, w + 8, h * 1.08)
    polarity_bar(part, -w - 11)
    if part.is_present:
        part.plate(w, h, (206, 192, 150), radius=2.0)
        part.plate(w * 0.7, h, (234, 234, 228), "flat", 2.0)
        part.body.ellipse(w * 0.08, 0, w * 0.46, h * 0.62, part.tint(part.type.colour), shade="dome")
        part.body.polygon([(-w, -h), (-w * 0.3, -h), (-w, h * 0.6)], part.tint((28, 120, 70)))
        draw_crack(part, (48, 40, 34), w * 0.6, h)


def draw_tantalum(part: Part, w: float, h: float) -> None:
    two_pads(part, w * 0.66, w + 9, h * 1.08)
    polarity_bar(part, -w - 12)
    part.footprint.text(-w - 7, -h - 7, "+", 14, SILK)
    if part.is_present:
        is_dark = sum(part.type.colour) < 300
        bar, ink = ((204, 204, 198), INK) if is_dark else ((126, 70, 22), (88, 48, 18))
        part.plate(w, h, radius=3.0)
        part.body.rectangle((-w + 2, -h, -w * 0.68, h), part.tint(bar), shade="tilt")
        part.mark(h * 0.8, ink, at=(w * 0.16, -h * 0.1))
        draw_crack(part, (196, 190, 178) if is_dark else (18, 14, 12), w * 0.7, h)


def draw_electrolytic(part: Part, w: float, h: float) -> None:
    two_pads(part, w * 0.5, w + 12, 12)
    part.footprint.text(-w - 8, -h * 0.5, "+", 20, SILK)
    part.footprint.line([(-w - 4, -h - 4), (w + 4, -h - 4), (w + 4, h + 4), (-w - 4, h + 4)], SILK, 1.6)
    if part.is_present:
        cut, grey = 0.3 * w, (52, 52, 56)
        base = [(-w, -h + cut), (-w + cut, -h), (w, -h), (w, h), (-w + cut, h), (-w, h - cut)]
        part.body.polygon(base, part.tint((46, 46, 48)), shade="tilt")
        part.disc(w * 0.94, h * 0.94, (150, 152, 156), "tilt")
        part.disc(w * 0.86, h * 0.86)
        angles = np.linspace(-0.95, 0.95, 24)  # the minus side is black, opposite to the plus on the board
        part.body.polygon([(0.85 * w * np.cos(a), 0.85 * h * np.sin(a)) for a in angles], part.tint((34, 34, 38)))
        part.mark(h * 0.42, grey, at=(-w * 0.22, -h * 0.12))
        part.body.text(-w * 0.22, h * 0.28, "16V", h * 0.3, grey)
        if part.label == "leaking":
            x, y = part.rng.uniform(-0.5, 0.5) * w, part.rng.choice((-1.0, 1.0)) * h * 0.8
            part.cover.blot(x, y, w * part.rng.uniform(0.42, 0.55), part.tint((120, 70, 26)), 0.9)


def draw_sot(part: Part, w: float, h: float) -> None:
    """A power or signal transistor: legs below, a tab or the third leg above."""
    tab = w * (0.2 if part.type.width_px < 100 else 0.62)
    spots = [float(x) for x in np.linspace(-0.68, 0.68, part.type.pins) * w]
    boxes = [(x - 0.13 * w - 2, h * 0.7, x + 0.13 * w + 2, h + 16) for x in spots]
    pads(part, [*boxes, (-tab - 3, -h - 16, tab + 3, -h * 0.7)])
    outline(part, 21.0)
    if part.is_present:
        metal = part.tint(METAL)
        for x in spots:
            part.body.rectangle((x - 0.12 * w, 0, x + 0.12 * w, h + 9), metal, shade="tilt")
        part.body.rectangle((-tab, -h - 9, tab, 0), metal, radius=1.0, shade="tilt")
        part.plate(w, h * 0.8, radius=2.0)
        if part.label == "flipped":
            part.plate(w * 0.8, h * 0.5, (168, 140, 110), "dome", 2.0)
        else:
            part.mark(min(h * 0.75, w * 0.42), alpha=0.8)
    if part.label == "bridge":
        bridge(part, [(x, h + 10) for x in spots])


def ic_body(part: Part, w: float, h: float, dot: Point) -> None:
    part.plate(w, h, radius=2.5)
    size = max(0.085 * min(w, h) + 3.0, 5.5)
    part.body.ellipse(*dot, size, size, part.tint((186, 186, 182)), shade="tilt")
    part.mark(min(w * 0.36, h * 0.42), alpha=0.8, at=(0, -h * 0.1))
    part.body.text(0, h * 0.36, f"{part.rng.integers(19, 26)}{part.rng.integers(1, 53):02d}", h * 0.26, INK, 0.6)


def draw_gullwing(part: Part, w: float, h: float) -> None:
    """Two rows of legs, above and below; pin 1 is at the lower left."""
    places = spread_out(part.type.pins, w * 0.82)
    leg = 0.3 * (places[1] - places[0])
    pads(part, around([(x, side * (h + 5)) for side in SIDES for x in places], leg + 1, 13))
    part.footprint.ellipse(-w - 8, h + 4, 4, 4, SILK)
    part.footprint.line([(-w - 5, -h * 0.6), (-w - 5, h * 0.6)], SILK, 1.6)
    if part.is_present:
        metal = part.tint(METAL)
        for x in places:
            part.body.rectangle((x - leg, -h - 10, x + leg, h + 10), metal, shade="lying")
        ic_body(part, w, h * 0.8, (-w * 0.74, h * 0.5))
        part.body.ellipse(-w, 0, h * 0.16, h * 0.16, (70, 70, 74))
    if part.label == "bridge":
        side = part.rng.choice((-1.0, 1.0))
        bridge(part, [(x, side * (h + 10)) for x in places])


def four_sides(boxes: list[Box]) -> list[Box]:
    """The boxes above and below, and the same to the left and right."""
    return boxes + [(top, left, bottom, right) for left, top, right, bottom in boxes]


def draw_quad(part: Part, w: float, h: float) -> None:
    """Legs on all four sides; pin 1 is at the upper left."""
    places = spread_out(part.type.pins, w * 0.74)
    leg = 0.28 * (places[1] - places[0])
    pads(part, four_sides(around([(x, side * (h + 3)) for side in SIDES for x in places], leg + 1, 12)))
    part.footprint.polygon([(-w - 14, -h - 14), (-w + 4, -h - 14), (-w - 14, -h + 4)], SILK)
    if part.is_present:
        metal = part.tint(METAL)
        rows = (-h - 9, -h * 0.7), (h * 0.7, h + 9)
        legs = four_sides([(x - leg, top, x + leg, bottom) for top, bottom in rows for x in places])
        for box in legs:
            part.body.rectangle(box, metal, shade="tilt")
        ic_body(part, w * 0.86, h * 0.86, (-w * 0.66, -h * 0.66))
    if part.label == "bridge":
        side = part.rng.choice((-1.0, 1.0))
        is_row = part.rng.random() < 0.5
        bridge(part, [(x, side * (h + 9)) if is_row else (side * (w + 9), x) for x in places])


def draw_qfn(part: Part, w: float, h: float) -> None:
    places = spread_out(part.type.pins, w * 0.74)
    pads(part, four_sides(around([(x, side * h) for side in SIDES for x in places], 4, 9)))
    part.footprint.polygon([(-w - 15, -h - 15), (-w - 1, -h - 15), (-w - 15, -h - 1)], SILK)
    if part.is_present:
        ic_body(part, w, h, (-w * 0.7, -h * 0.7))
    else:
        pads(part, [(-w * 0.55, -h * 0.55, w * 0.55, h * 0.55)])


def draw_crystal(part: Part, w: float, h: float) -> None:
    pads(part, [(-w * 0.62, -9, -w * 0.3, 9), (w * 0.3, -9, w * 0.62, 9)], soldered=False)
    for y in (-h - 6, h + 6):
        part.footprint.line([(-w * 0.6, y), (w * 0.6, y)], SILK, 1.6)
    if part.is_present:
        part.plate(w, h, (150, 152, 154), radius=h)
        part.plate(w * 0.93, h * 0.86, shade="lying", radius=h * 0.86)
        part.mark(h * 0.55, (70, 70, 74))
    if part.label == "dented":
        x, y = part.rng.uniform(-0.55, 0.55) * w, part.rng.uniform(-0.25, 0.25) * h
        size = part.rng.uniform(0.45, 0.58) * h
        part.body.ellipse(x, y, size * 1.7, size, (70, 70, 74))
        part.body.ellipse(x + 3, y + 3, size * 1.1, size * 0.7, (226, 228, 230))


def draw_oscillator(part: Part, w: float, h: float) -> None:
    pads(part, around([(sx * w * 0.66, sy * h * 0.66) for sx in SIDES for sy in SIDES], 15, 12))
    part.footprint.ellipse(-w - 10, h + 8, 3.5, 3.5, SILK)
    if part.is_present:
        part.plate(w, h, (92, 76, 52), "flat", 3.0)
        part.plate(w * 0.86, h * 0.82, radius=4.0)
        part.mark(h * 0.62, (60, 56, 50))
        part.body.ellipse(-w * 0.66, h * 0.56, 4, 4, (60, 56, 50))


def draw_coil(part: Part, w: float, h: float) -> None:
    two_pads(part, w * 0.55, w + 8, h * 0.5)
    outline(part, 6.0)
    if part.is_present:
        part.plate(w, h, radius=0.32 * w)
        part.disc(w * 0.8, h * 0.8, (104, 74, 50), "tilt")
        part.disc(w * 0.7, h * 0.7, (64, 64, 68))
        part.mark(h * 0.46)
        draw_crack(part, (206, 198, 186), w * 0.9, h * 0.96)


def draw_switch(part: Part, w: float, h: float) -> None:
    pads(part, around([(sx * (w + 2), sy * h * 0.62) for sx in SIDES for sy in SIDES], 14, 9))
    outline(part, 5.0)
    if part.is_present:
        part.plate(w, h, (44, 44, 46), "flat", 4.0)
        part.plate(w * 0.92, h * 0.92, radius=3.0)
        for x, y in [(sx * w * 0.7, sy * h * 0.7) for sx in SIDES for sy in SIDES]:
            part.body.ellipse(x, y, 5.5, 5.5, (60, 60, 62))
        if part.label == "no-cap":
            part.disc(w * 0.5, h * 0.5, (120, 106, 84), "flat")
            part.disc(w * 0.2, h * 0.2, (210, 200, 170))
        else:
            part.disc(w * 0.52, h * 0.52, (30, 30, 34))


def draw_trimmer(part: Part, w: float, h: float) -> None:
    pads(part, around([(-w * 0.55, h), (w * 0.55, h), (0.0, -h)], 11, 11))
    outline(part, 15.0)
    if part.is_present:
        part.plate(w, h, radius=3.0)
        part.disc(w * 0.68, h * 0.68, (214, 208, 190))
        turn = part.rng.uniform(0, np.pi)
        for angle in (turn, turn + np.pi / 2):
            x, y = 0.46 * w * np.cos(angle), 0.46 * w * np.sin(angle)
            part.body.line([(-x, -y), (x, y)], (56, 52, 46), 0.16 * w)


def draw_header(part: Part, w: float, h: float) -> None:
    spots = [(x, side * h * 0.5) for side in SIDES for x in spread_out(part.type.pins, w * 0.64)]
    part.footprint.rectangle((-w - 4, -h - 4, w + 4, h + 4), SILK, radius=2.0)
    part.footprint.rectangle((-w - 2, -h - 2, w + 2, h + 2), (24, 92, 54), radius=2.0)
    for x, y in spots:
        part.footprint.ellipse(x, y, 15, 15, part.tint(GOLD), shade="tilt")
        part.footprint.ellipse(x, y, 8, 8, (30, 26, 22))
    if not part.is_present:
        return
    part.plate(w, h, radius=5.0)
    bent = int(part.rng.integers(len(spots))) if part.label == "bent-pin" else None
    for number, (x, y) in enumerate(spots):
        part.body.rectangle((x - 13, y - 13, x + 13, y + 13), (20, 20, 22), radius=2.0)
        if number == bent:
            angle = part.rng.uniform(0, 2 * np.pi)
            part.cover.line([(x, y), (x + 46 * np.cos(angle), y + 46 * np.sin(angle))], part.tint((236, 206, 122)), 15)
        else:
            part.body.rectangle((x - 6, y - 6, x + 6, y + 6), part.tint((222, 190, 104)), radius=1.0, shade="dome")


def draw_fpc(part: Part, w: float, h: float) -> None:
    """A flat-cable connector: contacts below, a dark latch above that stands off when it is open."""
    places = spread_out(part.type.pins, w * 0.76)
    contacts = [(x - 4.5, h - 5, x + 4.5, h + 13) for x in places]
    pads(part, [*contacts, (-w - 6, -12, -w + 14, 12), (w - 14, -12, w + 6, 12)])
    if part.is_present:
        for x in places:
            part.body.rectangle((x - 3.5, 0, x + 3.5, h + 7), part.tint(METAL), shade="tilt")
        part.body.rectangle((-w, -h * 0.4, w, h * 0.78), part.tint(part.type.colour), radius=2.0, shade="tilt")
        for x in places:
            part.body.rectangle((x - 2.5, -h * 0.1, x + 2.5, h * 0.5), part.tint((176, 150, 90)))
        lift = -h * 0.62 if part.label == "open-latch" else 0.0
        latch = (-w * 1.02, -h * 0.78 + lift, w * 1.02, -h * 0.2 + lift)
        part.body.rectangle(latch, part.tint((52, 44, 38)), radius=3.0, shade="tilt")


def draw_shield(part: Part, w: float, h: float) -> None:
    """A stamped can over a radio. It stands on a frame of solder amid a plane of copper, which hides all traces."""
    reach = part.type.window_px / 2
    part.footprint.rectangle((-reach, -reach, reach, reach), GROUND_PLANE)
    for x, y in [(x, y) for x in spread_out(7, w + 16) for y in (-h - 18, h + 18)]:
        part.footprint.ellipse(x, y, 3.0, 3.0, (12, 40, 26))
    part.footprint.rectangle((-w - 7, -h - 7, w + 7, h + 7), part.tint(GOLD, 0.04), radius=4.0)
    part.footprint.rectangle((-w - 5, -h - 5, w + 5, h + 5), part.tint(SOLDER, 0.06), radius=4.0, shade="tilt")
    if not part.is_present:
        part.footprint.rectangle((-w + 3, -h + 3, w - 3, h - 3), GROUND_PLANE)
        part.footprint.rectangle((-w * 0.4, -h * 0.5, w * 0.4, h * 0.5), part.tint((38, 38, 42)), shade="tilt")
        return
    metal = part.tint(part.type.colour, 0.05)
    part.body.rectangle((-w, -h, w, h), metal, radius=6.0, shade="tilt")
    part.body.rectangle((-w * 0.88, -h * 0.84, w * 0.88, h * 0.84), lighter(metal, 0.9), radius=5.0)
    part.body.rectangle((-w * 0.85, -h * 0.8, w * 0.85, h * 0.8), lighter(metal, 1.05), radius=5.0, shade="tilt")
    for x, y in [(x, side * h * 0.5) for x in spread_out(5, w * 0.62) for side in SIDES]:
        part.body.ellipse(x, y, 4.0, 4.0, (46, 46, 50))
    rng = part.rng
    x, y = rng.uniform(-0.55, 0.55) * w, rng.uniform(-0.5, 0.5) * h
    if part.label == "scratched":
        angle, half = rng.uniform(0, np.pi), rng.uniform(0.35, 0.5) * h
        along, across = half * np.cos(angle), half * np.sin(angle)
        part.body.crack((x - along, y - across), (x + along, y + across), (112, 108, 104), 3.4)
    elif part.label == "dented":
        size = rng.uniform(0.2, 0.28) * h
        part.body.ellipse(x, y, size * 1.3, size, (128, 130, 134))
        part.body.ellipse(x + 2, y + 2, size * 0.9, size * 0.65, (232, 234, 236), shade="dome")
    elif part.label == "stained":
        part.cover.blot(x, y, rng.uniform(0.3, 0.42) * h, part.tint(FLUX), 0.8)


def lighter(colour: Colour, factor: float) -> Colour:
    red, green, blue = (min(int(value * factor), 255) for value in colour)
    return red, green, blue


DRAWN = (
    draw_chip, draw_coil, draw_crystal, draw_diode, draw_electrolytic, draw_fpc, draw_gullwing, draw_header, draw_led,
    draw_melf, draw_oscillator, draw_qfn, draw_quad, draw_shield, draw_sot, draw_switch, draw_tantalum, draw_trimmer,
)  # fmt: skip
PACKAGES = {function.__name__.removeprefix("draw_"): function for function in DRAWN}
