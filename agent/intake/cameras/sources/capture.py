"""OpenCV's video capture, tamed: its backend named, its waits bounded, motion JPEG handed through as it was sent.

Guarantees: a frame that FFmpeg calls broken is none; a JPEG that is cut or does not begin as one is none either. What
a camera sends as JPEG is not decoded and encoded again: what is judged later is what the camera sent.
One decoding thread: with more, FFmpeg hands each frame out as many frames late as there are threads, and a trigger
would be answered with the past.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.intake.cameras.sources.source import Picture

RAW = -1  # of CAP_PROP_FORMAT: packets as they came
MOTION_JPEG = {int.from_bytes(code, "little") for code in (b"MJPG", b"mjpg", b"jpeg", b"JPEG")}
JPEG_START, JPEG_END, JPEG_TABLES = b"\xff\xd8", b"\xff\xd9", b"\xff\xc4"
FAILURES_MAXIMUM = 20  # reads in a row that fail at once: the stream is over, not one frame of it broken
AT_ONCE_S = 0.002  # one that takes longer has waited for something that came, and was broken
PAUSE_S = 0.005  # between two of these


class Capture:
    """One opened video. ``parameters`` are pairs of a property and its value, set before it is opened."""

    def __init__(self, place: str, backend: int, parameters: Sequence[int]) -> None:
        self._video = cv2.VideoCapture(place, backend, list(parameters))
        self._is_raw = (
            self.is_open
            and int(self._video.get(cv2.CAP_PROP_FOURCC)) in MOTION_JPEG
            and backend == cv2.CAP_FFMPEG
            and self._video.set(cv2.CAP_PROP_FORMAT, RAW)
        )

    @property
    def is_open(self) -> bool:
        return self._video.isOpened()

    @property
    def frames_per_s(self) -> float:
        """As the video itself says; 0 where it does not."""
        return self._video.get(cv2.CAP_PROP_FPS)

    def read(self, deadline: float) -> Picture | None:
        """The next whole picture; None if none came by the deadline. Raises EOFError when none will come."""
        failures = 0
        while failures < FAILURES_MAXIMUM:
            asked_at = time.monotonic()
            is_read, frame = self._video.read()
            if is_read and not self._is_raw:
                return frame  # type: ignore[return-value]  # its stubs know of any dtype; a video's are uint8
            if is_read and (picture := whole_jpeg(frame.tobytes())) is not None:
                return picture
            now = time.monotonic()
            failures = failures + 1 if not is_read and now - asked_at < AT_ONCE_S else 0
            if now >= deadline:
                return None
            time.sleep(0.0 if is_read else PAUSE_S)
        raise EOFError

    def close(self) -> None:
        self._video.release()


def whole_jpeg(packet: bytes) -> Picture | None:
    """One frame of motion JPEG: the file itself, or its pixels where it needs tables that it does not hold."""
    content = packet.rstrip(b"\0")
    if not (content.startswith(JPEG_START) and content.endswith(JPEG_END)):
        return None
    if JPEG_TABLES in content:
        return content
    return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)  # type: ignore[return-value]  # uint8, or None
