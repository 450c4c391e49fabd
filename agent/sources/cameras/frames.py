"""The nouns of a camera: triggers, frames, what became of triggers without one, how it is doing. Frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.sources.cameras.supervision import CameraState
    from agent.subject import Subject


@dataclass(frozen=True, slots=True)
class Trigger:
    """Wish for one frame. ``number``: of this run; ``asked_s``: monotonic."""

    subject: Subject
    number: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class CameraDoors:
    """Callbacks that take a camera's frames, called one after the other on one thread of the camera.

    ``take`` gets the frame's subject and bytes (a PNG, or the camera's JPEG), and returns once the frame is durable.
    ``has_room`` is asked before each frame of one that runs freely: while it says no, frames are dropped, and counted.
    ``lost`` is told of each trigger that got no frame, and why; it too returns once that is durable.
    """

    take: Callable[[Subject, bytes], None]
    has_room: Callable[[], bool]
    lost: Callable[[Subject, str], None]


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
