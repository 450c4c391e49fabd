"""A watched folder's files on their way: claimed, read, judged, stored, put away.

Guarantees: a file's verdict is committed before the file is moved, a refused file's too; after a crash it is moved, not
judged again. Bytes are read before the agent has the file: only its own folder waits for its disk.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.api.calls.desk import SourceView
from agent.intake.files.naming import naming_of
from agent.intake.folder import FolderIntake
from agent.intake.reading import Answers, ArrivalReader
from agent.runtime.image_sources import EncodedImage
from agent.service.doors.board_images import BoardImages
from agent.service.doors.duplicates import Duplicates
from agent.service.judging.inspector import ATTEMPTS_MAXIMUM, Submission
from agent.service.judging.recording import duplicate_result, judged_result, unknown
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.intake.arrivals import ClaimedImage, Refusal
    from agent.line_file.intake import FolderSection
    from agent.records.result_reader import ResultReader
    from agent.records.results import Recorded, Result
    from agent.service.judging.inspector import Course, Inspector
    from agent.service.judging.verdicts import Verdicts
    from agent.subject import Subject

log = logging.getLogger(__name__)


class FolderDoor:
    """One folder. ``budget_bytes``: of its unjudged images; ``has_room``: may it claim more."""

    def __init__(
        self,
        config: LineConfig,
        folder: FolderSection,
        inspector: Inspector,
        verdicts: Verdicts,
        reader: ResultReader,
        *,
        budget_bytes: int,
        has_room: Callable[[FolderDoor], bool],
    ) -> None:
        self._folder = folder
        self._inspector = inspector
        self._verdicts = verdicts
        self._results = reader
        self._duplicates = Duplicates(reader) if folder.duplicate == "skip" else None  # of parts alone
        self.intake = FolderIntake(
            folder,
            naming_of(folder, config),
            self._arrived,
            self._refused,
            owner=config.line,
            has_room=lambda: has_room(self),
        )
        self.reader = ArrivalReader(
            folder.path.name,
            Answers(read=self._read, changed=self.intake.withdraw, unreadable=self._end_unjudged),
            self.intake.is_sound,
            budget_bytes=budget_bytes,
            max_pixels=folder.max_pixels,
            during_large=lambda image: inspector.counted(image.subject.key),
        )
        self._boards = BoardImages(
            inspector, verdicts, reader, self.reader, folder.max_pixels, self.intake.settle, self._refuse
        )

    def start(self) -> None:
        self.reader.start()
        self.intake.start()

    def change(self, config: LineConfig) -> None:
        self.intake.name_by(naming_of(self._folder, config))

    def view(self) -> SourceView:
        intake, reading = self.intake.statistics(), self.reader.statistics()
        return SourceView(
            str(self._folder.path),
            "folder",
            str(intake.state),
            received=intake.offered + intake.refused,
            waiting=intake.waiting + reading.waiting,
            alarm=intake.alarm or reading.alarm,
        )

    def _arrived(self, image: ClaimedImage) -> None:
        subject = image.subject
        if self._is_known(subject):
            self._inspector.settled(subject.key)
        elif subject.shows_board:
            self._boards.arrived(image)
        elif (attempts := self._inspector.attempts(subject.key)) >= ATTEMPTS_MAXIMUM:
            reason = f"ended the agent: it was being judged each of the {attempts} times that the agent was ended"
            self._refuse(subject, f"{subject.name}: {reason}")
        else:
            self.reader.take(image)

    def _read(self, image: ClaimedImage, content: bytes) -> None:
        subject = image.subject
        if subject.shows_board:
            self._boards.read(image, content)
            return
        if self._duplicates is None:
            self._judge(subject, content)
            return
        sha256, config_sha256 = hashlib.sha256(content).hexdigest(), self._inspector.agent.config.catalog.sha256
        if not self._duplicates.is_first(image, sha256, config_sha256):
            self.reader.release(len(content))
        elif (first := self._duplicates.first_of(subject, sha256, config_sha256)) is None:
            self._judge(subject, content, sha256, config_sha256)
        else:
            self.reader.release(len(content))
            log.info(
                "image_duplicate file=%s verdict=%s of=%s: not judged again", subject.name, first.verdict,
                first.subject.key,
            )  # fmt: skip
            self._record(duplicate_result(self._inspector.agent.config, subject, first), subject)

    def _judge(self, subject: Subject, content: bytes, sha256: str | None = None, config_sha256: str = "") -> None:
        def ended(outcome: Outcome, course: Course) -> None:
            self.reader.release(len(content))
            detail = {} if sha256 is None else {"image_sha256": sha256}
            result = judged_result(self._inspector.agent.config, subject, outcome, course.models, detail)
            self._record(result if sha256 is None else replace(result, config_sha256=config_sha256), subject)

        self._inspector.enter(Submission(subject, EncodedImage(content, subject.name, self._folder.max_pixels), ended))

    def _end_unjudged(self, image: ClaimedImage, reason: str) -> None:
        if image.subject.shows_board:
            self._boards.end_unjudged(image.subject, reason)
        else:
            self._refuse(image.subject, reason)

    def _refused(self, refusal: Refusal) -> None:
        """A file that no request can be made of is UNKNOWN."""
        if self._is_known(refusal.subject):
            return
        if refusal.subject.shows_board:
            self._boards.end_unjudged(refusal.subject, refusal.reason)
        else:
            self._refuse(refusal.subject, refusal.reason)

    def _refuse(self, subject: Subject, reason: str) -> None:
        """One row, even if the image shows a board."""
        self._record(judged_result(self._inspector.agent.config, subject, unknown(reason)), subject)

    def _is_known(self, subject: Subject) -> bool:
        """True if the verdict is stored; then the file is put away."""
        try:
            known = self._results.find(subject.key)
        except sqlite3.Error as error:  # then it is judged again, and the row that is there stays
            log.warning("results_not_read key=%s reason=%s", subject.key, error)
            return False
        except OSError as error:  # the file was moved or deleted meanwhile: the same, and the store begins a new one
            log.error("results_not_read key=%s reason=%s: judged again", subject.key, error)
            return False
        if known is None:
            return False
        if known.result.verdict is Verdict.UNKNOWN:
            log.info(
                "image_known file=%s: this very file was UNKNOWN before; a copy of it, or a touch, has it judged again",
                subject.image,
            )
        self.intake.settle(subject, known.result.verdict, known.result.reason)
        return True

    def _record(self, result: Result, subject: Subject) -> None:
        self._verdicts.record(result, lambda recorded: self._stored(result, subject, recorded))

    def _stored(self, result: Result, subject: Subject, recorded: Recorded) -> None:
        self._inspector.settled(subject.key)
        for image in () if self._duplicates is None else self._duplicates.end(subject.key):
            self.reader.take(image)
        if not recorded.is_new and self._is_known(subject):
            return  # a row that was not read when its file came: it decides
        self.intake.settle(subject, result.verdict, result.reason)
