"""The line as its sources see it (``agent.sources.base.Line``): images come in, verdicts go back to their source."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agent.runtime.images.sources import EncodedImage
from agent.subject import pieces
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from agent.config import LineConfig
    from agent.service.inspections.filed import FiledImages
    from agent.service.inspections.inspector import Inspector
    from agent.service.inspections.journaled import JournaledImages, StoredVerdict
    from agent.sources.base import Arrival, LeftOver, Source
    from agent.subject import Subject


log = logging.getLogger(__name__)


class SourceLine:
    """``sources``: of this line; ``limit``: files that folders hold together."""

    def __init__(self, inspector: Inspector, filed: FiledImages, journaled: JournaledImages, limit: int) -> None:
        self._inspector = inspector
        self._filed = filed
        self._journaled = journaled
        self.sources: Sequence[Source] = ()
        self._limit = limit

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
        return self._filed.expects(subject, source)

    def offer_image(self, arrival: Arrival, source: Source) -> None:
        subject = arrival.subject
        if source.keeps_images:
            self._filed.offer_image(arrival, source)
            return
        layout = self.config.layouts.get(subject.board_type or "")
        image = EncodedImage(arrival.image, subject.image, arrival.max_pixels)
        if arrival.pieces:
            size = None if layout is None else layout.size
            self._journaled.resume(_Told(source, subject, len(arrival.pieces)), arrival.pieces, image, size)
        elif subject.shows_board and layout is None:
            missing = f"the line file has no layout of board type {subject.board_type!r} any more - put it back"
            self._filed.refuse_subject(subject, f"{source.name}: its frame was not taken: {missing}", source)
        else:
            parts = pieces(subject, layout if subject.shows_board else None)
            size = layout.size if layout is not None and subject.shows_board else None
            self._journaled.accept(_Told(source, subject, len(parts)), parts, image, size)

    def refuse_subject(self, subject: Subject, reason: str, source: Source) -> None:
        self._filed.refuse_subject(subject, reason, source)

    def reading(self, subject: Subject) -> AbstractContextManager[object]:
        return self._inspector.counted(subject.key)

    def reserve_key(self, key: str, asked_sha256: str) -> bool:
        return self._journaled.reserve_key(key, asked_sha256)

    def release_key(self, key: str) -> None:
        self._journaled.release_key(key)

    def journaled_image(self, number: int) -> bytes | None:
        return self._journaled.image_bytes(number)


class _Told:
    """Keeps ``Sender`` for one image of a source."""

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
        """Happens only if the results file was replaced after the key was looked up."""
        reason = f"the key {key!r} was given for something else"
        log.error("image_refused source=%s reason=%s", self._source.name, reason)
        self._source.image_accepted(self._subject)
        self._source.verdict_committed(self._subject, Verdict.UNKNOWN, reason)


def shares_room(own: int, held: Sequence[int], limit: int) -> bool:
    """True if a folder that holds ``own`` files may take one more; ``held``: what each folder holds, this one too.

    Half of the limit is kept for the folders, the same for each and at least one; the other half is shared. A
    folder alone may hold all but what is kept for the others. More than ``limit`` are held only by more folders.
    """
    kept = max(limit // (2 * len(held)), 1)
    common = limit - kept * len(held)
    return own < kept or sum(max(count - kept, 0) for count in held) < common
