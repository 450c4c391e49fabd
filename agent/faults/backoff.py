"""Backoff: pauses between retries that double. Pure: callers count failures and keep time."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DOUBLINGS = 64  # no float overflows, and any pause has reached its maximum


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses from ``first_s`` to ``longest_s`` seconds."""

    first_s: float
    longest_s: float

    def pause_s(self, failures: int) -> float:
        """Pause before the next try, after so many failures in a row; 0 without a failure."""
        if failures < 1:
            return 0.0
        return min(self.first_s * 2.0 ** min(failures - 1, MOST_DOUBLINGS), self.longest_s)

    def next_pause_s(self, pause_s: float) -> float:
        """Pause after one of ``pause_s`` seconds; after 0: the first pause."""
        return min(2.0 * pause_s or self.first_s, self.longest_s)
