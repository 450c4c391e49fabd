"""Images of one folder whose bytes came before for the same part: told apart from new ones, and judged once.

Guarantees: only a stored OK or NG under the served line file has duplicates; after UNKNOWN, or a failed look-up, an
image is judged again. Of simultaneous ones the first is judged, the others wait for its verdict.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

    from agent.intake.arrivals import ClaimedImage
    from agent.records.result_reader import ResultReader
    from agent.records.results import Result
    from agent.subject import Subject

    Content: TypeAlias = tuple[str | None, ...]  # digests of the bytes and the line file, and the part of the board

log = logging.getLogger(__name__)


class Duplicates:
    """Of one folder. For any thread."""

    def __init__(self, results: ResultReader) -> None:
        self._results = results
        self._guard = threading.Lock()
        self._judged: dict[str, Content] = {}  # by key: what is being judged
        self._waiting: dict[Content, list[ClaimedImage]] = {}  # by what is being judged: images that wait for it

    def first_of(self, subject: Subject, image_sha256: str, config_sha256: str) -> Result | None:
        try:
            row = self._results.first_judged(subject, image_sha256, config_sha256)
        except (sqlite3.Error, OSError) as error:
            log.error("duplicates_not_looked_up reason=%s: judged again", error)
            return None
        return None if row is None else row.result

    def is_first(self, image: ClaimedImage, image_sha256: str, config_sha256: str) -> bool:
        """True: judge this image. False: it waits, and ``end`` returns it."""
        subject = image.subject
        content = (
            image_sha256, config_sha256, subject.board, subject.board_type, subject.component, subject.ref,
        )  # fmt: skip
        with self._guard:
            waiting = self._waiting.get(content)
            if waiting is not None:
                waiting.append(image)
                return False
            self._judged[subject.key] = content
            self._waiting[content] = []
            return True

    def end(self, key: str) -> list[ClaimedImage]:
        """Images that waited for this key's verdict, which is stored now."""
        with self._guard:
            content = self._judged.pop(key, None)
            return [] if content is None else self._waiting.pop(content)
