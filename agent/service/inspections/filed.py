"""Images that their source keeps until the verdict is committed: known, judged part by part, committed, told.

Guarantees: each part has a row of its own: after a crash only parts without one are judged. The source is told the
worst part, once all are stored. The first stored part fixes the parts of an image. With ``skips_duplicates`` only an
OK or NG under the served line file has duplicates; of simultaneous ones the first is judged.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from agent.records.boards import SEVERITY
from agent.runtime.images.sources import EncodedImage, Frame
from agent.service.inspections.inspector import Course, Submission
from agent.service.inspections.journaled import source_of
from agent.service.inspections.rows import duplicate_result, judged_result, unknown
from agent.subject import part_key, pieces
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from agent.core.request import Outcome
    from agent.records.result_reader import ResultReader
    from agent.records.results import Recorded, Result
    from agent.service.inspections.inspector import Inspector
    from agent.service.inspections.verdicts import Verdicts
    from agent.sources.base import Arrival, Source
    from agent.subject import Subject

    Content: TypeAlias = tuple[str | None, ...]  # digests of the bytes and the line file, and the part that they show

log = logging.getLogger(__name__)

NO_LAYOUT = "the line file has no layout any more of its board's type - put it back, then the image, or a copy of it"


@dataclass(slots=True, eq=False)
class _Image:
    """Image of a source. ``parts``: without a verdict, by key; ``size``: (height, width) of a frame that is cut."""

    subject: Subject
    source: Source
    parts: Mapping[str, Subject]
    size: tuple[int, int] | None = None
    verdicts: dict[str, tuple[Verdict, str | None]] = field(default_factory=dict)  # committed, by the part's key
    lock: threading.Lock = field(default_factory=threading.Lock)  # over the verdicts

    @property
    def count(self) -> int:
        return len(self.parts.keys() | self.verdicts.keys())

    @property
    def is_stored(self) -> bool:
        return bool(self.verdicts) and self.parts.keys() <= self.verdicts.keys()

    def worst(self) -> tuple[Verdict, str | None]:
        """The verdict that the source is told, with the reason of an UNKNOWN."""
        verdict = max((verdict for verdict, _ in self.verdicts.values()), key=SEVERITY.__getitem__)
        reasons = {key: reason for key, (each, reason) in self.verdicts.items() if each is verdict}
        key, reason = next(iter(reasons.items()))
        if key == self.subject.key or verdict is not Verdict.UNKNOWN:
            return verdict, reason if key == self.subject.key else None
        ref = key.removeprefix(part_key(self.subject.key, ""))
        return verdict, f"{len(reasons)} of {len(self.verdicts)} parts are UNKNOWN; {ref}: {reason}"


class FiledImages:
    """For any thread."""

    def __init__(self, inspector: Inspector, verdicts: Verdicts, results: ResultReader) -> None:
        self._inspector = inspector
        self._verdicts = verdicts
        self._results = results
        self._guard = threading.Lock()  # over both below
        self._firsts: dict[str, Content] = {}  # by key: the content that is being judged
        self._duplicates: dict[Content, list[tuple[Arrival, Source]]] = {}  # images that wait for its verdict

    def expects(self, subject: Subject, source: Source) -> bool:
        image = self._image(subject, source)
        if not image.is_stored and image.parts:
            reason = self._inspector.reason_to_spare((subject.key, *image.parts))
            if reason is None:
                return True
            self._commit_unknown(image, f"{subject.name}: {reason}")
        else:
            self._finish(image)
        return False

    def offer_image(self, arrival: Arrival, source: Source) -> None:
        subject = arrival.subject
        if source.skips_duplicates:
            sha256, config_sha256 = hashlib.sha256(arrival.image).hexdigest(), self._config_sha256
            if not self._is_first(arrival, source, sha256, config_sha256):
                return
            if (first := self._first_of(subject, sha256, config_sha256)) is not None:
                log.info(
                    "image_duplicate file=%s verdict=%s of=%s: not judged again", subject.name, first.verdict,
                    first.subject.key,
                )  # fmt: skip
                image = _Image(subject, source, {subject.key: subject})
                self._commit(image, subject, duplicate_result(self._inspector.agent.config, subject, first))
                return
            self._submit(_Image(subject, source, {subject.key: subject}), arrival, sha256, config_sha256)
        elif subject.shows_board:
            image = self._image(subject, source)  # its rows could not be read when it came, or its layout has gone
            if image.is_stored or not image.parts:
                self._finish(image)
            else:
                self._submit(image, arrival)
        else:
            self._submit(_Image(subject, source, {subject.key: subject}), arrival)

    def refuse_subject(self, subject: Subject, reason: str, source: Source) -> None:
        image = self._image(subject, source)
        if image.is_stored:
            self._finish(image)
        elif image.parts:
            self._commit_unknown(image, reason)
        else:
            self._commit_unknown(_Image(subject, source, {subject.key: replace(subject, board_type=None)}), reason)

    def _image(self, subject: Subject, source: Source) -> _Image:
        """State of an image by its stored rows. Parts with unreadable rows are judged again; the rows stay."""
        known = self._stored(subject.key)
        if known is not None:
            if known.verdict is Verdict.UNKNOWN:
                log.info(
                    "image_known file=%s: this very file was UNKNOWN before; a copy of it, or a touch, has it judged"
                    " again", subject.image,
                )  # fmt: skip
            return _Image(subject, source, {}, None, {subject.key: (known.verdict, known.reason)})
        if not subject.shows_board:
            return _Image(subject, source, {subject.key: subject})
        layout = self._inspector.agent.config.layouts.get(str(subject.board_type))
        stored = self._stored_parts(subject.key)
        verdicts = {row.subject.key: (row.verdict, row.reason) for row in stored}
        if stored and len(stored) >= stored[-1].detail["parts"]:
            return _Image(subject, source, {}, None, verdicts)
        if layout is None:
            return _Image(subject, source, {})
        parts = {part.key: part for part in pieces(subject, layout) if part.key not in verdicts}
        return _Image(subject, source, parts, layout.size, verdicts)

    def _stored(self, key: str) -> Result | None:
        try:
            known = self._results.find(key)
        except (sqlite3.Error, OSError) as error:  # the file may have been moved: the store begins a new one
            log.error("results_not_read key=%s reason=%s: judged again", key, error)
            return None
        return None if known is None else known.result

    def _stored_parts(self, key: str) -> list[Result]:
        try:
            return [row.result for row in self._results.of_keys(part_key(key, ""))]
        except (sqlite3.Error, OSError) as error:
            log.error("results_not_read key=%s reason=%s: judged again", key, error)
            return []

    def _submit(
        self, image: _Image, arrival: Arrival, image_sha256: str | None = None, config_sha256: str | None = None
    ) -> None:
        whole = EncodedImage(arrival.image, image.subject.name, arrival.max_pixels)
        frame = Frame(whole, image.size)
        for part in image.parts.values():
            ended = partial(self._ended, image, part, image_sha256, config_sha256)
            self._inspector.submit_subject(Submission(part, source_of(part, whole, frame), ended))

    def _ended(
        self,
        image: _Image,
        part: Subject,
        image_sha256: str | None,
        config_sha256: str | None,
        outcome: Outcome,
        course: Course,
    ) -> None:
        """Runs on the agent's thread."""
        detail: dict[str, object] = {} if image_sha256 is None else {"image_sha256": image_sha256}
        if part.box is not None:
            detail["parts"] = image.count
        result = judged_result(self._inspector.agent.config, part, outcome, course.models, detail)
        self._commit(image, part, result if config_sha256 is None else replace(result, config_sha256=config_sha256))

    def _commit_unknown(self, image: _Image, reason: str) -> None:
        for part in image.parts.values():
            self._ended(image, part, None, None, unknown(reason), Course())

    def _commit(self, image: _Image, part: Subject, result: Result) -> None:
        self._verdicts.commit_result(result, partial(self._committed, image, part, result))

    # -- on the store's thread --

    def _committed(self, image: _Image, part: Subject, result: Result, recorded: Recorded) -> None:
        self._inspector.forget_attempts(part.key)
        if not recorded.is_new:  # a row that could not be read when its file came: it decides
            result = self._stored(part.key) or result
        with image.lock:
            image.verdicts[part.key] = (result.verdict, result.reason)
            is_last = image.is_stored
        if is_last:
            self._finish(image)

    def _finish(self, image: _Image) -> None:
        """Tell the source; without any verdict the board has no layout, and the image gets one row."""
        if not image.verdicts:
            self._commit_unknown(replace(image, parts={image.subject.key: image.subject}), NO_LAYOUT)
            return
        self._inspector.forget_attempts(image.subject.key)
        image.source.verdict_committed(image.subject, *image.worst())
        with self._guard:
            content = self._firsts.pop(image.subject.key, None)
            waiting = [] if content is None else self._duplicates.pop(content)
        for arrival, source in waiting:
            self.offer_image(arrival, source)

    # -- the same bytes again --

    @property
    def _config_sha256(self) -> str:
        return self._inspector.agent.config.catalog.sha256

    def _is_first(self, arrival: Arrival, source: Source, sha256: str, config_sha256: str) -> bool:
        """True: judge this image. False: it waits for the verdict of an equal one."""
        about = arrival.subject
        content = (sha256, config_sha256, about.source, about.board, about.board_type, about.component, about.ref)
        with self._guard:
            if content in self._duplicates:
                self._duplicates[content].append((arrival, source))
                return False
            self._firsts[about.key] = content
            self._duplicates[content] = []
            return True

    def _first_of(self, subject: Subject, sha256: str, config_sha256: str) -> Result | None:
        try:
            row = self._results.first_judged(subject, sha256, config_sha256)
        except (sqlite3.Error, OSError) as error:
            log.error("duplicates_not_looked_up reason=%s: judged again", error)
            return None
        return None if row is None else row.result
