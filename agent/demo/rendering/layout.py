"""Places of the parts of a board: the demo line's own board, and dense panels to cut training crops from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from agent.demo.rendering.components import COMPONENTS, ComponentType

if TYPE_CHECKING:
    from collections.abc import Sequence

BOARD_WIDTH_PX = 1600
BOARD_HEIGHT_PX = 1100
EDGE_PX = 46
GRID_PX = 10
HOLE_PX = 92  # the corner that a mounting hole keeps free


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
    """The one layout of the demo line's product: large parts first, small ones near them.

    Parts without traces are placed last, where room is left, so that they change no other part's place.
    """
    taken = np.zeros((BOARD_HEIGHT_PX // GRID_PX, BOARD_WIDTH_PX // GRID_PX), bool)
    edge, hole = EDGE_PX // GRID_PX, HOLE_PX // GRID_PX
    taken[:edge], taken[-edge:], taken[:, :edge], taken[:, -edge:] = True, True, True, True
    for rows in (slice(None, hole), slice(-hole, None)):
        for columns in (slice(None, hole), slice(-hole, None)):
            taken[rows, columns] = True
    taken[-edge - 4 :, 36:-36] = True  # of the printed name
    sites: list[Site] = []
    for is_wired, seed in ((True, 20), (False, 21)):
        rng = np.random.default_rng(seed)
        parts = [part for part in COMPONENTS if part.is_wired is is_wired for _ in range(part.quantity)]
        spots = [(part, place(part, taken, rng)) for part in sorted(parts, key=lambda part: -part.window_px)]
        sites += named([(part, x, y, int(rng.integers(4))) for part, (x, y) in spots])
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


def named(spots: Sequence[tuple[ComponentType, int, int, int]]) -> list[Site]:
    """Sites with the names that a schematic would give them, counted from the upper left."""
    counts: Counter[str] = Counter()
    sites = []
    for part, x, y, turns in sorted(spots, key=lambda spot: (spot[2] // 120, spot[1])):
        counts[part.prefix] += 1
        sites.append(Site(f"{part.prefix}{counts[part.prefix]}", part, x, y, turns))
    return sites


def panels(parts: Sequence[ComponentType], rng: np.random.Generator) -> list[tuple[Site, ...]]:
    """As many dense panels as it takes to hold these parts, in rows of about the same height.

    The order of ``parts`` is kept: site number n over all panels holds part number n of those sorted by size.
    """
    filled: list[tuple[Site, ...]] = []
    sites: list[Site] = []
    x, y, row_px = EDGE_PX, EDGE_PX, 0
    for number, part in enumerate(sorted(parts, key=lambda part: -part.window_px)):
        side = part.window_px + int(rng.integers(2, 10))
        if x + side > BOARD_WIDTH_PX - EDGE_PX:
            x, y, row_px = EDGE_PX, y + row_px, 0
        if y + side > BOARD_HEIGHT_PX - EDGE_PX:
            filled.append(tuple(sites))
            sites, x, y, row_px = [], EDGE_PX, EDGE_PX, 0
        sites.append(Site(f"P{number}", part, x + side // 2, y + side // 2, int(rng.integers(4))))
        x, row_px = x + side, max(row_px, side)
    return [*filled, tuple(sites)]
