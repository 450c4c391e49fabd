"""The parts on a frame of a whole board: where its board type's layout says that they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.line_file.boards import LayoutSections


@dataclass(frozen=True, slots=True)
class CutPart:
    """One part of a frame. ``box``: (left, top, right, bottom) in pixels, right and bottom outside of it."""

    ref: str
    component: str
    box: tuple[int, int, int, int]


def cut(size: tuple[int, int], layout: LayoutSections) -> tuple[CutPart, ...]:
    """The parts of a frame of this size, (height, width), in the layout's order.

    Raises ValueError for one of another size than the layout is for: its boxes would show something else.
    """
    if size != tuple(layout.size):
        raise ValueError(
            f"the frame is {_words(size)}, the layout is for {_words(layout.size)} - set the camera to that size, or "
            "measure the layout anew"
        )
    return tuple(CutPart(ref, part.component, part.box) for ref, part in layout.parts.items())


def _words(size: tuple[int, int]) -> str:
    height, width = size
    return f"{width} x {height} pixels (width x height)"
