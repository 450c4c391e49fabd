"""Video file played like a camera: at the file's rate or a given one, once or in a loop.

Guarantees: no frame is skipped or early.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from av.error import FFmpegError, InvalidDataError

from agent.faults.errors import CameraFailed
from agent.sources.cameras.pictures.capture import Capture
from agent.sources.cameras.pictures.source import Snapshot

if TYPE_CHECKING:
    from agent.sources.cameras.pictures.source import CameraConnection

DEFAULT_FRAMES_PER_S = 25.0  # of a clip without a rate
FASTEST_FRAMES_PER_S = 1000.0  # a clip's higher rate is ignored


class ClipSource:
    def __init__(self, connection: CameraConnection) -> None:
        self._connection = connection
        self._path = Path(connection.place)
        self._capture: Capture | None = None
        self._period_s = 0.0
        self._due = 0.0
        self._has_played = False  # one frame at least, since the clip began

    def open(self, deadline: float) -> None:
        del deadline  # if the disk hangs, the supervisor kills the process
        self._begin()
        self._due = time.monotonic()

    def read(self, deadline: float) -> Snapshot | None:
        if self._due > deadline:
            time.sleep(max(deadline - time.monotonic(), 0.0))
            return None
        time.sleep(max(self._due - time.monotonic(), 0.0))
        snapshot = self._next(deadline)
        self._due = max(self._due, time.monotonic() - self._period_s) + self._period_s
        return None if snapshot is None else Snapshot(snapshot.picture, time.monotonic())

    def close(self) -> None:
        if self._capture is not None:
            self._capture.close()

    def _begin(self) -> None:
        self.close()
        try:
            self._capture = Capture(str(self._path), {"protocol_whitelist": "file"}, None, self._connection.max_pixels)
        except InvalidDataError as error:
            raise CameraFailed(f"{self._path}: not a video that can be read: {error.strerror}") from error
        except FFmpegError as error:
            raise CameraFailed(f"{self._path}: {error.strerror} - correct url:, or put the clip there") from error
        self._has_played = False
        declared = self._capture.frames_per_s
        own = declared if 0 < declared <= FASTEST_FRAMES_PER_S else DEFAULT_FRAMES_PER_S
        self._period_s = 1 / (self._connection.frames_per_s or own)

    def _next(self, deadline: float) -> Snapshot | None:
        assert self._capture is not None, "open it first"
        try:
            snapshot = self._capture.read(deadline)
        except EOFError:
            if not self._has_played:
                raise CameraFailed(f"{self._path}: holds no picture that can be read", is_final=True) from None
            if not self._connection.loop:
                raise CameraFailed("the clip has ended - `loop: true` plays it again", is_final=True) from None
            self._begin()
            return None
        self._has_played |= snapshot is not None
        return snapshot
