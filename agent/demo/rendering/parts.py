"""The drawing of each package, layer by layer: what the board shows under a part, the part, what lies on top.

A package draws three layers. ``footprint`` is the board's own and never moves: pads, solder, silkscreen. ``body``
moves with the part. ``cover`` lies on top in the board's frame: solder bridges, stains. The part's mark for pin 1,
cathode or plus is drawn on the left, or at the upper left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agent.demo.rendering.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.demo.rendering.components import Colour, ComponentType

SILK = (226, 230, 222)
GOLD = (206, 176, 98)
SOLDER = (176, 180, 184)
METAL = (196, 198, 200)
INK = (214, 216, 214)
FLUX = (190, 132, 44)
GROUND_PLANE = (28, 104, 62)


@dataclass(frozen=True, slots=True)
class Part:
    """One part to draw: its type, the label it shall show, its three layers, and its own source of chance."""

    type: ComponentType
    label: str
    footprint: Canvas
    body: Canvas
    cover: Canvas
    rng: np.random.Generator

    @property
    def half_width(self) -> float:
        return self.type.width_px / 2

    @property
    def half_height(self) -> float:
        return self.type.height_px / 2

    @property
    def is_present(self) -> bool:
        return self.label != "missing"

    def tint(self, colour: Colour, spread: float = 0.07) -> Colour:
        factors = self.rng.normal(1.0, spread / 2) * self.rng.normal(1.0, spread / 4, 3)
        varied = np.clip(np.asarray(colour) * factors, 0, 255).astype(int)
        return int(varied[0]), int(varied[1]), int(varied[2])


def draw_part(type_: ComponentType, label: str, rng: np.random.Generator) -> Part:
    """One part with the defect that its label names; how it lies (shifted, reversed) is not the drawing's business."""
    side_px = round(type_.window_px * 1.25)
    part = Part(type_, label, Canvas(side_px, rng), Canvas(side_px, rng), Canvas(side_px, rng), rng)
    PACKAGES[type_.package](part)
    if label == "contaminated":
        draw_contamination(part)
    return part


def draw_contamination(part: Part) -> None:
    reach = 0.32 * min(part.type.width_px, part.type.height_px)
    x, y = part.rng.uniform(-0.4, 0.4) * part.half_width, part.rng.uniform(-0.4, 0.4) * part.half_height
    part.cover.blot(x, y, reach * part.rng.uniform(1.0, 1.3), part.tint(FLUX), 0.88)
    part.cover.blot(x + reach, y, reach * 0.8, part.tint(FLUX), 0.75)


def draw_crack(part: Part, colour: Colour, half_width: float, half_height: float) -> None:
    top = part.rng.uniform(-0.45, 0.45) * half_width
    bottom = top + part.rng.uniform(-0.4, 0.4) * half_width
    width = max(2.6, 0.05 * part.type.window_px)
    part.body.crack((top, -half_height), (bottom, half_height), colour, width)
    size = part.rng.uniform(0.5, 0.65) * half_height
    part.body.polygon(
        [(bottom - size, half_height), (bottom + size, half_height), (bottom, half_height - size)], colour
    )


def pads(part: Part, boxes: list[tuple[float, float, float, float]], *, soldered: bool) -> None:
    """Bare pads carry dull paste; soldered ones a shining fillet."""
    for left, top, right, bottom in boxes:
        part.footprint.rectangle((left, top, right, bottom), part.tint(GOLD, 0.04), radius=1.5)
        inset = 1.0 if soldered else 0.12 * min(right - left, bottom - top) + 1.0
        colour, shade = (SOLDER, "dome") if soldered else ((150, 152, 152), "tilt")
        part.footprint.rectangle(
            (left + inset, top + inset, right - inset, bottom - inset), part.tint(colour, 0.12), radius=2.0, shade=shade
        )


def two_pads(part: Part, *, reach: float, inner: float = 0.52) -> None:
    w, h = part.half_width, part.half_height * 1.08
    left, right = (-w - reach, -h, -w * inner, h), (w * inner, -h, w + reach, h)
    pads(part, [left, right], soldered=part.is_present)


def outline(part: Part, margin: float) -> None:
    w, h = part.half_width + margin, part.half_height + margin
    for y in (-h, h):
        part.footprint.line([(-w * 0.55, y), (w * 0.55, y)], SILK, 1.6)


def polarity_bar(part: Part, x: float) -> None:
    """The silkscreen bar at the cathode, plus or pin 1 side."""
    h = part.half_height
    part.footprint.rectangle((x - 3.0, -h, x, h), SILK, radius=1.0)


def draw_chip(part: Part) -> None:
    w, h = part.half_width, part.half_height
    two_pads(part, reach=0.2 * part.type.height_px)
    if part.type.height_px > 20:
        outline(part, 5.0)
    if not part.is_present:
        return
    if part.label == "tombstone":
        draw_tombstone(part)
        return
    is_flipped = part.label == "flipped"
    body = part.tint((232, 232, 226) if is_flipped else part.type.colour)
    part.body.rectangle((-w, -h, w, h), part.tint(METAL), radius=2.0, shade="tilt")
    part.body.rectangle((-w * 0.62, -h, w * 0.62, h), body, shade="tilt")
    if part.type.marking and not is_flipped:
        part.body.text(0, 0, part.type.marking, h * 0.95, INK, 0.9)
    if part.label == "cracked":
        draw_crack(part, (24, 20, 18) if sum(body) > 200 else (206, 202, 192), w * 0.62, h)


def draw_tombstone(part: Part) -> None:
    """The part stands upright on one pad: its end face looks up, the other pad lies bare."""
    w, h = part.half_width, part.half_height
    side = -1 if part.rng.random() < 0.5 else 1
    x = side * w * 0.95
    bare = (w * 0.52, -h * 1.08, w + 0.4 * h, h * 1.08)
    left, right = (bare[0], bare[2]) if side < 0 else (-bare[2], -bare[0])
    part.footprint.rectangle((left, bare[1], right, bare[3]), part.tint(GOLD, 0.05), radius=1.5, shade="tilt")
    part.body.rectangle((x - h * 0.75, -h, x + h * 0.75, h), part.tint(part.type.colour), radius=1.0, shade="tilt")
    part.body.rectangle(
        (x - h * 0.55, -h * 0.8, x + h * 0.55, h * 0.8), part.tint((222, 224, 226)), radius=1.5, shade="dome"
    )


def draw_diode(part: Part) -> None:
    w, h = part.half_width, part.half_height
    pads(part, [(-w - 8, -h * 0.6, -w * 0.62, h * 0.6), (w * 0.62, -h * 0.6, w + 8, h * 0.6)], soldered=part.is_present)
    polarity_bar(part, -w - 10)
    if not part.is_present:
        return
    for side in (-1, 1):
        edges = sorted((side * w * 0.6, side * w))
        part.body.rectangle((edges[0], -h * 0.32, edges[1], h * 0.32), part.tint(METAL), shade="tilt")
    part.body.rectangle((-w * 0.74, -h, w * 0.74, h), part.tint(part.type.colour), radius=2.0, shade="tilt")
    part.body.rectangle((-w * 0.6, -h, -w * 0.34, h), part.tint((206, 206, 202)), shade="tilt")
    part.body.text(w * 0.2, 0, part.type.marking, h * 0.8, INK, 0.8)
    if part.label == "cracked":
        draw_crack(part, (196, 190, 178), w * 0.5, h)


def draw_melf(part: Part) -> None:
    w, h = part.half_width, part.half_height
    two_pads(part, reach=7, inner=0.6)
    polarity_bar(part, -w - 10)
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint((206, 208, 210)), radius=3.0, shade="lying")
    part.body.rectangle((-w * 0.66, -h, w * 0.66, h), part.tint(part.type.colour), shade="lying")
    part.body.rectangle((-w * 0.56, -h, -w * 0.28, h), part.tint((40, 38, 40)), shade="lying")
    if part.label == "cracked":
        draw_crack(part, (30, 20, 16), w * 0.5, h)


def draw_led(part: Part) -> None:
    w, h = part.half_width, part.half_height
    two_pads(part, reach=8)
    polarity_bar(part, -w - 11)
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint((206, 192, 150)), radius=2.0, shade="tilt")
    part.body.rectangle((-w * 0.7, -h, w * 0.7, h), part.tint((234, 234, 228)), radius=2.0)
    part.body.ellipse(w * 0.08, 0, w * 0.46, h * 0.62, part.tint(part.type.colour), shade="dome")
    part.body.polygon([(-w, -h), (-w * 0.3, -h), (-w, h * 0.6)], part.tint((28, 120, 70)))
    if part.label == "cracked":
        draw_crack(part, (48, 40, 34), w * 0.6, h)


def draw_tantalum(part: Part) -> None:
    w, h = part.half_width, part.half_height
    two_pads(part, reach=9, inner=0.66)
    polarity_bar(part, -w - 12)
    part.footprint.text(-w - 7, -h - 7, "+", 14, SILK)
    if not part.is_present:
        return
    is_dark = sum(part.type.colour) < 300
    bar, ink = ((204, 204, 198), INK) if is_dark else ((126, 70, 22), (88, 48, 18))
    part.body.rectangle((-w, -h, w, h), part.tint(part.type.colour), radius=3.0, shade="tilt")
    part.body.rectangle((-w + 2, -h, -w * 0.68, h), part.tint(bar), shade="tilt")
    part.body.text(w * 0.16, -h * 0.1, part.type.marking, h * 0.8, ink)
    if part.label == "cracked":
        draw_crack(part, (18, 14, 12) if not is_dark else (196, 190, 178), w * 0.7, h)


def draw_electrolytic(part: Part) -> None:
    w, h = part.half_width, part.half_height
    pads(part, [(-w - 12, -12, -w * 0.5, 12), (w * 0.5, -12, w + 12, 12)], soldered=part.is_present)
    part.footprint.text(-w - 8, -h * 0.5, "+", 20, SILK)
    part.footprint.line([(-w - 4, -h - 4), (w + 4, -h - 4), (w + 4, h + 4), (-w - 4, h + 4)], SILK, 1.6)
    if not part.is_present:
        return
    cut = 0.3 * w
    base = [(-w, -h + cut), (-w + cut, -h), (w, -h), (w, h), (-w + cut, h), (-w, h - cut)]
    part.body.polygon(base, part.tint((46, 46, 48)), shade="tilt")
    part.body.ellipse(0, 0, w * 0.94, h * 0.94, part.tint((150, 152, 156)), shade="tilt")
    part.body.ellipse(0, 0, w * 0.86, h * 0.86, part.tint(part.type.colour), shade="dome")
    angles = np.linspace(-0.95, 0.95, 24)  # the minus side is black, opposite to the plus on the board
    part.body.polygon([(0.85 * w * np.cos(a), 0.85 * h * np.sin(a)) for a in angles], part.tint((34, 34, 38)))
    part.body.text(-w * 0.22, -h * 0.12, part.type.marking, h * 0.42, (52, 52, 56))
    part.body.text(-w * 0.22, h * 0.28, "16V", h * 0.3, (52, 52, 56))
    if part.label == "leaking":
        x, y = part.rng.uniform(-0.5, 0.5) * w, part.rng.choice((-1.0, 1.0)) * h * 0.8
        part.cover.blot(x, y, w * part.rng.uniform(0.42, 0.55), part.tint((120, 70, 26)), 0.9)


def draw_sot(part: Part) -> None:
    """A power or signal transistor: legs below, a tab or the third leg above."""
    w, h, pins = part.half_width, part.half_height, part.type.pins
    tab = w * (0.2 if part.type.width_px < 100 else 0.62)
    spots = np.linspace(-0.68, 0.68, pins) * w
    boxes = [(float(x) - 0.13 * w - 2, h * 0.7, float(x) + 0.13 * w + 2, h + 16) for x in spots]
    pads(part, [*boxes, (-tab - 3, -h - 16, tab + 3, -h * 0.7)], soldered=part.is_present)
    outline(part, 21.0)
    if part.is_present:
        metal = part.tint(METAL)
        for x in spots:
            part.body.rectangle((float(x) - 0.12 * w, 0, float(x) + 0.12 * w, h + 9), metal, shade="tilt")
        part.body.rectangle((-tab, -h - 9, tab, 0), metal, radius=1.0, shade="tilt")
        is_flipped = part.label == "flipped"
        part.body.rectangle((-w, -h * 0.8, w, h * 0.8), part.tint(part.type.colour), radius=2.0, shade="tilt")
        if is_flipped:
            part.body.rectangle(
                (-w * 0.8, -h * 0.5, w * 0.8, h * 0.5), part.tint((168, 140, 110)), radius=2.0, shade="dome"
            )
        else:
            part.body.text(0, 0, part.type.marking, min(h * 0.75, w * 0.42), INK, 0.8)
    if part.label == "bridge":
        bridge(part, [(float(x), h + 10) for x in spots])


def bridge(part: Part, legs: list[tuple[float, float]]) -> None:
    """Solder that joins two neighbouring legs."""
    first = int(part.rng.integers(len(legs) - 1))
    (x0, y0), (x1, y1) = legs[first], legs[first + 1]
    thick = part.rng.uniform(0.045, 0.055) * part.type.window_px
    part.cover.rectangle(
        (min(x0, x1) - thick, min(y0, y1) - thick, max(x0, x1) + thick, max(y0, y1) + thick),
        part.tint((206, 210, 214)), radius=thick, shade="dome",
    )  # fmt: skip


def leg_places(count: int, reach: float) -> list[float]:
    return [float(place) for place in np.linspace(-reach, reach, count)]


def draw_gullwing(part: Part) -> None:
    """Two rows of legs, above and below; pin 1 is at the lower left."""
    w, h, pins = part.half_width, part.half_height, part.type.pins
    places = leg_places(pins, w * 0.82)
    leg = 0.3 * (places[1] - places[0])
    boxes = [(x - leg - 1, side * (h + 5) - 13, x + leg + 1, side * (h + 5) + 13) for side in (-1, 1) for x in places]
    pads(part, boxes, soldered=part.is_present)
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


def ic_body(part: Part, w: float, h: float, dot: tuple[float, float]) -> None:
    part.body.rectangle((-w, -h, w, h), part.tint(part.type.colour), radius=2.5, shade="tilt")
    size = max(0.085 * min(w, h) + 3.0, 5.5)
    part.body.ellipse(*dot, size, size, part.tint((186, 186, 182)), shade="tilt")
    part.body.text(0, -h * 0.1, part.type.marking, min(w * 0.36, h * 0.42), INK, 0.8)
    part.body.text(0, h * 0.36, f"{part.rng.integers(19, 26)}{part.rng.integers(1, 53):02d}", h * 0.26, INK, 0.6)


def draw_quad(part: Part) -> None:
    """Legs on all four sides; pin 1 is at the upper left."""
    w, h, pins = part.half_width, part.half_height, part.type.pins
    places = leg_places(pins, w * 0.74)
    leg = 0.28 * (places[1] - places[0])
    across = [(x - leg - 1, side * (h + 3) - 12, x + leg + 1, side * (h + 3) + 12) for side in (-1, 1) for x in places]
    pads(part, across + [(top, left, bottom, right) for left, top, right, bottom in across], soldered=part.is_present)
    part.footprint.polygon([(-w - 14, -h - 14), (-w + 4, -h - 14), (-w - 14, -h + 4)], SILK)
    if part.is_present:
        metal = part.tint(METAL)
        for side, x in [(side, x) for side in (-1, 0, 1, 2) for x in places]:
            if side in (-1, 1):
                edges = sorted((side * h * 0.7, side * (h + 9)))
                part.body.rectangle((x - leg, edges[0], x + leg, edges[1]), metal, shade="tilt")
            else:
                edges = sorted(((side - 1) * w * 0.7, (side - 1) * (w + 9)))
                part.body.rectangle((edges[0], x - leg, edges[1], x + leg), metal, shade="tilt")
        ic_body(part, w * 0.86, h * 0.86, (-w * 0.66, -h * 0.66))
    if part.label == "bridge":
        side, row = part.rng.choice((-1.0, 1.0)), places
        legs = [(x, side * (h + 9)) for x in row] if part.rng.random() < 0.5 else [(side * (w + 9), x) for x in row]
        bridge(part, legs)


def draw_qfn(part: Part) -> None:
    w, h, pins = part.half_width, part.half_height, part.type.pins
    places = leg_places(pins, w * 0.74)
    across = [(x - 4, side * h - 9, x + 4, side * h + 9) for side in (-1, 1) for x in places]
    pads(part, across + [(top, left, bottom, right) for left, top, right, bottom in across], soldered=part.is_present)
    part.footprint.polygon([(-w - 15, -h - 15), (-w - 1, -h - 15), (-w - 15, -h - 1)], SILK)
    if part.is_present:
        ic_body(part, w, h, (-w * 0.7, -h * 0.7))
    else:
        pads(part, [(-w * 0.55, -h * 0.55, w * 0.55, h * 0.55)], soldered=False)


def draw_crystal(part: Part) -> None:
    w, h = part.half_width, part.half_height
    pads(part, [(-w * 0.62, -9, -w * 0.3, 9), (w * 0.3, -9, w * 0.62, 9)], soldered=False)
    part.footprint.line([(-w * 0.6, -h - 6), (w * 0.6, -h - 6)], SILK, 1.6)
    part.footprint.line([(-w * 0.6, h + 6), (w * 0.6, h + 6)], SILK, 1.6)
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint((150, 152, 154)), radius=h, shade="tilt")
    part.body.rectangle(
        (-w * 0.93, -h * 0.86, w * 0.93, h * 0.86), part.tint(part.type.colour), radius=h * 0.86, shade="lying"
    )
    part.body.text(0, 0, part.type.marking, h * 0.55, (70, 70, 74))
    if part.label == "dented":
        x, y = part.rng.uniform(-0.55, 0.55) * w, part.rng.uniform(-0.25, 0.25) * h
        size = part.rng.uniform(0.45, 0.58) * h
        part.body.ellipse(x, y, size * 1.7, size, (70, 70, 74))
        part.body.ellipse(x + 3, y + 3, size * 1.1, size * 0.7, (226, 228, 230))


def draw_oscillator(part: Part) -> None:
    w, h = part.half_width, part.half_height
    corners = [(sx * w * 0.66, sy * h * 0.66) for sx in (-1, 1) for sy in (-1, 1)]
    pads(part, [(x - 15, y - 12, x + 15, y + 12) for x, y in corners], soldered=part.is_present)
    part.footprint.ellipse(-w - 10, h + 8, 3.5, 3.5, SILK)
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint((92, 76, 52)), radius=3.0)
    part.body.rectangle(
        (-w * 0.86, -h * 0.82, w * 0.86, h * 0.82), part.tint(part.type.colour), radius=4.0, shade="tilt"
    )
    part.body.text(0, 0, part.type.marking, h * 0.62, (60, 56, 50))
    part.body.ellipse(-w * 0.66, h * 0.56, 4, 4, (60, 56, 50))


def draw_coil(part: Part) -> None:
    w, h = part.half_width, part.half_height
    pads(part, [(-w - 8, -h * 0.5, -w * 0.55, h * 0.5), (w * 0.55, -h * 0.5, w + 8, h * 0.5)], soldered=part.is_present)
    outline(part, 6.0)
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint(part.type.colour), radius=0.32 * w, shade="tilt")
    part.body.ellipse(0, 0, w * 0.8, h * 0.8, part.tint((104, 74, 50)), shade="tilt")
    part.body.ellipse(0, 0, w * 0.7, h * 0.7, part.tint((64, 64, 68)), shade="dome")
    part.body.text(0, 0, part.type.marking, h * 0.46, INK)
    if part.label == "cracked":
        draw_crack(part, (206, 198, 186), w * 0.9, h * 0.96)


def draw_switch(part: Part) -> None:
    w, h = part.half_width, part.half_height
    corners = [(sx * (w + 2), sy * h * 0.62) for sx in (-1, 1) for sy in (-1, 1)]
    pads(part, [(x - 14, y - 9, x + 14, y + 9) for x, y in corners], soldered=part.is_present)
    outline(part, 5.0)
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint((44, 44, 46)), radius=4.0)
    part.body.rectangle(
        (-w * 0.92, -h * 0.92, w * 0.92, h * 0.92), part.tint(part.type.colour), radius=3.0, shade="tilt"
    )
    for sx in (-1, 1):
        for sy in (-1, 1):
            part.body.ellipse(sx * w * 0.7, sy * h * 0.7, 5.5, 5.5, (60, 60, 62))
    if part.label == "no-cap":
        part.body.ellipse(0, 0, w * 0.5, h * 0.5, part.tint((120, 106, 84)))
        part.body.ellipse(0, 0, w * 0.2, h * 0.2, part.tint((210, 200, 170)), shade="dome")
    else:
        part.body.ellipse(0, 0, w * 0.52, h * 0.52, part.tint((30, 30, 34)), shade="dome")


def draw_trimmer(part: Part) -> None:
    w, h = part.half_width, part.half_height
    spots = [(-w * 0.55, h), (w * 0.55, h), (0.0, -h)]
    pads(part, [(x - 11, y - 11, x + 11, y + 11) for x, y in spots], soldered=part.is_present)
    outline(part, 15.0)
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint(part.type.colour), radius=3.0, shade="tilt")
    part.body.ellipse(0, 0, w * 0.68, h * 0.68, part.tint((214, 208, 190)), shade="dome")
    turn = part.rng.uniform(0, np.pi)
    for angle in (turn, turn + np.pi / 2):
        x, y = 0.46 * w * np.cos(angle), 0.46 * w * np.sin(angle)
        part.body.line([(-x, -y), (x, y)], (56, 52, 46), 0.16 * w)


def draw_header(part: Part) -> None:
    w, h, pins = part.half_width, part.half_height, part.type.pins
    spots = [(x, side * h * 0.5) for side in (-1, 1) for x in leg_places(pins, w * 0.64)]
    part.footprint.rectangle((-w - 4, -h - 4, w + 4, h + 4), SILK, radius=2.0)
    part.footprint.rectangle((-w - 2, -h - 2, w + 2, h + 2), (24, 92, 54), radius=2.0)
    for x, y in spots:
        part.footprint.ellipse(x, y, 15, 15, part.tint(GOLD), shade="tilt")
        part.footprint.ellipse(x, y, 8, 8, (30, 26, 22))
    if not part.is_present:
        return
    part.body.rectangle((-w, -h, w, h), part.tint(part.type.colour), radius=5.0, shade="tilt")
    bent = int(part.rng.integers(len(spots))) if part.label == "bent-pin" else None
    for number, (x, y) in enumerate(spots):
        part.body.rectangle((x - 13, y - 13, x + 13, y + 13), (20, 20, 22), radius=2.0)
        if number == bent:
            angle = part.rng.uniform(0, 2 * np.pi)
            part.cover.line([(x, y), (x + 46 * np.cos(angle), y + 46 * np.sin(angle))], part.tint((236, 206, 122)), 15)
        else:
            part.body.rectangle((x - 6, y - 6, x + 6, y + 6), part.tint((222, 190, 104)), radius=1.0, shade="dome")


def draw_fpc(part: Part) -> None:
    """A flat-cable connector: contacts below, a dark latch above that stands off when it is open."""
    w, h, pins = part.half_width, part.half_height, part.type.pins
    places = leg_places(pins, w * 0.76)
    boxes = [(x - 4.5, h - 5, x + 4.5, h + 13) for x in places]
    pads(part, [*boxes, (-w - 6, -12, -w + 14, 12), (w - 14, -12, w + 6, 12)], soldered=part.is_present)
    if not part.is_present:
        return
    for x in places:
        part.body.rectangle((x - 3.5, 0, x + 3.5, h + 7), part.tint(METAL), shade="tilt")
    part.body.rectangle((-w, -h * 0.4, w, h * 0.78), part.tint(part.type.colour), radius=2.0, shade="tilt")
    for x in places:
        part.body.rectangle((x - 2.5, -h * 0.1, x + 2.5, h * 0.5), part.tint((176, 150, 90)))
    lift = -h * 0.62 if part.label == "open-latch" else 0.0
    part.body.rectangle(
        (-w * 1.02, -h * 0.78 + lift, w * 1.02, -h * 0.2 + lift), part.tint((52, 44, 38)), radius=3.0, shade="tilt"
    )


def draw_shield(part: Part) -> None:
    """A stamped can over a radio. It stands on a frame of solder amid a plane of copper, which hides all traces."""
    w, h, reach = part.half_width, part.half_height, part.type.window_px / 2
    part.footprint.rectangle((-reach, -reach, reach, reach), GROUND_PLANE)
    for x in leg_places(7, w + 16):
        for y in (-h - 18, h + 18):
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
    for x in leg_places(5, w * 0.62):
        for y in (-h * 0.5, h * 0.5):
            part.body.ellipse(x, y, 4.0, 4.0, (46, 46, 50))
    draw_blemish(part)


def draw_blemish(part: Part) -> None:
    w, h, rng = part.half_width, part.half_height, part.rng
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


PACKAGES: dict[str, Callable[[Part], None]] = {
    "chip": draw_chip,
    "diode": draw_diode,
    "melf": draw_melf,
    "led": draw_led,
    "tantalum": draw_tantalum,
    "electrolytic": draw_electrolytic,
    "sot": draw_sot,
    "gullwing": draw_gullwing,
    "quad": draw_quad,
    "qfn": draw_qfn,
    "crystal": draw_crystal,
    "oscillator": draw_oscillator,
    "coil": draw_coil,
    "switch": draw_switch,
    "trimmer": draw_trimmer,
    "header": draw_header,
    "fpc": draw_fpc,
    "shield": draw_shield,
}
