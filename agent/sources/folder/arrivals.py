"""The nouns of an intake: what arrived, what can never be judged, what was settled, how it is doing. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.sources.folder.files.inbox import Claimed
    from agent.subject import Subject
    from experts.expert import Verdict


class SourceState(StrEnum):
    """State of a watched folder."""

    STOPPED = "stopped"
    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class ClaimedImage:
    """A complete image that this agent deals with, and where the file lies."""

    subject: Subject
    file: Claimed


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file that can never be judged, and why. Once settled it goes to `failed/`, unless files are kept in place.

    The subject has no board where neither name nor sidecar tells one.
    """

    subject: Subject
    reason: str


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
