"""What an Engine tells of itself at one moment: queues, memories, counters. Frozen records, made by the Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.ahead import NOTHING_PREPARED
from agent.core.background import NO_BACKGROUND

if TYPE_CHECKING:
    from agent.core.ahead import PreparedStatistics
    from agent.core.background import BackgroundStatistics
    from agent.core.pool import PoolStatistics


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    executor: int
    processor: str
    requests: int
    length_s: float
    running: int
    expert: str | None = None  # of the batch that runs


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A frozen snapshot: queues, memories, counters since the start; experts that are not asked, with the reason."""

    arrived: int
    completed: int
    failed: int
    in_flight: int
    switches: int
    batches: int
    loads: dict[str, int]
    bytes_read: int
    evictions: int
    unexpected_events: int
    is_draining: bool
    quarantined: dict[str, str]
    on_probation: dict[str, str]
    queues: tuple[QueueStatistics, ...]
    pools: tuple[PoolStatistics, ...]
    background: BackgroundStatistics = NO_BACKGROUND
    prepared: PreparedStatistics = NOTHING_PREPARED
    serves_earlier_lines: bool = False  # something was accepted under other routes than those of now, and is not done
