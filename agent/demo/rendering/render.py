"""Assembled circuit boards, as a camera over the line would see them, with the truth about each part.

Everything follows from the seed: the demo line's own product, and dense panels to cut training crops from. A board is
drawn in three steps: the bare board (traces, vias, silkscreen), the parts with their shadows, then the camera: uneven
light, a slight blur, sensor noise.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import cv2
import numpy as np
from PIL import Image, ImageDraw

from agent.demo.rendering.canvas import font
from agent.demo.rendering.components import COMPONENTS, OK, ComponentType, Detector
from agent.demo.rendering.packages import GOLD, SILK
from agent.demo.rendering.parts import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

BOARD_WIDTH_PX = 1600
BOARD_HEIGHT_PX = 1100
EDGE_PX = 46
GRID_PX = 10
HOLE_PX = 92  # the corner that a mounting hole keeps free
MASK = (20, 88, 52)
TRACE = (32, 112, 66)
CROP_PX = 64
Fractions: TypeAlias = "tuple[float, float, float, float]"


@dataclass(frozen=True, slots=True)
class Site:
    """A place for one part: its name on the board, centre in pixels, quarter turns clockwise."""

    ref: str
    component: ComponentType
    x_px: int
    y_px: int
    quarter_turns: int


@cache
def product_layout() -> tuple[Site, ...]:
    """The one layout of the demo line's product: large parts first, small ones near them."""
    taken = np.zeros((BOARD_HEIGHT_PX // GRID_PX, BOARD_WIDTH_PX // GRID_PX), bool)
    edge, hole = EDGE_PX // GRID_PX, HOLE_PX // GRID_PX
    taken[:edge], taken[-edge:], taken[:, :edge], taken[:, -edge:] = True, True, True, True
    for rows in (slice(None, hole), slice(-hole, None)):
        taken[rows, :hole], taken[rows, -hole:] = True, True
    taken[-edge - 4 :, 36:-36] = True  # of the printed name
    rng = np.random.default_rng(20)
    parts = sorted((part for part in COMPONENTS for _ in range(part.quantity)), key=lambda part: -part.window_px)
    spots = [(part, *place(part, taken, rng), int(rng.integers(4))) for part in parts]
    counts: Counter[str] = Counter()
    sites = []
    for part, x, y, turns in sorted(spots, key=lambda spot: (spot[2] // 120, spot[1])):  # from the upper left
        counts[part.prefix] += 1
        sites.append(Site(f"{part.prefix}{counts[part.prefix]}", part, x, y, turns))
    return tuple(sites)


def place(part: ComponentType, taken: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """A free square for the part, marked as taken; of some free ones, that nearest to what lies there already."""
    side = -(-(part.window_px + 4) // GRID_PX)
    sums = np.pad(taken.astype(int), ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    occupied = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
    rows, columns = np.nonzero(occupied == 0)
    if not len(rows):
        raise ValueError(f"the board has no room left for a {part.name}")
    picks = rng.choice(len(rows), size=min(10, len(rows)), replace=False)
    down, right = (rows[picks] + side / 2) / taken.shape[0], (columns[picks] + side / 2) / taken.shape[1]
    middle = np.hypot(down - 0.5, right - 0.5)
    best = picks[int(np.argmin(middle if side > 12 else -middle))]
    row, column = int(rows[best]), int(columns[best])
    taken[row : row + side, column : column + side] = True
    return column * GRID_PX + side * GRID_PX // 2, row * GRID_PX + side * GRID_PX // 2


def panels(parts: Sequence[tuple[ComponentType, str]], rng: np.random.Generator) -> list[list[tuple[Site, str]]]:
    """Dense panels, enough for these parts, in rows of about the same height; with their labels."""
    filled: list[list[tuple[Site, str]]] = [[]]
    x, y, row_px = EDGE_PX, EDGE_PX, 0
    for number, (part, label) in enumerate(sorted(parts, key=lambda each: -each[0].window_px)):
        side = part.window_px + int(rng.integers(2, 10))
        if x + side > BOARD_WIDTH_PX - EDGE_PX:
            x, y, row_px = EDGE_PX, y + row_px, 0
        if y + side > BOARD_HEIGHT_PX - EDGE_PX:
            filled.append([])
            x, y, row_px = EDGE_PX, EDGE_PX, 0
        site = Site(f"P{number}", part, x + side // 2, y + side // 2, int(rng.integers(4)))
        filled[-1].append((site, label))
        x, row_px = x + side, max(row_px, side)
    return filled


@dataclass(frozen=True, slots=True)
class Placement:
    """One part of a rendered board and the truth about it. ``window`` is its crop's left, top, right, bottom.

    ``body`` is the part's extent within its upright crop, 0 to 1; None for a missing part.
    """

    ref: str
    component: str
    label: str
    window: tuple[int, int, int, int]
    quarter_turns: int
    body: Fractions | None


@dataclass(frozen=True, slots=True)
class RenderedBoard:
    """A board's picture and its parts, in the order of their refs on the layout."""

    name: str
    image: Image.Image
    placements: tuple[Placement, ...]


def render_board(seed: int, name: str, defect_rate: float, measured_defect_rate: float) -> RenderedBoard:
    """One board of the demo line's product; each part is defective with this probability, all its defects alike.

    ``measured_defect_rate``: share of defects among parts with an anomaly expert.
    """
    rng = np.random.default_rng([seed, 1])
    parts = []
    for site in product_layout():
        rate = measured_defect_rate if site.component.measured else defect_rate
        parts.append((site, str(rng.choice(site.component.labels[1:])) if rng.random() < rate else OK))
    return assemble(name, parts, bare_product().copy(), rng)


def render_panels(parts: Sequence[tuple[ComponentType, str]], seed: int, threads: int = 1) -> Iterator[RenderedBoard]:
    """Boards that hold exactly these parts with these labels, densely, to cut crops from. Each has other traces.

    The boards are the same for any number of threads.
    """

    def render(numbered: tuple[int, list[tuple[Site, str]]]) -> RenderedBoard:
        number, panel = numbered
        rng = np.random.default_rng([seed, 3, number])
        return assemble(f"panel-{number:03d}", panel, draw_bare_board([site for site, _ in panel], rng), rng)

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(render, enumerate(panels(parts, np.random.default_rng([seed, 2]))))


def crop(board: RenderedBoard, placement: Placement) -> NDArray[np.uint8]:
    """The part's upright picture, (CROP_PX, CROP_PX, 3)."""
    upright = board.image.crop(placement.window).rotate(90 * placement.quarter_turns)
    return np.array(upright.resize((CROP_PX, CROP_PX), Image.Resampling.BICUBIC))


def assemble(
    name: str, parts: Sequence[tuple[Site, str]], bare: NDArray[np.float32], rng: np.random.Generator
) -> RenderedBoard:
    """Put a part with the wanted label on each site of a bare board, which is drawn over, and take the picture."""
    placements = tuple(mount(bare, site, label, rng) for site, label in parts)
    return RenderedBoard(name, photograph(bare, rng), placements)


def pose_of(component: ComponentType, label: str, rng: np.random.Generator) -> tuple[float, float, float]:
    """Shift of a part on its place in pixels, x and y, and its turn in degrees clockwise.

    Every machine places a little off; a shifted part is far off or askew, a reversed one the other way round.
    """
    short, long = sorted((component.width_px, component.height_px))
    x, y = np.clip(rng.normal(0.0, 0.018 * short, 2), -0.04 * short, 0.04 * short)
    turn = float(np.clip(rng.normal(0.0, 0.8), -2.0, 2.0))
    if label == Detector.ALIGNMENT.defect:
        sign = float(rng.choice((-1.0, 1.0)))
        kind = int(rng.integers(3))
        if kind == 0:
            x += sign * rng.uniform(0.32, 0.44) * long
        elif kind == 1:
            y += sign * rng.uniform(0.55, 0.75) * short
        else:
            turn += sign * rng.uniform(20.0, 35.0)
    if label == Detector.POLARITY.defect:
        turn += 180.0
    return float(x), float(y), turn


def mount(picture: NDArray[np.float32], site: Site, label: str, rng: np.random.Generator) -> Placement:
    """Draw a part on its site: its window and somewhat more lie within the picture."""
    layers, turns = Part(site.component, label, rng).layers, site.quarter_turns
    side = layers["body"].side_px
    left, top = site.x_px - side // 2, site.y_px - side // 2
    target = picture[:, top : top + side, left : left + side]
    blend(target, layers["footprint"].seen(turns))
    body = layers["body"].seen(turns, *pose_of(site.component, label, rng))
    cast_shadow(target, body[..., 3])
    blend(target, body)
    blend(target, layers["cover"].seen(turns))
    half = site.component.window_px // 2
    window = (site.x_px - half, site.y_px - half, site.x_px + half, site.y_px + half)
    body_box = extent(np.rot90(body[..., 3], turns), half)
    return Placement(site.ref, site.component.name, label, window, turns, body_box)


def blend(target: NDArray[np.float32], layer: NDArray[np.uint8]) -> None:
    """Lay a premultiplied layer over a part of the board."""
    left, top, width, height = cv2.boundingRect(layer[..., 3])
    rows, columns = slice(top, top + height), slice(left, left + width)
    planes = np.moveaxis(layer[rows, columns], 2, 0).astype(np.float32, order="C")
    target[:, rows, columns] *= 1.0 - planes[3] / 255.0
    target[:, rows, columns] += planes[:3]


def cast_shadow(target: NDArray[np.float32], alpha: NDArray[np.uint8]) -> None:
    """Shadow of a layer on the board: light comes from the upper left, however the part is turned."""
    soft = cv2.GaussianBlur(alpha, (0, 0), 2.5)
    target[:, 4:, 3:] *= 1.0 - np.float32(0.45 / 255.0) * soft[:-4, :-3]


def extent(alpha: NDArray[np.uint8], half_px: int) -> Fractions | None:
    """The bounding box of what a layer covers, as fractions of the window of this half side around its centre."""
    left, top, width, height = cv2.boundingRect((alpha > 127).astype(np.uint8, order="C"))
    if not width:
        return None
    start = alpha.shape[0] / 2 - half_px
    edges = (np.array((left, top, left + width, top + height)) - start) / (2 * half_px)
    least_x, least_y, most_x, most_y = np.clip(edges, 0.0, 1.0).tolist()
    return least_x, least_y, most_x, most_y


@cache
def bare_product() -> NDArray[np.float32]:
    return draw_bare_board(product_layout(), np.random.default_rng(7))


def draw_bare_board(sites: Sequence[Site], rng: np.random.Generator) -> NDArray[np.float32]:
    """Solder mask, traces from part to part, vias, holes and print: float (3, height, width), 0 to 255."""
    image = Image.new("RGB", (BOARD_WIDTH_PX, BOARD_HEIGHT_PX), (16, 18, 20))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((6, 6, BOARD_WIDTH_PX - 7, BOARD_HEIGHT_PX - 7), radius=26, fill=MASK)
    draw_traces(draw, sites, rng)
    for x, y in rng.uniform((30, 30), (BOARD_WIDTH_PX - 30, BOARD_HEIGHT_PX - 30), (150, 2)):
        draw.ellipse((x - 6, y - 6, x + 6, y + 6), fill=(44, 128, 78))
        draw.ellipse((x - 2.5, y - 2.5, x + 2.5, y + 2.5), fill=(12, 40, 26))
    for x in (46, BOARD_WIDTH_PX - 46):
        for y in (46, BOARD_HEIGHT_PX - 46):
            draw.ellipse((x - 30, y - 30, x + 30, y + 30), fill=GOLD)
            draw.ellipse((x - 17, y - 17, x + 17, y + 17), fill=(16, 18, 20))
    for site in sites:  # its name below the part and its pads, but within its crop
        part = site.component
        tall = part.height_px if site.quarter_turns % 2 == 0 else part.width_px
        clearance = 28 if part.pins or part.height_px > 80 else 16
        y = site.y_px + min(tall / 2 + clearance, part.window_px / 2 + 6)
        draw.text((site.x_px, y), site.ref, font=font(13), fill=SILK, anchor="mm")
    draw.text(
        (BOARD_WIDTH_PX / 2, BOARD_HEIGHT_PX - 30), "COSERVE DEMO BOARD  REV C", font=font(22), fill=SILK, anchor="mm"
    )
    return np.moveaxis(np.asarray(image), 2, 0).astype(np.float32, order="C")


def draw_traces(draw: ImageDraw.ImageDraw, sites: Sequence[Site], rng: np.random.Generator) -> None:
    """Bundles of traces between neighbouring parts: straight along the longer axis, then at 45 degrees."""
    places = np.array([(site.x_px, site.y_px) for site in sites], np.float64)
    for number in range(len(sites)):
        distance = np.hypot(*(places - places[number]).T)
        for other in np.argsort(distance)[1:4]:
            count = int(rng.integers(1, 5))
            for lane in range(count):
                offset = (lane - (count - 1) / 2) * 11.0
                start, end = places[number] + offset, places[int(other)] + offset
                step = end - start
                corner = end - np.sign(step) * np.min(np.abs(step))
                points = [(float(x), float(y)) for x, y in (start, corner, end)]
                draw.line(points, fill=TRACE, width=5, joint="curve")


def photograph(picture: NDArray[np.float32], rng: np.random.Generator) -> Image.Image:
    """The camera's picture: light falling off to one side, white balance, a little blur, noise. Changes its input."""
    height, width = picture.shape[1:]
    x = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    angle, slope = rng.uniform(0, 2 * np.pi), rng.uniform(0.03, 0.12)
    across, down = np.float32(slope * np.cos(angle)), np.float32(slope * np.sin(angle))
    light = np.float32(rng.uniform(0.92, 1.08)) * (1 + across * x + down * y) * (1 - np.float32(0.06) * (x * x + y * y))
    balance, blur, grain = rng.normal(1.0, 0.02, 3), float(rng.uniform(0.3, 0.8)), rng.uniform(2.0, 4.0)
    noise = rng.standard_normal((height, width), np.float32) * np.float32(grain)
    planes = []
    for plane, factor in zip(picture, balance, strict=True):
        plane *= light * np.float32(factor)
        blurred = cv2.GaussianBlur(np.minimum(plane, 255, out=plane), (5, 5), blur)
        planes.append(np.clip(blurred + noise, 0, 255).astype(np.uint8))
    return Image.fromarray(cv2.merge(planes))
