"""The nouns of an intake: what arrived, what can never be judged, what was settled, how it is doing. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from agent.intake.files.naming import ImageName
    from agent.intake.files.readiness import Sighting
    from experts.expert import Verdict


class SourceState(StrEnum):
    """Whether the folder can be read."""

    STOPPED = "stopped"
    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A complete image, claimed by this agent. ``key`` identifies it across restarts; ``path`` is where it lies now.

    ``is_ours``: nobody else moves or replaces it there. ``sighting``: what it was when it was found complete.
    """

    key: str
    path: Path
    is_ours: bool
    sighting: Sighting
    relpath: str
    board: str
    component: str
    ref: str
    board_type: str | None
    arrived_at: datetime
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file that can never be judged, and why. ``key`` identifies it across restarts, as an arrival's does.

    Settled, it goes to `failed/`, unless files are kept where they are. ``name`` is what its name tells, None where
    that is nothing.
    """

    key: str
    relpath: str
    reason: str
    name: ImageName | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Settlement:
    """A stored verdict: its file may go."""

    key: str
    verdict: Verdict
    reason: str | None


@dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """A snapshot. ``stale``: files that stay incomplete; ``alarm``: what keeps files from being moved, else None."""

    state: SourceState
    is_polled: bool
    waiting: int
    stale: tuple[str, ...]
    in_flight: int
    offered: int
    refused: int
    filed: int
    unfiled: int
    alarm: str | None
