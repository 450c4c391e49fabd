"""Histograms of seconds, for the line's metrics."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

from agent.web.readings import Distribution

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, math.inf)


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
