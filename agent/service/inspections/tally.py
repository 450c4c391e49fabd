"""Counts of a line for its metrics, since the start: boards, orders, seconds to a verdict.

Guarantees: counted verdicts are on the disk. Times are wall-clock seconds from arrival, also in an earlier run, until
the verdict is stored; 0 if the clock was set back.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from agent.doors.http.metrics.readings import Distribution
from agent.faults.errors import OrderRefused, Reason
from agent.records.verdict import Result
from agent.service.inspections.line_boards import wall_clock
from agent.subject import CALLER_PREFIX, CAMERA_PREFIX
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime

    from agent.records.boards import BoardVerdict
    from agent.records.result_writer import Recorded

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, math.inf)
FOLDER = "folder"
SOURCES = {CAMERA_PREFIX: "camera", CALLER_PREFIX: "api"}  # by prefix of the key; folders have other keys
ON_THE_WIRE = (
    Reason.MESSAGE_TOO_LARGE,
    Reason.UNAUTHENTICATED,
    Reason.FORBIDDEN,
)  # refused before they become orders


class Durations:
    """Histogram of seconds; not thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS_S)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def distribution(self) -> Distribution:
        return Distribution(dict(zip(BOUNDS_S, accumulate(self._counts), strict=True)), self._sum_s)


@dataclass(frozen=True, slots=True)
class TallyStatistics:
    """``verdicts``, ``boards``: stored; ``seconds``: arrival to stored verdict, by kind of source; ``accepted``,
    ``refused``: callers' orders."""

    verdicts: Mapping[Verdict, int]
    boards: Mapping[Verdict, int]
    seconds: Mapping[str, Distribution]
    accepted: int
    refused: Mapping[Reason, int]


class Tally:
    """Counts of a line. For any thread. ``wall``: clock of results."""

    def __init__(self, wall: Callable[[], datetime] = wall_clock) -> None:
        self._wall = wall
        self.verdicts = dict.fromkeys(Verdict, 0)  # of results; written on the store's thread only
        self._lock = threading.Lock()  # guards all fields below
        self._boards: Counter[Verdict] = Counter()
        self._orders: Counter[Reason | None] = Counter()  # None: accepted
        self._seconds = {source: Durations() for source in (FOLDER, *SOURCES.values())}

    def stored(self, stored: Result | BoardVerdict, _: Recorded) -> None:
        if isinstance(stored, Result):
            self.verdicts[stored.verdict] += 1
            seconds = max((self._wall() - stored.subject.arrived_at).total_seconds(), 0.0)
            key = stored.subject.key
            source = next((name for start, name in SOURCES.items() if key.startswith(start)), FOLDER)
            with self._lock:
                self._seconds[source].add(seconds)
        else:
            with self._lock:
                self._boards[stored.verdict] += 1

    @contextmanager
    def ordering(self) -> Iterator[None]:
        """Count an order as accepted or refused."""
        try:
            yield
        except OrderRefused as refused:
            self._count_order(refused.reason)
            raise
        self._count_order(None)

    def statistics(self) -> TallyStatistics:
        with self._lock:
            seconds = {source: durations.distribution() for source, durations in self._seconds.items()}
            refused = {reason: self._orders[reason] for reason in Reason if reason not in ON_THE_WIRE}
            boards = {each: self._boards[each] for each in Verdict}
            return TallyStatistics(dict(self.verdicts), boards, seconds, self._orders[None], refused)

    def _count_order(self, refused: Reason | None) -> None:
        with self._lock:
            self._orders[refused] += 1
