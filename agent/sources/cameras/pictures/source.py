"""Contract of picture sources. Imports nothing heavy.

A source is opened once, read by one thread, and closed once. A library's call may block beyond its deadline, even
forever, as the process can be killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from av.video.frame import VideoFrame
    from numpy.typing import NDArray

# Pixels (height, width) or (height, width, 3) in the order BGR, or of more than 8 bits; a frame as FFmpeg decoded it,
# which is converted to pixels on demand; or one whole JPEG file, unchanged.
Picture: TypeAlias = "NDArray[np.uint8] | DeepPixels | VideoFrame | bytes"


@dataclass(frozen=True, slots=True, eq=False)
class DeepPixels:
    """Grey values (height, width) of 9 to 16 bits, as the camera sends them."""

    values: NDArray[np.uint16]
    bits: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Picture with its arrival time by ``time.monotonic``, lag subtracted."""

    picture: Picture
    came_at: float


@dataclass(frozen=True, slots=True)
class CameraConnection:
    """Parameters to read from one camera. ``frames_per_s`` None: a file's own rate.

    ``ca``: file of the trusted authorities, None for the system's; ``insecure_ok``: no certificate is checked.
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
    """Reader of one camera. Deadlines are times of ``time.monotonic``."""

    def open(self, deadline: float) -> None:
        """Connect. Raises CameraFailed with the reason."""

    def read(self, deadline: float) -> Snapshot | None:
        """Next picture; None if none arrived by the deadline, or a broken one.

        Raises CameraFailed if the connection will deliver no more.
        """

    def close(self) -> None:
        """Release the camera; idempotent."""
