"""A watched folder's files on their way: claimed, read, judged, stored, put away.

Guarantees: a file's verdict is committed before the file is moved, a refused file's too; after a crash it is moved, not
judged again. Bytes are read before the agent has the file: only its own folder waits for its disk.
"""

from __future__ import annotations

import logging
import sqlite3
from typing import TYPE_CHECKING

from agent.api.calls.desk import SourceView
from agent.core.request import Outcome
from agent.intake.arrivals import Arrival
from agent.intake.files.filing import printable
from agent.intake.files.naming import naming_of
from agent.intake.folder import FolderIntake
from agent.intake.reading import Answers, ArrivalReader
from agent.runtime.image_sources import EncodedImage
from agent.service.doors.board_images import BoardImages
from agent.service.doors.duplicates import Duplicates, content_of
from agent.service.judging.inspector import ATTEMPTS_MAXIMUM, Task
from agent.service.judging.recording import arrival_result, duplicate_result, refused_result
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.config import LineConfig
    from agent.intake.arrivals import Refusal
    from agent.line_file.intake import FolderSection
    from agent.records.result_reader import ResultReader
    from agent.records.results import Content, Recorded, Result
    from agent.service.judging.inspector import Course, Inspector
    from agent.service.judging.verdicts import Verdicts

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
            during_large=lambda arrival: inspector.counted(arrival.key),
        )
        self._boards = BoardImages(inspector, verdicts, reader, self.reader, self.intake.settle, self._refuse)

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

    def _arrived(self, arrival: Arrival) -> None:
        if self._is_known(arrival):
            self._inspector.settled(arrival.key)
            return
        if arrival.component is None:
            self._boards.arrived(arrival)
            return
        attempts = self._inspector.attempts(arrival.key)
        if attempts >= ATTEMPTS_MAXIMUM:
            reason = f"ended the agent: it was being judged each of the {attempts} times that the agent was ended"
            self._end_unjudged(arrival, f"{printable(arrival.relpath)}: {reason}")
        else:
            self.reader.take(arrival)

    def _read(self, arrival: Arrival, image: bytes) -> None:
        if arrival.component is None:
            self._boards.read(arrival, image)
            return
        if self._duplicates is None:
            self._judge(arrival, image, None)
            return
        content = content_of(arrival, image, self._inspector.agent.config.catalog.sha256)
        if not self._duplicates.begin(arrival, content):
            self.reader.release(len(image))
        elif (first := self._duplicates.first_of(content)) is None:
            self._judge(arrival, image, content)
        else:
            self.reader.release(len(image))
            name = printable(arrival.relpath)
            log.info("image_duplicate file=%s verdict=%s of=%s: not judged again", name, first.verdict, first.key)
            self._record(duplicate_result(self._inspector.agent.config, arrival, first), arrival)

    def _judge(self, arrival: Arrival, image: bytes, content: Content | None) -> None:
        name = printable(arrival.relpath)

        def ended(outcome: Outcome, course: Course) -> None:
            self.reader.release(len(image))
            config = self._inspector.agent.config
            self._record(arrival_result(config, arrival, outcome, course.models, content), arrival)

        source = EncodedImage(image, name, arrival.max_pixels)
        self._inspector.enter(Task(arrival.key, name, source, ended, component=arrival.component))

    def _end_unjudged(self, arrival: Arrival, reason: str) -> None:
        if arrival.component is None:
            self._boards.end_unjudged(arrival, reason)
        else:
            self._refuse(arrival, reason)

    def _refused(self, refusal: Refusal) -> None:
        """A file that no request can be made of is UNKNOWN."""
        if self._is_known(refusal):
            return
        if refusal.name is not None and refusal.name.component is None:
            self._boards.end_unjudged(refusal, refusal.reason)
        else:
            self._refuse(refusal, refusal.reason)

    def _refuse(self, image: Arrival | Refusal, reason: str) -> None:
        """One row, even if the image shows a board."""
        config = self._inspector.agent.config
        if isinstance(image, Arrival):
            result = arrival_result(config, image, Outcome(Verdict.UNKNOWN, None, None, (), reason))
        else:
            result = refused_result(config, image)
        self._record(result, image)

    def _is_known(self, judged: Arrival | Refusal) -> bool:
        """Whether its verdict is stored; if so, put its file away."""
        try:
            known = self._results.find(judged.key)
        except sqlite3.Error as error:  # then it is judged again, and the row that is there stays
            log.warning("results_not_read key=%s reason=%s", judged.key, error)
            return False
        except OSError as error:  # the file was moved or deleted meanwhile: the same, and the store begins a new one
            log.error("results_not_read key=%s reason=%s: judged again", judged.key, error)
            return False
        if known is None:
            return False
        if known.result.verdict is Verdict.UNKNOWN:
            log.info(
                "image_known file=%s: this very file was UNKNOWN before; a copy of it, or a touch, has it judged again",
                judged.relpath,
            )
        self.intake.settle(judged, known.result.verdict, known.result.reason)
        return True

    def _record(self, result: Result, judged: Arrival | Refusal) -> None:
        self._verdicts.record(result, lambda recorded: self._stored(result, judged, recorded))

    def _stored(self, result: Result, judged: Arrival | Refusal, recorded: Recorded) -> None:
        self._inspector.settled(judged.key)
        for arrival in () if self._duplicates is None else self._duplicates.end(judged.key):
            self.reader.take(arrival)
        if not recorded.is_new and self._is_known(judged):
            return  # a row that was not read when its file came: it decides
        self.intake.settle(judged, result.verdict, result.reason)
