"""The contract of what pictures are read from. Imports nothing heavy.

A source is opened once, read by one thread, and closed once. What its library does not bound in time may block for
longer than its deadline, even for ever: its process can be killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from av.video.frame import VideoFrame
    from numpy.typing import NDArray

# Pixels (height, width) or (height, width, 3) in the order BGR, uint8 or uint16; a frame as FFmpeg decoded it, which
# becomes pixels when it is wanted; or one whole JPEG file as it was sent.
Picture: TypeAlias = "NDArray[np.uint8] | NDArray[np.uint16] | VideoFrame | bytes"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A picture, and when it came by ``time.monotonic``, or would have come had nothing held it up."""

    picture: Picture
    came_at: float


@dataclass(frozen=True, slots=True)
class CameraConnection:
    """Parameters to read from one camera. ``frames_per_s`` None: a file's own rate.

    ``ca``: the file of the authorities that may vouch for the camera, the system's where it is None; with
    ``insecure_ok`` nobody must.
    """

    url: str
    open_timeout_s: float
    stall_timeout_s: float
    max_pixels: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    loop: bool = False
    frames_per_s: float | None = None
    rtsp_transport: str | None = None
    ca: str | None = None
    insecure_ok: bool = False

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]

    @property
    def place(self) -> str:
        return self.url.partition(":")[2]


class PictureSource(Protocol):
    """Deadlines are of ``time.monotonic``."""

    def open(self, deadline: float) -> None:
        """Connect. Raises CameraFailed, whose reason says why in words."""

    def read(self, deadline: float) -> Snapshot | None:
        """The next picture; None: there was none by the deadline, or what came was broken.

        Raises CameraFailed when none will ever come from this connection.
        """

    def close(self) -> None:
        """Let the camera go. Also of one that is not open."""
