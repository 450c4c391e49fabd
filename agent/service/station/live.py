"""Latest results and boards of a line, and totals of its shift.

Guarantees: what is shown is on the disk. The disk is read only after something was stored since the last look. While it
cannot be read, what was read last is shown, with the failure.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from agent.records.station.pages import ResultQuery, RunningTotals, StationReader, Totals
from agent.records.station.reviews import Finding
from agent.records.verdict import Result
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from agent.records.boards import BoardVerdict
    from agent.records.result_reader import ResultReader
    from agent.records.result_writer import Recorded
    from agent.records.station.pages import ListedResult
    from agent.records.station.reviews import ReviewReader

BOARDS = 24
CASES = ResultQuery(verdicts=(Verdict.NG, Verdict.UNKNOWN), limit=12)
IMAGES = 1000  # whose waits are summed up


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """``cases``, ``boards``: newest first. ``takts_s``: median of the last boards of each
    type that this run of the agent closed, the newest type last. ``failure``: why they are old."""

    totals: Totals = field(default_factory=lambda: Totals({}, {}, ()))
    findings: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Finding), 0))
    cases: tuple[ListedResult, ...] = ()
    boards: tuple[BoardVerdict, ...] = ()
    takts_s: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


class Live:
    """``figures`` for one thread at a time, all else for any. ``clock``: monotonic seconds."""

    def __init__(self, reader: ResultReader, reviews: ReviewReader, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._pages = StationReader(reader.path)
        self._totals = RunningTotals(reader.path)
        self._reviews = reviews
        self._clock = clock
        self._known: tuple[tuple[datetime, int] | None, LiveFigures] = (None, LiveFigures())
        self._lock = threading.Lock()  # guards all fields below
        self._changes = 0
        self._waits_s: deque[float] = deque(maxlen=IMAGES)
        self._last_s: float | None = None
        self._takts_s: dict[str, deque[float]] = {}  # by board type

    def stored(self, stored: Result | BoardVerdict, _: Recorded) -> None:
        with self._lock:
            self._changes += 1
            if isinstance(stored, Result):
                self._waits_s.append(stored.seconds)
                self._last_s = self._clock()
            elif stored.takt_s is not None:
                takts_s = self._takts_s.pop(stored.board_type, deque(maxlen=BOARDS))
                self._takts_s[stored.board_type] = takts_s
                takts_s.append(stored.takt_s)

    def reviewed(self) -> None:
        """A review was made or undone."""
        with self._lock:
            self._changes += 1

    @property
    def last_age_s(self) -> float | None:
        """Seconds since the last result of this run; None before it."""
        with self._lock:
            return None if self._last_s is None else self._clock() - self._last_s

    def waits_s(self) -> list[float]:
        """Seconds from arrival to verdict of the latest images, the shortest first."""
        with self._lock:
            return sorted(self._waits_s)

    def figures(self, since: datetime) -> LiveFigures:
        """Figures of the shift that began at ``since``."""
        with self._lock:
            about = (since, self._changes)
        known, figures = self._known
        if known != about or figures.failure is not None:
            try:
                self._known = about, self._read(since)
            except (sqlite3.Error, OSError) as error:
                self._known = about, replace(figures, failure=str(error))
        return self._known[1]

    def _read(self, since: datetime) -> LiveFigures:
        boards = self._reader.boards(limit=BOARDS)[::-1]
        by_expert = self._reviews.counts(since).values()
        with self._lock:
            takts_s = {board_type: median(each) for board_type, each in self._takts_s.items()}
        return LiveFigures(
            self._totals.since(since),
            {str(finding): sum(each.findings[finding] for each in by_expert) for finding in Finding},
            self._pages.page(CASES),
            boards,
            takts_s,
        )
