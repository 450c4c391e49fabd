"""Shifts of a station, by local time. Pure.

Guarantees: a shift begins when clocks show its time, also on days when they are changed: a time that a day skips begins
with the clock behind the gap, a time that comes twice begins the first time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import tzinfo


@dataclass(frozen=True, slots=True)
class Shifts:
    """``begins``: local times at which a shift begins, one at least. ``zone``: None for that of the box."""

    begins: tuple[time, ...]
    zone: tzinfo | None = None

    def began_at(self, now: datetime) -> datetime:
        """Beginning of the shift that ``now`` is in, in UTC."""
        today = now.astimezone(self.zone).date()
        days = (today + timedelta(days=off) for off in (-2, -1, 0))
        moments = (datetime.combine(day, begin, self.zone).astimezone(UTC) for day in days for begin in self.begins)
        return max(moment for moment in moments if moment <= now)
