"""Records of a folder's intake: images that arrived, state and counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.sources.folder.files.inbox import Claimed
    from agent.subject import Subject


class SourceState(StrEnum):
    """State of a watched folder."""

    STOPPED = "stopped"
    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class ClaimedImage:
    """A complete image that this agent took, and where the file lies."""

    subject: Subject
    file: Claimed


@dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """A snapshot. ``alarm``: the error that keeps files from being moved, else None."""

    state: SourceState
    is_polled: bool
    waiting: int
    in_flight: int
    offered: int
    refused: int
    filed: int
    unfiled: int
    alarm: str | None
