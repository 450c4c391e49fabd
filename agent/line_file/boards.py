"""Board types: expected parts, time limits, and layouts of frames.

Guarantees: a configured layout has every part of its board, and no box leaves its frame.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agent.line_file.values import Seconds
from experts.catalog import ComponentType, FilePath, Pixels, Section

Position = Annotated[int, Field(strict=True, ge=0, le=65_535)]


class BoardSection(Section):
    """One board type: its parts, and the time for a board."""

    components: dict[ComponentType, Annotated[int, Field(strict=True, ge=1, le=100_000)]] = Field(
        min_length=1, description="component type -> number on a board, 1 to 100000; each needs a route"
    )
    takt_s: Seconds = Field(60.0, description="time from one board to the next, in seconds, up to 86400")
    timeout_s: Seconds | None = Field(
        None,
        description="seconds from a board's first result until missing parts make it UNKNOWN, counted while the agent "
        "runs; default 2 x takt_s",
    )
    layout: FilePath | None = Field(
        None,
        description="YAML file with the place of each part on a frame of the whole board (size, parts), relative to "
        "this file",
    )

    @property
    def patience_s(self) -> float:
        return 2 * self.takt_s if self.timeout_s is None else self.timeout_s


class PartSection(Section):
    """Place of one part on its board's frame."""

    component: ComponentType = Field(description="its component type")
    box: tuple[Position, Position, Position, Position] = Field(description="[left, top, right, bottom] in pixels")

    @model_validator(mode="after")
    def _is_a_box(self) -> PartSection:
        left, top, right, bottom = self.box
        if left >= right or top >= bottom:
            raise ValueError("the box is empty - write [left, top, right, bottom] with left < right and top < bottom")
        return self


class LayoutSections(Section):
    """A layout file: the places of one board type's parts on a frame."""

    size: tuple[Pixels, Pixels] = Field(description="[height, width] of its frames, in pixels")
    parts: dict[str, PartSection] = Field(min_length=1, description="ref -> the part's component and box")
