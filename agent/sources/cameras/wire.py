"""Messages between an agent and a camera's process over one socket; frames are passed as file descriptors.

Guarantees: messages and frames arrive whole or not at all. A frame is in anonymous memory, sealed before it is sent, so
the sender can neither change nor truncate it. The agent reads the memory without mapping it: no fault of the other
process can end the agent.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import TypeAlias

from agent.sources.cameras.pictures.source import CameraConnection

LARGEST_MESSAGE_BYTES = 65_536


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
    """From the camera: the frame for one Take, with its descriptor; ``age_s`` old, lag included."""

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


def send(to: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message. Raises OSError once the other end is closed."""
    content = json.dumps({"is": type(message).__name__, **asdict(message)}).encode()
    socket.send_fds(to, [content], descriptors)


def receive(of: socket.socket) -> tuple[Message, tuple[int, ...]] | None:
    """Next message with its descriptors, which the caller closes; None once the other end is closed."""
    try:
        content, descriptors, _, _ = socket.recv_fds(of, LARGEST_MESSAGE_BYTES, 1)
    except ConnectionResetError:
        return None
    if not content:
        return None
    said = json.loads(content)
    return KINDS[said.pop("is")](**said), tuple(descriptors)


def sealed(content: bytes) -> int:
    """Descriptor of sealed memory with this content; the caller closes it."""
    descriptor = os.memfd_create("frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def unsealed(descriptor: int) -> bytes:
    """Read and close the sealed memory."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
