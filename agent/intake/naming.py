"""What a file's name tells: board, component, ref. A name that does not tell it is refused, never guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.config import LineConfig
    from agent.line_file.intake import FolderSection


@dataclass(frozen=True, slots=True)
class ImageName:
    """Whose image it is. ``board`` is the serial; ``board_type`` is None on a line without boards."""

    board: str
    component: str
    ref: str
    board_type: str | None


@dataclass(frozen=True, slots=True)
class Naming:
    """How one folder names its files. ``components`` are those with a route; ``component`` is a folder's constant."""

    pattern: re.Pattern[str]
    components: frozenset[str]
    board_types: tuple[str, ...] = ()
    component: str | None = None

    def read(self, relpath: str) -> ImageName:
        """The name's meaning. A pattern without `/` is of the last part. Raises ValueError with the reason."""
        text = relpath if "/" in self.pattern.pattern else relpath.rpartition("/")[2]
        found = self.pattern.fullmatch(text)
        if not found:
            raise ValueError(f"the name does not match the pattern {self.pattern.pattern}")
        groups = found.groupdict()
        component = self.component or groups["component"]
        for name, value in (("board", groups["board"]), ("component", component), ("ref", groups["ref"])):
            if not value:
                raise ValueError(f"the name gives no {name}")
        if component not in self.components:
            raise ValueError(f"no route for the component {component!r}")
        return ImageName(groups["board"], component, groups["ref"], self._board_type(groups.get("type")))

    def _board_type(self, named: str | None) -> str | None:
        if not self.board_types:
            return None
        if named is not None and named not in self.board_types:
            raise ValueError(f"no board type {named!r}")
        if named is None and len(self.board_types) > 1:
            raise ValueError("the name gives no board type")
        return named or self.board_types[0]


def naming_of(folder: FolderSection, config: LineConfig) -> Naming:
    """The naming of one configured folder of a line."""
    return Naming(
        pattern=re.compile(folder.pattern),
        components=frozenset(config.catalog.graph.routes),
        board_types=tuple(config.boards),
        component=folder.component,
    )
