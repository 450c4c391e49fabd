"""Rates of counters over a span of time, by looks at them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class RecentRates:
    """For one thread. Nothing is known before a second look within the span; after a pause it begins anew."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._looks: deque[tuple[float, Mapping[str, float]]] = deque()

    def per_s(self, counts: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Growth of each counter, per second. A counter that was reset counts as 0."""
        looks = self._looks
        if looks and now_s - looks[-1][0] > self._span_s:
            looks.clear()
        looks.append((now_s, counts))
        while len(looks) > 2 and now_s - looks[1][0] >= self._span_s:
            looks.popleft()
        since_s, before = looks[0]
        seconds = now_s - since_s
        if seconds <= 0:
            return dict.fromkeys(counts, 0.0)
        return {name: max(count - before.get(name, count), 0.0) / seconds for name, count in counts.items()}
