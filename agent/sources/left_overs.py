"""Offers unfinished images of the journal at a start: accepted by an earlier run and not judged, oldest first.

At most REPLAY_BYTES of images are read and not judged yet.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from typing import TYPE_CHECKING

from agent.sources.base import Arrival, Source
from experts.images import DEFAULT_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.config import LineConfig
    from agent.sources.base import Line
    from agent.subject import Subject
    from experts.expert import Verdict

log = logging.getLogger(__name__)

REPLAY_BYTES = 256 * 1024 * 1024
REREAD_S = 0.5  # between two tries after a disk error


def left_over_sources(config: LineConfig, line: Line) -> Sequence[Source]:
    del config
    return [LeftOvers(line)]


class LeftOvers(Source):
    def __init__(self, line: Line) -> None:
        super().__init__("journal")
        self._line = line
        self._changed = threading.Condition()  # guards the sizes
        self._sizes: dict[str, int] = {}  # by key: bytes of unjudged images
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        if self._line.left_overs:
            self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def verdict_committed(self, subject: Subject, verdict: Verdict, reason: str | None) -> None:
        with self._changed:
            self._sizes.pop(subject.key, None)
            self._changed.notify_all()

    def _run(self) -> None:
        max_pixels = {camera.name: camera.max_pixels for camera in self._line.config.intake.cameras}
        for left in self._line.left_overs:
            with self._changed:
                self._changed.wait_for(lambda: sum(self._sizes.values()) < REPLAY_BYTES or self._stopping.is_set())
            content = self._content(left.number)
            if content is None:
                continue
            first = left.pieces[0]
            with self._changed:
                self._sizes[first.key] = len(content)
            limit = max_pixels.get(first.source, DEFAULT_MAX_PIXELS)
            self._line.offer_image(Arrival(first, content, limit, left.pieces), self)

    def _content(self, number: int) -> bytes | None:
        """Read the image, with retries; None if the journal has lost it, or at a stop."""
        is_logged = False
        while not self._stopping.is_set():
            try:
                return self._line.journaled_image(number)
            except (sqlite3.Error, OSError) as error:
                if not is_logged:
                    log.error("journal_not_read image=%d reason=%s: tried again until it is", number, error)
                is_logged = True
                self._stopping.wait(REREAD_S)
        return None
