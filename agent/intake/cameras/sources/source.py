"""The contract of whatever pictures are read from, and what it is told. Imports nothing heavy.

A source is opened once, read by one thread, and closed once. What its library does not bound in time may block for
longer than its deadline, even for ever: it runs in a process that whoever cannot wait may kill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Pixels (height, width) or (height, width, 3) in the order BGR, uint8 or uint16; or one whole JPEG file as it was sent.
Picture: TypeAlias = "NDArray[np.uint8] | NDArray[np.uint16] | bytes"


@dataclass(frozen=True, slots=True)
class Connection:
    """All that is needed to read from one camera. A file's rate is its own where ``frames_per_s`` is None."""

    url: str
    open_timeout_s: float
    stall_timeout_s: float
    max_pixels: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    loop: bool = False
    frames_per_s: float | None = None

    @property
    def scheme(self) -> str:
        """What kind of camera."""
        return self.url.partition(":")[0]

    @property
    def place(self) -> str:
        """Which one of its kind: the url behind its scheme."""
        return self.url.partition(":")[2]


class Source(Protocol):
    """See the module. Deadlines are of ``time.monotonic``."""

    def open(self, deadline: float) -> None:
        """Connect. Raises CameraFailed, whose reason says why in words."""

    def read(self, deadline: float) -> Picture | None:
        """The next picture; None: there was none by the deadline, or what came was broken.

        Raises CameraFailed when none will ever come from this connection.
        """

    def close(self) -> None:
        """Let the camera go. Also of one that is not open."""
