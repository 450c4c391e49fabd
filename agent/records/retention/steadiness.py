"""Whether the wall clock can be trusted: it has run as the monotonic clock does for an hour."""

from __future__ import annotations

from dataclasses import dataclass

STEADY_S = 3600.0
STEADY_WITHIN_S = 60.0  # what clocks differ by when one of them is corrected little by little


@dataclass(slots=True)
class Steadiness:
    """Since when, in monotonic seconds, the wall clock has kept its offset from the monotonic one."""

    offset_s: float
    since_s: float

    def look(self, wall_s: float, now_s: float) -> bool:
        """Compare both clocks; whether they have agreed for STEADY_S."""
        if abs(wall_s - now_s - self.offset_s) > STEADY_WITHIN_S:
            self.offset_s, self.since_s = wall_s - now_s, now_s
        return now_s - self.since_s >= STEADY_S
