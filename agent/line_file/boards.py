"""Board types: expected parts, time limits, and layouts of frames.

Guarantees: a configured layout has every part of its board, and no box leaves its frame.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from agent.line_file.values import Seconds
from experts.document import read_document, suggestion
from experts.errors import ConfigError
from experts.sections.inputs import Pixels
from experts.sections.values import ComponentType, FilePath, Section

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from experts.document import Document, KeyPath

MOST_PARTS = 100_000
Position = Annotated[int, Field(strict=True, ge=0, le=65_535)]


def _quantity(given: Any) -> Any:  # noqa: ANN401  # of YAML
    """Raises ValueError for all but a number of parts or a list of their refs."""
    if isinstance(given, list | tuple):
        if not all(isinstance(ref, str) and ref.strip() for ref in given):
            raise ValueError("refs are texts that are not empty - write [R1, R2], and numbers in quotes")
        twice = [ref for ref, times in Counter(map(as_listed, given)).items() if times > 1]
        if twice:
            raise ValueError(f"the ref {twice[0]!r} is listed twice - a board has each ref once")
        if not 1 <= len(given) <= MOST_PARTS:
            raise ValueError(f"a list of {len(given)} refs - list 1 to {MOST_PARTS}")
    elif isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MOST_PARTS:
        raise ValueError(f"{given!r} is neither a number from 1 to {MOST_PARTS} nor a list of refs, such as [R1, R2]")
    return given


def as_listed(ref: str) -> str:
    """The form in which refs are compared with a list: composed, so that one text has one form."""
    return unicodedata.normalize("NFC", ref)


class BoardSection(Section):
    """One board type: its parts, and the time for a board."""

    components: dict[ComponentType, Annotated[int | tuple[str, ...], BeforeValidator(_quantity)]] = Field(
        min_length=1,
        description="component type -> number on a board, 1 to 100000, or the list of its parts' refs; each needs a "
        "route",
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
    def quantities(self) -> dict[str, int]:
        return {name: given if isinstance(given, int) else len(given) for name, given in self.components.items()}

    @property
    def refs(self) -> dict[str, frozenset[str]]:
        """Refs of the components that list them."""
        lists = {name: given for name, given in self.components.items() if not isinstance(given, int)}
        return {name: frozenset(map(as_listed, refs)) for name, refs in lists.items()}

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

    @property
    def refs(self) -> dict[str, frozenset[str]]:
        """Refs of each component's parts."""
        of = {part.component: part.component for part in self.parts.values()}
        return {
            name: frozenset(as_listed(ref) for ref, part in self.parts.items() if part.component == name) for name in of
        }


def board_problems(
    boards: Mapping[str, BoardSection], routes: Collection[str], document: Document
) -> Iterator[ConfigError]:
    for name, board in boards.items():
        for component in board.components:
            where = ("boards", name, "components", component)
            yield from route_problems(component, routes, document, where, "add its route, or take it off the board")


def route_problems(
    component: str | None, routes: Collection[str], document: Document, where: KeyPath, advice: str = "add its route"
) -> Iterator[ConfigError]:
    if component is not None and component not in routes:
        yield document.error(f"no route for {component!r} - {suggestion(component, routes, advice)}", *where)


def read_layout(file: Path, board: BoardSection, routes: Collection[str]) -> LayoutSections:
    """Read the layout of one board type. Raises ConfigError with all ``problems``."""
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file}: is no file - name the layout's file")  # a pipe would be waited for
    document = read_document(file)
    layout = document.validate(LayoutSections)
    problems: list[ConfigError] = []
    height_px, width_px = layout.size
    for ref, part in layout.parts.items():
        problems += route_problems(part.component, routes, document, ("parts", ref, "component"))
        if part.box[2] > width_px or part.box[3] > height_px:
            problems.append(
                document.error(f"the box leaves the frame of {width_px} x {height_px}", "parts", ref, "box")
            )
    counts = Counter(part.component for part in layout.parts.values())
    quantities, listed, placed = board.quantities, board.refs, layout.refs
    for component in sorted(quantities.keys() | counts.keys()):
        expected, found = quantities.get(component, 0), counts[component]
        if expected == found and (differing := listed.get(component, placed[component]) ^ placed[component]):
            lack = f"{min(differing)!r} of {component!r} is only in one of the layout and its board - correct one"
            problems.append(document.error(lack, "parts"))
        if expected != found:
            lack = f"the layout has {found} parts of {component!r}, its board {expected} - correct one of them"
            problems.append(document.error(lack, "parts"))
    if problems:
        raise ConfigError.of(problems)
    return layout
