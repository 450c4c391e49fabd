"""A Decider that times another one, call by call."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core import events
from agent.core.effects import Evict, StartLoad

if TYPE_CHECKING:
    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.state import EngineStatistics
    from agent.runtime.loop import Decider


@dataclass(frozen=True, slots=True)
class Decision:
    """Call of the Engine. ``cpu_s``: of the deciding thread; in the rest of ``seconds`` other threads had the core."""

    event: type
    moves_experts: bool  # it started a load, or evicted
    seconds: float
    cpu_s: float

    @property
    def is_expert_management(self) -> bool:
        """True where the time counts for moving experts (CoServe, section 4.3), not for scheduling requests (4.2)."""
        return self.moves_experts or self.event in (events.Loaded, events.LoadFailed, events.Quarantined)


class TimedDecider:
    """A Decider that times another one. ``decisions`` grows on the loop's thread."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self.decisions: list[Decision] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        started, cpu_started = time.perf_counter(), time.thread_time()
        effects = self._decider.handle(event, now)
        cpu_s, seconds = time.thread_time() - cpu_started, time.perf_counter() - started
        moves = any(isinstance(effect, StartLoad | Evict) for effect in effects)
        self.decisions.append(Decision(type(event), moves, seconds, cpu_s))
        return effects

    def next_wakeup_s(self) -> float | None:
        return self._decider.next_wakeup_s()

    def statistics(self) -> EngineStatistics:
        return self._decider.statistics()

    def check_invariants(self) -> None:
        self._decider.check_invariants()
