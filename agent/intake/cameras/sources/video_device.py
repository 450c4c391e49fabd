"""A camera at this box (USB, MIPI): a Video4Linux device.

Its driver bounds no read; a device that hangs is noticed by whoever waits for its pictures.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import cv2

from agent.intake.cameras.sources.capture import Capture
from experts.errors import CameraFailed

if TYPE_CHECKING:
    from agent.intake.cameras.sources.source import Connection, Picture


class VideoDeviceSource:
    """See the module."""

    def __init__(self, connection: Connection) -> None:
        self._path = connection.place
        self._capture: Capture | None = None

    def open(self, deadline: float) -> None:
        del deadline  # V4L2 has no time limit, and refuses to be opened with one
        self._check()
        capture = Capture(self._path, cv2.CAP_V4L2, ())
        if not capture.is_open:
            raise CameraFailed(f"{self._path}: no camera that can be opened - is it in use by another program?")
        self._capture = capture

    def _check(self) -> None:
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except PermissionError:
            reason = "permission denied - add the agent's user to the group video"
            raise CameraFailed(f"{self._path}: {reason}") from None
        except OSError as error:
            raise CameraFailed(f"{self._path}: {error.strerror} - is the camera plugged in?") from None

    def read(self, deadline: float) -> Picture | None:
        assert self._capture is not None, "open it first"
        try:
            return self._capture.read(deadline)
        except EOFError:
            raise CameraFailed(f"{self._path}: sends no pictures any more - was it unplugged?") from None

    def close(self) -> None:
        if self._capture is not None:
            self._capture.close()
