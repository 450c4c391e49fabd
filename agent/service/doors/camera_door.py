"""A camera's frames on their way: cut by its board's layout where it has one, journaled, judged.

Guarantees: a frame is taken once all its requests are durable. A trigger without a frame, and a frame of another size
than its layout's, is UNKNOWN, part by part.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.api.calls.desk import SourceView
from agent.config import read_secret
from agent.intake.cameras.camera import Camera
from agent.intake.cameras.frames import CameraDoors
from agent.runtime.image_sources import EncodedImage
from agent.service.doors.journal_door import asked_sha256
from agent.service.doors.order_taker import short_name
from agent.service.judging.recording import judged_result, unknown
from agent.subject import CAMERA_PREFIX, Subject, pieces
from experts.errors import CameraFailed, ConfigError, OrderRefused, Refusing

if TYPE_CHECKING:
    from agent.config import LineConfig
    from agent.line_file.boards import LayoutSections
    from agent.line_file.intake import CameraSection
    from agent.service.doors.journal_door import JournalDoor, StoredVerdict
    from agent.service.judging.inspector import Inspector
    from agent.service.judging.verdicts import Verdicts

log = logging.getLogger(__name__)

CALLERS_PREFIX = f"{CAMERA_PREFIX}key/"  # of keys that callers give to triggers: no camera's name has a slash
FRAMES_UNDER_WAY = 2  # of one camera: one is judged while the next is fetched; a trigger's waits in its queue
LOOK_S = 0.2  # how often a door that waits for the disk looks whether the agent stops


class _Taking:
    """Keeps ``Sender`` for one frame."""

    def __init__(self, door: CameraDoor, requests: int) -> None:
        self._door = door
        self._left = requests
        self.is_accepted = threading.Event()

    def accepted(self) -> None:
        self.is_accepted.set()

    def judged(self, verdict: StoredVerdict) -> None:
        self._left -= 1
        if not self._left:
            self._door.frame_judged()

    def refused(self, key: str) -> None:
        """Happens only if the results file was replaced after its trigger's key was looked up."""
        log.error("camera_frame_refused key=%s: the key of its trigger was given for something else", key)
        self.is_accepted.set()
        self._door.frame_judged()


class CameraDoor:
    """One camera. Raises SecretMissing."""

    def __init__(self, section: CameraSection, inspector: Inspector, journal: JournalDoor, verdicts: Verdicts) -> None:
        self._section = section
        self._inspector = inspector
        self._journal = journal
        self._verdicts = verdicts
        self._has_changed = threading.Condition()  # over the line below
        self._under_way = 0  # frames that were accepted, and not judged yet
        self._stopping = threading.Event()
        password = None if section.password is None else read_secret(section.password)
        self.camera = Camera(section, password, CameraDoors(self._take, self._has_room, self._lost))

    @property
    def name(self) -> str:
        return self._section.name

    def start(self) -> None:
        self.camera.start()

    def stop(self, timeout_s: float) -> bool:
        """End; False after ``timeout_s``."""
        self._stopping.set()
        with self._has_changed:
            self._has_changed.notify_all()
        return self.camera.stop(timeout_s)

    def trigger(self, board: str | None, board_type: str | None, key: str | None = None) -> str:
        """Take one frame, the first time that this key comes. Returns its results' key. Raises OrderRefused."""
        config = self._config
        if board_type is not None and board_type not in config.boards:
            raise OrderRefused(Refusing.NOT_FOUND, f"no board type {board_type!r}")
        if board_type is not None and self._section.component is None and board_type not in config.layouts:
            raise OrderRefused(
                Refusing.INVALID, f"board type {board_type!r} has no layout to cut frames of camera {self.name} by"
            )
        if short_name(key, "key") is None:
            return self.camera.trigger(board, board_type)
        named, asked = f"{CALLERS_PREFIX}{key}", asked_sha256(self.name, board, board_type)
        if self._journal.reserve(named, asked):
            try:
                self.camera.trigger(board, board_type, named, asked)
            except BaseException:
                self._journal.release(named)
                raise
        return named

    def check(self, config: LineConfig) -> None:
        """Raises ConfigError for a line without the layout that cuts frames of this camera, which runs on meanwhile."""
        board_type = self._section.board_type or next(iter(self._config.layouts), None)
        if self._section.component is None and board_type not in config.layouts:
            raise ConfigError(
                f"the layout of board type {board_type!r} cuts the frames of camera {self.name}, which runs until the "
                "next start - keep it until then, or start anew"
            )

    def view(self) -> SourceView:
        seen = self.camera.statistics()
        return SourceView(self.name, "camera", str(seen.state), seen.received, seen.waiting, seen.dropped, seen.alarm)

    def frame_judged(self) -> None:
        with self._has_changed:
            self._under_way -= 1
            self._has_changed.notify_all()

    @property
    def _config(self) -> LineConfig:
        return self._inspector.agent.config

    def _has_room(self) -> bool:
        return self._inspector.takes and self._under_way < FRAMES_UNDER_WAY

    def _take(self, subject: Subject, content: bytes) -> None:
        """Wait for room; a frame that waits while the agent stops is left to the next start."""
        with self._has_changed:
            while not (self._has_room() or self._stopping.is_set()):
                self._has_changed.wait(LOOK_S)
        subject, layout = self._layout_of(subject)
        taking = _Taking(self, 1 if layout is None else len(layout.parts))
        image = EncodedImage(content, subject.image, self._section.max_pixels)
        self._journal.send(taking, pieces(subject, layout), image, None if layout is None else layout.size)
        with self._has_changed:
            self._under_way += 1
        while not taking.is_accepted.wait(LOOK_S) and not self._stopping.is_set():
            continue
        self._journal.release(subject.key)

    def _lost(self, subject: Subject, reason: str) -> None:
        try:
            lost = pieces(*self._layout_of(subject))
        except CameraFailed:  # the parts are not known any more: the loss is told
            lost = (replace(subject, board_type=None),)
        left = threading.Semaphore(0)
        for each in lost:
            result = judged_result(self._config, each, unknown(f"camera {self.name}: {reason}"))
            self._verdicts.record(result, lambda _: left.release())
        for _ in lost:
            while not left.acquire(timeout=LOOK_S) and not self._stopping.is_set():
                continue
        self._journal.release(subject.key)

    def _layout_of(self, subject: Subject) -> tuple[Subject, LayoutSections | None]:
        """The subject with its board's type, and the layout that cuts its frame. Raises CameraFailed without one."""
        if subject.component is not None:
            return subject, None
        config = self._config
        board_type = subject.board_type or next(iter(config.boards), "")
        if board_type not in config.layouts:
            raise CameraFailed(f"the line file has no layout of board type {board_type!r} any more - put it back")
        return replace(subject, board_type=board_type), config.layouts[board_type]
