"""A video file, played as a camera would see it: at its own rate or a given one, once or over and over.

Guarantees: no frame is skipped and none comes early. A clip that ended is not played again by itself unless it loops.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import cv2

from agent.intake.cameras.sources.capture import Capture
from experts.errors import CameraFailed

if TYPE_CHECKING:
    from agent.intake.cameras.sources.source import Connection, Picture

DEFAULT_FRAMES_PER_S = 25.0  # of a clip that does not say
FASTEST_FRAMES_PER_S = 1000.0  # what a clip claims beyond is no rate


class ClipSource:
    """See the module."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._path = Path(connection.place)
        self._capture: Capture | None = None
        self._period_s = 0.0
        self._due = 0.0
        self._has_played = False  # since it was begun, at least one frame

    def open(self, deadline: float) -> None:
        del deadline  # a disk that hangs hangs in here: whoever waits kills
        self._begin()
        self._due = time.monotonic()

    def read(self, deadline: float) -> Picture | None:
        if self._due > deadline:
            time.sleep(max(deadline - time.monotonic(), 0.0))
            return None
        time.sleep(max(self._due - time.monotonic(), 0.0))
        picture = self._next(deadline)
        self._due = max(self._due, time.monotonic() - self._period_s) + self._period_s
        return picture

    def close(self) -> None:
        if self._capture is not None:
            self._capture.close()

    def _begin(self) -> None:
        self.close()
        capture = Capture(str(self._path), cv2.CAP_FFMPEG, (cv2.CAP_PROP_N_THREADS, 1))
        if not capture.is_open:
            raise CameraFailed(f"{self._path}: {self._why_not()}")
        self._capture, self._has_played = capture, False
        said = capture.frames_per_s
        own = said if 0 < said <= FASTEST_FRAMES_PER_S else DEFAULT_FRAMES_PER_S
        self._period_s = 1 / (self._connection.frames_per_s or own)

    def _why_not(self) -> str:
        try:
            with self._path.open("rb"):
                return "not a video that can be read"
        except OSError as error:
            return f"{error.strerror} - correct url:, or put the clip there"

    def _next(self, deadline: float) -> Picture | None:
        assert self._capture is not None, "open it first"
        try:
            picture = self._capture.read(deadline)
        except EOFError:
            if not self._has_played:
                raise CameraFailed(f"{self._path}: holds no picture that can be read", is_final=True) from None
            if not self._connection.loop:
                raise CameraFailed("the clip has ended - `loop: true` plays it again", is_final=True) from None
            self._begin()
            return None
        self._has_played |= picture is not None
        return picture
