"""Steadiness of the wall clock: trusted once it has agreed with the monotonic clock for an hour."""

from __future__ import annotations

from dataclasses import dataclass

STEADY_S = 3600.0
STEADY_WITHIN_S = 60.0  # a clock that is slewed differs that much


@dataclass(slots=True)
class Steadiness:
    """``since_s``: monotonic time since which the wall clock has kept ``offset_s``."""

    offset_s: float
    since_s: float

    def look(self, wall_s: float, now_s: float) -> bool:
        """Compare both clocks; True once they have agreed for STEADY_S."""
        if abs(wall_s - now_s - self.offset_s) > STEADY_WITHIN_S:
            self.offset_s, self.since_s = wall_s - now_s, now_s
        return now_s - self.since_s >= STEADY_S
