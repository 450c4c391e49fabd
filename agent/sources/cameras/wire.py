"""Messages between an agent and a camera's process over one socket; frames travel beside them.

Guarantees: a message comes whole or not at all, and so does a frame: it lies in memory of its own that is sealed before
it is handed over, sealed: it cannot be changed, cut or reused. It is read, not mapped: whatever
happened to the other process, reading it cannot end this one. Nothing of it has a name that could be left behind.
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
    """To the camera: one frame, please. ``since``: not one that came before, by ``time.monotonic``, which all processes
    of a box share; None: the latest that is there.
    """

    number: int
    since: float | None


@dataclass(frozen=True, slots=True)
class Ready:
    """From the camera: its process runs, and begins to connect."""


@dataclass(frozen=True, slots=True)
class Opened:
    """From the camera: it is connected."""


@dataclass(frozen=True, slots=True)
class Seen:
    """From the camera: so many frames came by now, over this connection; ``broken``: what came and was none.

    ``lag_s``: how old the last one was when it was there to be handed over.
    """

    frames: int
    broken: int
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """From the camera: the frame for one Take, which is ``age_s`` old, lag included; a descriptor of it comes too."""

    number: int
    height: int
    width: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """From the camera: no frame comes from this connection any more. Its last word."""

    reason: str
    is_final: bool


Message: TypeAlias = "CameraConnection | Take | Ready | Opened | Seen | Taken | Failed"
KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (CameraConnection, Take, Ready, Opened, Seen, Taken, Failed)
}


def send(to: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Raises OSError once the other end is closed."""
    content = json.dumps({"is": type(message).__name__, **asdict(message)}).encode()
    socket.send_fds(to, [content], descriptors)


def receive(of: socket.socket) -> tuple[Message, tuple[int, ...]] | None:
    """The next message, and the descriptors that came with it, which are the caller's to close. None: it has ended."""
    try:
        content, descriptors, _, _ = socket.recv_fds(of, LARGEST_MESSAGE_BYTES, 1)
    except ConnectionResetError:
        return None
    if not content:
        return None
    said = json.loads(content)
    return KINDS[said.pop("is")](**said), tuple(descriptors)


def sealed(content: bytes) -> int:
    """A descriptor of memory that holds this and can never be changed. The caller's to close."""
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
