"""Images of one folder whose bytes came before for the same part: told apart from new ones, and judged once.

Guarantees: only a stored OK or NG under the served line file has duplicates; after UNKNOWN, or a failed look-up, an
image is judged again. Of simultaneous ones the first is judged, the others wait for its verdict.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
from typing import TYPE_CHECKING

from agent.records.results import Content

if TYPE_CHECKING:
    from agent.intake.arrivals import Arrival
    from agent.records.result_reader import ResultReader
    from agent.records.results import Result

log = logging.getLogger(__name__)


def content_of(arrival: Arrival, image: bytes, config_sha256: str) -> Content:
    return Content(
        sha256=hashlib.sha256(image).hexdigest(),
        source=f"{arrival.key.partition('/')[0]}/",
        board=arrival.board,
        board_type=arrival.board_type,
        component=arrival.component or "",
        ref=arrival.ref or "",
        config_sha256=config_sha256,
    )


class Duplicates:
    """Of one folder. For any thread."""

    def __init__(self, results: ResultReader) -> None:
        self._results = results
        self._guard = threading.Lock()
        self._judged: dict[str, Content] = {}  # key -> what is being judged under it
        self._waiting: dict[Content, list[Arrival]] = {}  # of everything in _judged, who waits for it

    def first_of(self, content: Content) -> Result | None:
        try:
            row = self._results.first_judged(content)
        except (sqlite3.Error, OSError) as error:
            log.error("duplicates_not_looked_up reason=%s: judged again", error)
            return None
        return None if row is None else row.result

    def begin(self, arrival: Arrival, content: Content) -> bool:
        """Whether to judge this image; else it waits, and comes back by ``end``."""
        with self._guard:
            waiting = self._waiting.get(content)
            if waiting is not None:
                waiting.append(arrival)
                return False
            self._judged[arrival.key] = content
            self._waiting[content] = []
            return True

    def end(self, key: str) -> list[Arrival]:
        """Arrivals that waited for this key's verdict, which is stored now."""
        with self._guard:
            content = self._judged.pop(key, None)
            return [] if content is None else self._waiting.pop(content)
