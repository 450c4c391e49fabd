"""Reads board, component and ref of an image from its name or its sidecar, without guessing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from agent.line_file.intake import BOARD_GROUP, NAME_GROUPS, TYPE_GROUP
from agent.sources.folder.files.sidecar import read_sidecar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agent.config import LineConfig
    from agent.line_file.intake import FolderSection


class NameFields(TypedDict, total=False):
    """Fields of Subject from a name or a sidecar; ``board``: the serial."""

    board: str | None
    component: str | None
    ref: str | None
    board_type: str | None


@dataclass(frozen=True, slots=True)
class Naming:
    """Naming of one folder: by a pattern of file names, or by sidecars where the pattern is None.

    ``components``: those with a route. ``component``: the folder's constant. ``whole_board``: the type of board that
    each image shows as a whole, without component and ref. ``layouts``: the types that can be cut.
    """

    pattern: re.Pattern[str] | None
    components: frozenset[str]
    board_types: tuple[str, ...] = ()
    component: str | None = None
    whole_board: str | None = None
    layouts: frozenset[str] = frozenset()

    @property
    def has_sidecars(self) -> bool:
        return self.pattern is None

    def read(self, relpath: str) -> NameFields:
        """Fields of the name. A pattern without `/` matches the last part. Raises ValueError with the reason."""
        if self.pattern is None:
            raise ValueError("names have no facts here: write a sidecar")
        text = relpath if "/" in self.pattern.pattern else relpath.rpartition("/")[2]
        found = self.pattern.fullmatch(text)
        if not found:
            raise ValueError(f"the name does not match the pattern {self.pattern.pattern}")
        return self._meaning({key: value for key, value in found.groupdict().items() if value is not None}, "the name")

    def read_beside(self, sidecar: Path, name: str) -> NameFields:
        """Fields of the sidecar; errors call it ``name``. Raises as ``read_sidecar``."""
        return self._meaning(read_sidecar(sidecar, name), name)

    def _meaning(self, groups: Mapping[str, str], source: str) -> NameFields:
        if self.whole_board is not None:
            return self._whole(groups, source, self.whole_board)
        whole = groups if self.component is None else {"component": self.component, **groups}
        for key in NAME_GROUPS:
            if not whole.get(key):
                raise ValueError(f"{source} gives no {key}")
        component = whole["component"]
        if self.component not in {None, component}:
            raise ValueError(f"{source} says component {component!r}, but all images here are {self.component!r}")
        if component not in self.components:
            raise ValueError(f"no route for the component {component!r}")
        board_type = self._board_type(groups.get("type"), source)
        return {"board": whole["board"], "component": component, "ref": whole["ref"], "board_type": board_type}

    def _whole(self, groups: Mapping[str, str], source: str, board_type: str) -> NameFields:
        for key in NAME_GROUPS:
            if key != BOARD_GROUP and key in groups:
                raise ValueError(f"{source} gives a {key}, but every image here shows a whole board")
        if not groups.get(BOARD_GROUP):
            raise ValueError(f"{source} gives no {BOARD_GROUP}")
        if (named := groups.get(TYPE_GROUP, board_type)) != board_type:
            raise ValueError(f"{source} says board type {named!r}, but every board here is {board_type!r}")
        if board_type not in self.layouts:
            raise ValueError(f"the line file has no layout of board type {board_type!r} any more")
        return {"board": groups[BOARD_GROUP], "component": None, "ref": None, "board_type": board_type}

    def _board_type(self, named: str | None, source: str) -> str | None:
        if not self.board_types:
            return None
        if named is not None and named not in self.board_types:
            raise ValueError(f"no board type {named!r}")
        if named is None and len(self.board_types) > 1:
            raise ValueError(f"{source} gives no board type")
        return named or self.board_types[0]


def naming_of(folder: FolderSection, config: LineConfig) -> Naming:
    return Naming(
        pattern=None if folder.pattern is None else re.compile(folder.pattern),
        components=frozenset(config.catalog.components),
        board_types=tuple(config.boards),
        component=folder.component,
        whole_board=folder.board_type,
        layouts=frozenset(config.layouts),
    )
