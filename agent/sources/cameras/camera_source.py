"""A camera as a source: each frame is offered, and the next waits until it is durable.

A trigger without a frame is UNKNOWN, part by part.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.config import read_secret
from agent.sources.base import Arrival, Source
from agent.sources.cameras.camera import Camera
from agent.sources.cameras.delivery import CameraDoors
from agent.subject import CAMERA_PREFIX, Subject, asked_sha256, checked_name
from experts.errors import ConfigError, OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import LineConfig
    from agent.line_file.intake import CameraSection
    from agent.sources.base import Line
    from agent.subject import SourceStatus
    from experts.expert import Verdict

CALLERS_PREFIX = f"{CAMERA_PREFIX}key/"  # of keys that callers give to triggers: no camera's name has a slash
FRAMES_UNDER_WAY = 2  # of one camera: one is judged while the next is fetched
LOOK_S = 0.2  # between two checks for a stop, while a thread waits for the disk


def camera_sources(config: LineConfig, line: Line) -> Sequence[Source]:
    return [CameraSource(camera, line) for camera in config.intake.cameras]


class CameraSource(Source):
    def __init__(self, section: CameraSection, line: Line) -> None:
        """Raises SecretMissing."""
        super().__init__(section.name)
        self._section = section
        self._line = line
        self._has_changed = threading.Condition()  # over the two sets
        self._unaccepted: set[str] = set()  # keys of frames that are not durable
        self._unjudged: set[str] = set()  # keys of frames, and of lost triggers, without a committed verdict
        self._stopping = threading.Event()
        password = None if section.password is None else read_secret(section.password)
        self.camera = Camera(section, password, CameraDoors(self._offer, self._has_room, self._lose))

    def start(self) -> None:
        self.camera.start()

    def stop(self, timeout_s: float) -> bool:
        self._stopping.set()
        return self.camera.stop(timeout_s)

    def trigger(self, board: str | None, board_type: str | None, key: str | None) -> str:
        """Take one frame, unless the key was used before."""
        config = self._line.config
        if board_type is not None and board_type not in config.boards:
            raise OrderRefused(Refusing.NOT_FOUND, f"no board type {board_type!r}")
        if board_type is not None and self._section.component is None and board_type not in config.layouts:
            raise OrderRefused(
                Refusing.INVALID, f"board type {board_type!r} has no layout to cut frames of camera {self.name} by"
            )
        if checked_name(key, "key") is None:
            return self.camera.trigger(board, board_type)
        named, asked = f"{CALLERS_PREFIX}{key}", asked_sha256(self.name, board, board_type)
        if self._line.reserve_key(named, asked):
            try:
                self.camera.trigger(board, board_type, named, asked)
            except BaseException:
                self._line.release_key(named)
                raise
        return named

    def check(self, config: LineConfig) -> None:
        """Raises ConfigError for a line without the layout that cuts the frames."""
        board_type = self._section.board_type or next(iter(self._line.config.layouts), None)
        if self._section.component is None and board_type not in config.layouts:
            raise ConfigError(
                f"the layout of board type {board_type!r} cuts the frames of camera {self.name}, which runs until the "
                "next start - keep it until then, or start anew"
            )

    def status(self) -> SourceStatus:
        return self.camera.status()

    def image_accepted(self, subject: Subject) -> None:
        with self._has_changed:
            self._unaccepted.discard(subject.key)
            self._has_changed.notify_all()

    def verdict_committed(self, subject: Subject, verdict: Verdict, reason: str | None) -> None:
        with self._has_changed:
            self._unjudged.discard(subject.key)
        self.image_accepted(subject)

    # -- on the camera's thread that hands over --

    def _has_room(self) -> bool:
        return self._line.has_room(self) and len(self._unjudged) < FRAMES_UNDER_WAY

    def _offer(self, subject: Subject, content: bytes) -> None:
        """A frame that waits for room while the agent stops is left to the next start."""
        with self._has_changed:
            while not (self._has_room() or self._stopping.is_set()):
                self._has_changed.wait(LOOK_S)
            self._unaccepted.add(subject.key)
            self._unjudged.add(subject.key)
        self._line.offer_image(Arrival(self._completed(subject), content, self._section.max_pixels), self)
        self._wait_until_gone(self._unaccepted, subject.key)
        self._line.release_key(subject.key)

    def _lose(self, subject: Subject, reason: str) -> None:
        with self._has_changed:
            self._unjudged.add(subject.key)
        self._line.refuse_subject(self._completed(subject), f"camera {self.name}: {reason}", self)
        self._wait_until_gone(self._unjudged, subject.key)
        self._line.release_key(subject.key)

    def _wait_until_gone(self, keys: set[str], key: str) -> None:
        with self._has_changed:
            while key in keys and not self._stopping.is_set():
                self._has_changed.wait(LOOK_S)

    def _completed(self, subject: Subject) -> Subject:
        """The subject with the type of the board that its frame shows."""
        if subject.component is not None:
            return subject
        return replace(subject, board_type=subject.board_type or next(iter(self._line.config.boards), ""))
