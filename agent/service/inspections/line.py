"""The line for its sources (``agent.sources.base.Line``): accepts images, returns verdicts to their source.

An image kept by its source is judged here, part by part; all others go to the journal.
Guarantees: each part has its row: after a crash only parts without a row are judged. The source gets the worst part,
once all are stored. The first stored part fixes the parts of an image. With ``skips_duplicates`` only an
OK or NG under the served line file and weights counts as original; of simultaneous duplicates the first is judged.
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
from agent.service.inspections.courses import UNJUDGED, Course
from agent.service.inspections.inspector import Submission
from agent.service.inspections.journaled import source_of
from agent.service.inspections.rows import duplicate_result, judged_result, unknown
from agent.subject import ctime_in, image_key, part_key, pieces, seen_key
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.records.result_reader import ResultReader
    from agent.records.result_writer import Recorded
    from agent.records.verdict import Result
    from agent.service.inspections.inspector import Inspector
    from agent.service.inspections.journaled import JournaledImages, StoredVerdict
    from agent.service.inspections.verdicts import Verdicts
    from agent.sources.base import Arrival, LeftOver, Source
    from agent.subject import Subject

    Content: TypeAlias = tuple[str | None, ...]  # digests of bytes and line file, and the part

log = logging.getLogger(__name__)

NO_LAYOUT = "the line file has no layout any more of its board's type - put it back, then the image, or a copy of it"


@dataclass(slots=True, eq=False)
class _Image:
    """Image kept by its source. ``parts``: without a verdict, by key; ``size``: (height, width) of a frame to
    cut; ``sha256``: of its bytes; ``content``: key shared with its duplicates."""

    subject: Subject
    source: Source
    parts: Mapping[str, Subject]
    size: tuple[int, int] | None = None
    verdicts: dict[str, tuple[Verdict, str | None]] = field(default_factory=dict)  # committed, by the part's key
    sha256: str | None = None
    content: Content | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the verdicts

    @property
    def is_stored(self) -> bool:
        return bool(self.verdicts) and self.parts.keys() <= self.verdicts.keys()

    def worst(self) -> tuple[Verdict, str | None]:
        """Verdict for the source, with the reason of an UNKNOWN."""
        verdict = max((verdict for verdict, _ in self.verdicts.values()), key=SEVERITY.__getitem__)
        reasons = {key: reason for key, (each, reason) in self.verdicts.items() if each is verdict}
        key, reason = next(iter(reasons.items()))
        if key == self.subject.key or verdict is not Verdict.UNKNOWN:
            return verdict, reason if key == self.subject.key else None
        ref = key.removeprefix(part_key(self.subject.key, ""))
        return verdict, f"{len(reasons)} of {len(self.verdicts)} parts are UNKNOWN; {ref}: {reason}"


class SourceLine:
    """``sources`` of this line; ``limit``: files that all folders hold together. For any thread."""

    def __init__(
        self, inspector: Inspector, verdicts: Verdicts, journaled: JournaledImages, results: ResultReader, limit: int
    ) -> None:
        self._inspector = inspector
        self._verdicts = verdicts
        self._journaled = journaled
        self._results = results
        self._limit = limit
        self.sources: Sequence[Source] = ()
        self._guard = threading.Lock()  # guards the duplicates
        self._duplicates: dict[Content, list[tuple[Arrival, Source]]] = {}  # duplicates that wait for the first image

    # -- the contract --

    @property
    def config(self) -> LineConfig:
        return self._inspector.agent.config

    @property
    def left_overs(self) -> Sequence[LeftOver]:
        return self._journaled.left_overs

    def has_room(self, source: Source) -> bool:
        if not self._inspector.takes:
            return False
        if not source.keeps_images:
            return True
        return shares_room(source.held, [each.held for each in self.sources if each.keeps_images], self._limit)

    def expects(self, subject: Subject, source: Source) -> bool:
        image = self._image(subject, source)
        if not image.is_stored and image.parts:
            reason = self._inspector.reason_to_spare((subject.key, *image.parts))
            if reason is None:
                return True
            self._commit_unknown(image, f"{subject.name}: {reason}")
        else:
            self._report_image(image)
        return False

    def offer_image(self, arrival: Arrival, source: Source) -> None:
        subject = arrival.subject
        if not source.keeps_images:
            self._journal(arrival, source)
            return
        is_in_place = ctime_in(subject.key) is not None
        sha256 = hashlib.sha256(arrival.image).hexdigest()
        image = _Image(subject, source, {subject.key: subject})
        if subject.shows_board or is_in_place:  # rows unreadable at arrival, a layout removed, or bytes known here
            image = self._image(subject, source, sha256)
            if image.is_stored or not image.parts:
                self._report_image(image)
                return
        image.sha256 = sha256
        if source.skips_duplicates:
            part = (subject.source, subject.board, subject.board_type, subject.component, subject.ref)
            image.content = (sha256, self.config.catalog.sha256, *part)
            if not self._is_first(image.content, arrival, source):
                return
            if (first := self._first_of(subject, image.content)) is not None:
                key = first.subject.key
                log.info("image_duplicate file=%s verdict=%s of=%s: not judged again", subject.name, first.verdict, key)
                self._commit_part(image, subject, duplicate_result(self.config, subject, first))
                return
        whole = EncodedImage(arrival.image, subject.name, arrival.max_pixels)
        frame = Frame(whole, image.size)
        for each in image.parts.values():
            ended = partial(self._part_judged, image, each)
            self._inspector.submit_subject(Submission(each, source_of(each, whole, frame), ended))

    def refuse_subject(self, subject: Subject, reason: str, source: Source) -> None:
        image = self._image(subject, source, refused=reason)
        if image.is_stored:
            self._report_image(image)
        elif image.parts:
            self._commit_unknown(image, reason)
        else:
            self._commit_unknown(_Image(subject, source, {subject.key: replace(subject, board_type=None)}), reason)

    def reading(self, subject: Subject) -> AbstractContextManager[object]:
        return self._inspector.counted(subject.key)

    def reserve_key(self, key: str, asked_sha256: str) -> bool:
        return self._journaled.reserve_key(key, asked_sha256)

    def release_key(self, key: str) -> None:
        self._journaled.release_key(key)

    def journaled_image(self, number: int) -> bytes | None:
        return self._journaled.image_bytes(number)

    # -- images that the journal keeps --

    def _journal(self, arrival: Arrival, source: Source) -> None:
        subject = arrival.subject
        layout = self.config.layouts.get(subject.board_type or "")
        image = EncodedImage(arrival.image, subject.image, arrival.max_pixels)
        if arrival.pieces:
            size = None if layout is None else layout.size
            self._journaled.resume(_SourceSender(source, subject, len(arrival.pieces)), arrival.pieces, image, size)
        elif not subject.shows_board:
            self._journaled.accept(_SourceSender(source, subject, 1), (subject,), image)
        elif layout is None:
            missing = f"the line file has no layout of board type {subject.board_type!r} any more - put it back"
            self.refuse_subject(subject, f"{source.name}: its frame was not taken: {missing}", source)
        else:
            parts = pieces(subject, layout)
            self._journaled.accept(_SourceSender(source, subject, len(parts)), parts, image, layout.size)

    # -- images that their source keeps --

    def _image(self, subject: Subject, source: Source, sha256: str | None = None, refused: str | None = None) -> _Image:
        """State of an image by its stored rows. Parts with unreadable rows are judged again; those rows stay.

        A file judged in its place has those of its ctime, else the latest rows of that place if they are of the same
        bytes (``sha256``), or if a file that stays is ``refused`` for the same reason. Rows of earlier versions count
        if the file has not changed since its arrival.
        """
        image = self._image_as(subject, source, subject.key)
        ctime_ns = ctime_in(subject.key)
        if image.verdicts or ctime_ns is None or (latest := self._latest_in_place(subject.key)) is None:
            return image
        key = image_key(latest.subject.key)
        is_older = key == seen_key(key) and ctime_ns <= latest.subject.arrived_at.timestamp() * 1e9
        is_equal = sha256 is not None and latest.image_sha256 == sha256
        if is_older or is_equal or (refused is not None and source.leaves_images and latest.reason == refused):
            return self._image_as(subject, source, key)
        return image

    def _image_as(self, subject: Subject, source: Source, key: str) -> _Image:
        """State of an image by the rows stored under ``key``."""
        known = self._stored(key)
        if known is not None:
            if known.verdict is Verdict.UNKNOWN:
                log.info(
                    "image_known file=%s: this very file was UNKNOWN before; a copy of it, or a touch, has it judged"
                    " again", subject.image,
                )  # fmt: skip
            return _Image(subject, source, {}, None, {subject.key: (known.verdict, known.reason)})
        if not subject.shows_board:
            return _Image(subject, source, {subject.key: subject})
        layout = self.config.layouts.get(str(subject.board_type))
        stored = self._stored_parts(key)
        keys = [subject.key + row.subject.key.removeprefix(key) for row in stored]
        verdicts = {key: (row.verdict, row.reason) for key, row in zip(keys, stored, strict=True)}
        if stored and len(stored) >= (stored[-1].parts or 0):
            return _Image(subject, source, {}, None, verdicts)
        if layout is None:
            return _Image(subject, source, {})
        parts = {part.key: part for part in pieces(subject, layout) if part.key not in verdicts}
        return _Image(subject, source, parts, layout.size, verdicts)

    def _stored(self, key: str) -> Result | None:
        try:
            return self._results.find(key)
        except (sqlite3.Error, OSError) as error:  # the file may have been moved: the store creates a new one
            log.error("results_not_read key=%s reason=%s: judged again", key, error)
            return None

    def _latest_in_place(self, key: str) -> Result | None:
        try:
            return self._results.latest_in_place(seen_key(key))
        except (sqlite3.Error, OSError) as error:
            log.error("results_not_read key=%s reason=%s: judged again", key, error)
            return None

    def _stored_parts(self, key: str) -> list[Result]:
        try:
            return self._results.of_keys(part_key(key, ""))
        except (sqlite3.Error, OSError) as error:
            log.error("results_not_read key=%s reason=%s: judged again", key, error)
            return []

    def _is_first(self, content: Content, arrival: Arrival, source: Source) -> bool:
        """True: judge this image. False: wait for the verdict of an equal image."""
        with self._guard:
            if content in self._duplicates:
                self._duplicates[content].append((arrival, source))
                return False
            self._duplicates[content] = []
            return True

    def _first_of(self, subject: Subject, content: Content) -> Result | None:
        """The latest equal image, if weights that serve now judged it."""
        try:
            first = self._results.last_judged(subject, str(content[0]), str(content[1]))
        except (sqlite3.Error, OSError) as error:
            log.error("duplicates_not_looked_up reason=%s: judged again", error)
            return None
        steps = () if first is None else first.steps
        is_served = all(self._inspector.weights_of(step.expert) == step.model_sha256 for step in steps)
        return first if steps and is_served else None

    def _part_judged(self, image: _Image, part: Subject, outcome: Outcome, course: Course) -> None:
        """Runs on the agent's thread."""
        parts = None if part.box is None else len(image.parts.keys() | image.verdicts.keys())
        self._commit_part(image, part, judged_result(self.config, part, outcome, course, image.sha256, parts))

    def _commit_unknown(self, image: _Image, reason: str) -> None:
        for part in image.parts.values():
            self._part_judged(image, part, unknown(reason), UNJUDGED)

    def _commit_part(self, image: _Image, part: Subject, result: Result) -> None:
        self._verdicts.commit_result(result, partial(self._part_committed, image, part, result))

    # -- on the store's thread --

    def _part_committed(self, image: _Image, part: Subject, result: Result, recorded: Recorded) -> None:
        self._inspector.forget_attempts(part.key)
        if not recorded.is_new:  # a row that was unreadable at arrival: the stored verdict counts
            result = self._stored(part.key) or result
        with image.lock:
            image.verdicts[part.key] = (result.verdict, result.reason)
            is_last = image.is_stored
        if is_last:
            self._report_image(image)

    def _report_image(self, image: _Image) -> None:
        """Report to the source; without any verdict the board has no layout, and the image gets one row."""
        if not image.verdicts:
            self._commit_unknown(replace(image, parts={image.subject.key: image.subject}), NO_LAYOUT)
            return
        self._inspector.forget_attempts(image.subject.key)
        image.source.verdict_committed(image.subject, *image.worst())
        with self._guard:
            waiting = [] if image.content is None else self._duplicates.pop(image.content, [])
        for arrival, source in waiting:
            self.offer_image(arrival, source)


class _SourceSender:
    """Implements ``Sender`` for one image of a source."""

    def __init__(self, source: Source, subject: Subject, parts: int) -> None:
        self._source = source
        self._subject = subject
        self._left = parts

    def accepted(self) -> None:
        self._source.image_accepted(self._subject)

    def judged(self, verdict: StoredVerdict) -> None:
        self._left -= 1
        if not self._left:
            self._source.verdict_committed(self._subject, verdict.result.verdict, verdict.result.reason)

    def refused(self, key: str) -> None:
        """Called only if the results file was replaced after the lookup of the key."""
        reason = f"the key {key!r} was given for something else"
        log.error("image_refused source=%s reason=%s", self._source.name, reason)
        self._source.image_accepted(self._subject)
        self._source.verdict_committed(self._subject, Verdict.UNKNOWN, reason)


def shares_room(own: int, held: Sequence[int], limit: int) -> bool:
    """True if a folder that holds ``own`` files may take one more; ``held``: files of each folder, including this one.

    Half of the limit is reserved in equal parts, at least one file per folder; the other half is shared. A
    single busy folder may hold all but the others' reserve. More folders than ``limit`` exceed it.
    """
    kept = max(limit // (2 * len(held)), 1)
    common = limit - kept * len(held)
    return own < kept or sum(max(count - kept, 0) for count in held) < common
