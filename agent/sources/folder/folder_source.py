"""A watched folder as a source: files are claimed, read, offered, and put away after the commit of their verdict.

Guarantees: a claimed file lies in the folder's `.work/` until then, so that a crash loses nothing. Only the folder's
own threads wait for its disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.sources.base import Arrival, Source
from agent.sources.folder.files.naming import naming_of
from agent.sources.folder.folder import FolderIntake
from agent.sources.folder.reading import ArrivalReader, ReaderCallbacks
from agent.sources.folder.taking import FolderCallbacks
from agent.subject import SourceStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import LineConfig
    from agent.line_file.intake import FolderSection
    from agent.sources.base import Line
    from agent.sources.folder.taking import ClaimedImage
    from agent.subject import Subject
    from experts.expert import Verdict

READ_BYTES = 256 * 1024 * 1024  # of images read and not judged yet, all folders together
PIXEL_BYTES = 3  # of a decoded frame


def folder_sources(config: LineConfig, line: Line) -> Sequence[Source]:
    folders = config.intake.folders
    return [FolderSource(config, folder, line, READ_BYTES // len(folders)) for folder in folders]


class FolderSource(Source):
    keeps_images = True

    def __init__(self, config: LineConfig, folder: FolderSection, line: Line, budget_bytes: int) -> None:
        super().__init__(str(folder.path))
        self._folder = folder
        self._line = line
        self._sizes: dict[str, int] = {}  # by key: bytes of images that are offered
        self.skips_duplicates = folder.duplicate == "skip"
        self.intake = FolderIntake(
            folder,
            naming_of(folder, config),
            FolderCallbacks(self._claimed, self._refused, lambda: line.has_room(self)),
            owner=config.line,
        )
        self.reader = ArrivalReader(
            folder.path.name,
            ReaderCallbacks(
                read=self._read,
                changed=self.intake.withdraw,
                unreadable=lambda image, reason: self._refused(image.subject, reason),
                is_sound=self.intake.is_sound,
                during_large=lambda image: line.reading(image.subject),
            ),
            budget_bytes=budget_bytes,
            max_pixels=folder.max_pixels,
        )

    def start(self) -> None:
        self.reader.start()
        self.intake.start()

    def stop(self, timeout_s: float) -> bool:
        self.reader.stop(timeout_s)
        return True

    def close(self, timeout_s: float) -> None:
        self.intake.stop(timeout_s)

    def reload(self, config: LineConfig) -> None:
        self.intake.name_by(naming_of(self._folder, config))

    def verdict_committed(self, subject: Subject, verdict: Verdict, reason: str | None) -> None:
        self.reader.release(self._sizes.pop(subject.key, 0))
        self.intake.settle(subject, verdict, reason)

    def status(self) -> SourceStatus:
        intake, reading = self.intake.statistics(), self.reader.statistics()
        return SourceStatus(
            self.name,
            "folder",
            str(intake.state),
            received=intake.offered + intake.refused,
            waiting=intake.waiting + reading.waiting,
            alarm=intake.alarm or reading.alarm,
            held_bytes=reading.held_bytes,
        )

    @property
    def held(self) -> int:
        return self.intake.held

    def holds(self, key: str) -> bool:
        return self.intake.holds(key)

    def report_hangs(self) -> None:
        self.reader.tell_stuck()

    def _claimed(self, image: ClaimedImage) -> None:
        if self._line.expects(image.subject, self):
            self.reader.take(image)

    def _refused(self, subject: Subject, reason: str) -> None:
        self._line.refuse_subject(subject, reason, self)

    def _read(self, image: ClaimedImage, content: bytes) -> None:
        """Offer the image. A frame counts with its pixels, which stay decoded until its last part is judged."""
        layout = self._line.config.layouts.get(image.subject.board_type or "") if image.subject.shows_board else None
        pixels_bytes = 0 if layout is None else layout.size[0] * layout.size[1] * PIXEL_BYTES
        self.reader.hold(pixels_bytes)
        self._sizes[image.subject.key] = len(content) + pixels_bytes
        self._line.offer_image(Arrival(image.subject, content, self._folder.max_pixels), self)
