"""Images for a line to judge, named as its intake reads them, and the truth about each for the closing report."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from agent.demo.rendering.render import crop

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from agent.demo.rendering.render import RenderedBoard
    from agent.demo.training.crops import LabelledCrop


@dataclass(frozen=True, slots=True)
class Specimen:
    """One image of which the truth is known. ``label`` is ``ok`` for a good part."""

    file: Path
    board: str
    component: str
    ref: str
    label: str


def write_board(directory: Path, board: RenderedBoard) -> tuple[Specimen, ...]:
    """The crops of all parts of a rendered board, as ``<board>_<component>_<ref>.png``."""
    specimens = []
    for placement in board.placements:
        file = directory / file_name(board.name, placement.component, placement.ref)
        crop(board, placement).save(file, compress_level=1)
        specimens.append(Specimen(file, board.name, placement.component, placement.ref, placement.label))
    return tuple(specimens)


def write_held_out(directory: Path, crops: Iterable[LabelledCrop]) -> tuple[Specimen, ...]:
    """Held-out crops under the same pattern. Board: the image they come from; the name does not tell the label."""
    counts: Counter[str] = Counter()
    specimens = []
    for held in crops:
        board = re.sub(r"[^0-9A-Za-z-]", "-", held.source)
        counts[board] += 1
        ref = f"P{counts[board]}"
        file = directory / file_name(board, held.component, ref)
        Image.fromarray(held.pixels).save(file, compress_level=1)
        specimens.append(Specimen(file, board, held.component, ref, held.label))
    return tuple(specimens)


def file_name(board: str, component: str, ref: str) -> str:
    return f"{board}_{component}_{ref}.png"
