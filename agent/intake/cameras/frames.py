"""The nouns of a camera: triggers, frames, what became of triggers without one, how it is doing. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from agent.intake.cameras.supervision import CameraState


@dataclass(frozen=True, slots=True)
class Trigger:
    """That one frame is wanted. ``key`` identifies it, and what comes of it, across restarts.

    ``board``: the serial that it was given, or one made from the camera's name and the time. ``asked_s``: monotonic.
    """

    camera: str
    number: int
    key: str
    board: str
    board_type: str | None
    at: datetime
    asked_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture. ``content``: a PNG, or the JPEG that the camera sent. ``size``: (height, width) in pixels.

    ``key`` is its trigger's, and unique across restarts. ``at``: when it came from the camera, with a time zone.
    """

    camera: str
    key: str
    content: bytes
    size: tuple[int, int]
    at: datetime
    board: str
    board_type: str | None


@dataclass(frozen=True, slots=True)
class CameraDoors:
    """Where a camera's frames go. Called on one thread of the camera's own, one call after the other.

    ``take`` returns once the frame is durable, however long that takes: nothing is handed over meanwhile.
    ``has_room`` is asked before each frame of one that runs freely: while it says no, frames are dropped, and counted.
    ``lost`` is told of each trigger that got no frame, and why; it too returns once that is durable.
    """

    take: Callable[[Frame], None]
    has_room: Callable[[], bool]
    lost: Callable[[Trigger, str], None]


@dataclass(frozen=True, slots=True)
class CameraStatistics:
    """A snapshot. ``received``: frames taken; ``dropped``: frames of one that runs freely that gave way to later ones;
    ``lost``: triggers without a frame; ``waiting``: triggers and frames not taken yet; ``broken``: what came and could
    not be read.

    ``reconnects``: connections begun after the first. ``alarm``: why it does not stream, or why its frames are late or
    not taken. ``frame_age_s``: how old the last frame is, with its lag; None before the first. ``process``: its number,
    while it runs.
    """

    name: str
    state: CameraState
    received: int
    dropped: int
    lost: int
    waiting: int
    broken: int
    reconnects: int
    alarm: str | None
    frame_age_s: float | None
    process: int | None
