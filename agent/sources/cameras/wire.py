"""Messages between an agent and a camera's process; a frame is the bytes behind its message."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypeAlias

from agent.sources.cameras.pictures.source import CameraConnection
from experts.children.child import BROKEN
from experts.children.messages import packed, unpacked


@dataclass(frozen=True, slots=True)
class Take:
    """To the camera: send one frame that arrived at ``since`` or later; None: the latest.

    ``since`` is a time of ``time.monotonic``, which all processes of a box share.
    """

    number: int
    since: float | None


@dataclass(frozen=True, slots=True)
class Ready:
    """From the camera: the process runs, and begins to connect."""


@dataclass(frozen=True, slots=True)
class Opened:
    """From the camera: connected."""


@dataclass(frozen=True, slots=True)
class Seen:
    """From the camera: counts of this connection. ``broken``: pictures that could not be decoded.

    ``lag_s``: age of the last frame when it could be sent.
    """

    frames: int
    broken: int
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """From the camera: the frame for one Take, ``age_s`` old, lag included."""

    number: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """From the camera, as the last message: the connection will deliver no more frames."""

    reason: str
    is_final: bool


Message: TypeAlias = "CameraConnection | Take | Ready | Opened | Seen | Taken | Failed"
KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (CameraConnection, Take, Ready, Opened, Seen, Taken, Failed)
}


def encode(message: Message, frame: bytes = b"") -> bytes:
    return packed([type(message).__name__, asdict(message)], frame)


def decode(content: bytes) -> tuple[Message, bytes]:
    """Message and frame. Raises ValueError, KeyError, TypeError for anything else."""
    (name, value), contents = unpacked(content)
    return (Failed(value, is_final=False), b"") if name == BROKEN else (KINDS[name](**value), contents[0])
