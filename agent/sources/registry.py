"""Registry of sources, by the line file. A new kind of source is one module, and one line in SOURCES."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.sources.cameras.camera import camera_sources
from agent.sources.folder.folder import folder_sources
from agent.sources.left_overs import left_over_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.config import LineConfig
    from agent.sources.base import Line, Source

SOURCES: list[Callable[[LineConfig, Line], Sequence[Source]]] = [folder_sources, camera_sources, left_over_sources]


def sources_of(config: LineConfig, line: Line) -> list[Source]:
    """Sources of a line file. Raises SecretMissing."""
    return [source for sources in SOURCES for source in sources(config, line)]
