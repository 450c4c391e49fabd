"""Cameras in the network: RTSP, and motion JPEG over HTTP, read by FFmpeg.

Guarantees: what a camera sent while it was being opened, a second of it with RTSP, is passed over: whoever asks for a
frame then gets none from before. Whoever logs in is told to FFmpeg alone, inside this process. Opening is tried for
most of its time and, where it fails, what is wrong is looked into for the rest: OpenCV says only that it failed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import cv2

from agent.intake.cameras.sources.capture import Capture
from agent.intake.cameras.sources.diagnosis import why_not
from experts.errors import CameraFailed

if TYPE_CHECKING:
    from agent.intake.cameras.sources.source import Connection, Picture

OPENING_SHARE = 0.75  # of the time that there is; the rest is for finding out why it failed
LIVE_S = 0.005  # a frame that was waited for for so long was not there already
READ_PATIENCE = 2.0  # times the stall timeout: whoever watches notices a stall first, and this ends a read all the same


class StreamSource:
    """See the module."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._capture: Capture | None = None
        self._is_live = False  # what was sent while it was opened has been passed over

    def open(self, deadline: float) -> None:
        left_s = max(deadline - time.monotonic(), 0.0)
        capture = Capture(
            _with_login(self._connection),
            cv2.CAP_FFMPEG,
            (
                cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, max(int(1000 * OPENING_SHARE * left_s), 1),
                cv2.CAP_PROP_READ_TIMEOUT_MSEC, int(1000 * READ_PATIENCE * self._connection.stall_timeout_s),
                cv2.CAP_PROP_N_THREADS, 1,
            ),
        )  # fmt: skip
        if not capture.is_open:
            raise CameraFailed(why_not(self._connection, deadline))
        self._capture, self._is_live = capture, False

    def read(self, deadline: float) -> Picture | None:
        while True:
            asked_at = time.monotonic()
            picture = self._next(deadline)
            now = time.monotonic()
            self._is_live |= now - asked_at >= LIVE_S or now >= deadline
            if self._is_live:
                return picture

    def _next(self, deadline: float) -> Picture | None:
        assert self._capture is not None, "open it first"
        try:
            return self._capture.read(deadline)
        except EOFError:
            raise CameraFailed("the camera ended the stream, or fell silent") from None

    def close(self) -> None:
        if self._capture is not None:
            self._capture.close()


def _with_login(connection: Connection) -> str:
    if connection.user is None:
        return connection.url
    login = ":".join(quote(part, safe="") for part in (connection.user, connection.password) if part is not None)
    parts = urlsplit(connection.url)
    return parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}").geturl()
