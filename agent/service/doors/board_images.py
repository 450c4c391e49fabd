"""A folder's images of whole boards: cut by the layout, judged part by part, put away when all parts have a verdict.

Guarantees: each part has its own row, by the image's key and its ref: after a crash only parts without one are judged.
The worst part decides where the file goes, once all are stored. The first stored part fixes which parts an image has.
An image of another size than the layout's is UNKNOWN, part by part. It is decoded once, and the pixels count among the
bytes that the folder has read.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from agent.records.boards import SEVERITY
from agent.runtime.image_sources import EncodedImage, Frame, FramePart
from agent.service.judging.inspector import ATTEMPTS_MAXIMUM, Course, Submission
from agent.service.judging.recording import judged_result, unknown
from agent.subject import part_key, pieces
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from agent.core.request import Outcome
    from agent.intake.arrivals import ClaimedImage
    from agent.intake.reading import ArrivalReader
    from agent.records.result_reader import ResultReader
    from agent.records.results import Recorded, Result
    from agent.service.judging.inspector import Inspector
    from agent.service.judging.verdicts import Verdicts
    from agent.subject import Subject

    Settle: TypeAlias = Callable[["Subject", Verdict, str | None], None]
    Refuse: TypeAlias = Callable[["Subject", str], None]

log = logging.getLogger(__name__)

PIXEL_BYTES = 3  # decoded
NO_LAYOUT = "the line file has no layout any more of its board's type - put it back, then the image, or a copy of it"


@dataclass(slots=True, eq=False)
class _Sheet:
    """One image. ``parts``: without a verdict, by ref; ``size``: (height, width) to cut. Both empty: no layout."""

    image: Subject
    size: tuple[int, int] | None
    parts: Mapping[str, Subject]
    verdicts: dict[str, tuple[Verdict, str | None]]  # of those that are stored, with the reason
    count: int = 0  # of parts that the image is judged by, those with a verdict included
    held_bytes: int = 0  # until the last part is judged
    unjudged: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # over the two counts, and the verdicts

    @property
    def is_stored(self) -> bool:
        return self.parts.keys() <= self.verdicts.keys()

    def worst(self) -> tuple[Verdict, str | None]:
        """The verdict that the file is put away by, and why if it is UNKNOWN."""
        verdict = max((verdict for verdict, _ in self.verdicts.values()), key=SEVERITY.__getitem__)
        if verdict is not Verdict.UNKNOWN:
            return verdict, None
        reasons = {ref: reason for ref, (each, reason) in self.verdicts.items() if each is Verdict.UNKNOWN}
        ref, reason = next(iter(reasons.items()))
        return verdict, f"{len(reasons)} of {len(self.verdicts)} parts are UNKNOWN; {ref}: {reason}"


@dataclass(frozen=True, slots=True, eq=False)
class BoardImages:
    """For any thread. ``settle``: told of an image once all parts are stored; ``refuse``: of one without layout."""

    _inspector: Inspector
    _verdicts: Verdicts
    _results: ResultReader
    _reader: ArrivalReader
    _max_pixels: int
    _settle: Settle
    _refuse: Refuse

    def arrived(self, image: ClaimedImage) -> None:
        subject = image.subject
        sheet = self._sheet(subject)
        keys = (subject.key, *(part.key for part in sheet.parts.values()))  # its parts, and reading it
        attempts = max(self._inspector.attempts(key) for key in keys)
        if attempts >= ATTEMPTS_MAXIMUM:  # hundreds of parts would end it hundreds of times
            reason = f"ended the agent: it was being judged each of the {attempts} times that the agent was ended"
            self._end(sheet, f"{subject.name}: {reason}")
        elif sheet.parts:
            self._reader.take(image)
        else:
            self._put_away(sheet)

    def read(self, image: ClaimedImage, content: bytes) -> None:
        sheet = self._sheet(image.subject)
        if sheet.size is None:  # its rows could not be read when it came, or its layout has gone since
            self._reader.release(len(content))
            self._put_away(sheet)
            return
        pixels_bytes = sheet.size[0] * sheet.size[1] * PIXEL_BYTES
        self._reader.hold(pixels_bytes)
        sheet.held_bytes, sheet.unjudged = len(content) + pixels_bytes, len(sheet.parts)
        frame = Frame(EncodedImage(content, image.subject.name, self._max_pixels), sheet.size)
        for part in sheet.parts.values():
            assert part.box is not None
            ended = partial(self._ended, sheet, part)
            self._inspector.enter(Submission(part, FramePart(frame, part.box, part.name), ended))

    def end_unjudged(self, image: Subject, reason: str) -> None:
        self._end(self._sheet(image), reason)

    def _sheet(self, image: Subject) -> _Sheet:
        """Open parts of an image. Parts with unreadable rows are judged again; the rows stay."""
        layout = self._inspector.agent.config.layouts.get(str(image.board_type))
        stored = self._stored_parts(image.key)
        verdicts = {str(row.subject.ref): (row.verdict, row.reason) for row in stored}
        if stored and len(stored) >= stored[-1].detail["parts"]:
            return _Sheet(image, None, {}, verdicts)
        if layout is None:
            return _Sheet(image, None, {}, {})
        parts = {str(part.ref): part for part in pieces(image, layout) if part.ref not in verdicts}
        return _Sheet(image, layout.size if parts else None, parts, verdicts, len(verdicts) + len(parts))

    def _stored_parts(self, key: str) -> list[Result]:
        try:
            return [row.result for row in self._results.of_keys(part_key(key, ""))]
        except (sqlite3.Error, OSError) as error:
            log.error("results_not_read key=%s reason=%s: judged again", key, error)
            return []

    def _end(self, sheet: _Sheet, reason: str) -> None:
        if not sheet.parts:
            self._put_away(sheet)
        for part in sheet.parts.values():
            self._record(sheet, part, unknown(reason), Course())

    # -- on the agent's thread --

    def _ended(self, sheet: _Sheet, part: Subject, outcome: Outcome, course: Course) -> None:
        with sheet.lock:
            sheet.unjudged -= 1
            is_last = not sheet.unjudged
        if is_last:
            self._reader.release(sheet.held_bytes)
        self._record(sheet, part, outcome, course)

    def _record(self, sheet: _Sheet, part: Subject, outcome: Outcome, course: Course) -> None:
        config, detail = self._inspector.agent.config, {"parts": sheet.count}
        result = judged_result(config, part, outcome, course.models, detail)
        self._verdicts.record(result, partial(self._stored, sheet, part, result))

    # -- on the store's thread --

    def _stored(self, sheet: _Sheet, part: Subject, result: Result, recorded: Recorded) -> None:
        self._inspector.settled(part.key)
        if not recorded.is_new:  # a row that could not be read when its file came: it decides
            result = next(
                (each for each in self._stored_parts(sheet.image.key) if each.subject.key == part.key), result
            )
        with sheet.lock:
            sheet.verdicts[str(part.ref)] = (result.verdict, result.reason)
            is_last = sheet.is_stored
        if is_last:
            self._put_away(sheet)

    def _put_away(self, sheet: _Sheet) -> None:
        self._inspector.settled(sheet.image.key)
        if sheet.verdicts:
            self._settle(sheet.image, *sheet.worst())
        else:
            self._refuse(sheet.image, NO_LAYOUT)
