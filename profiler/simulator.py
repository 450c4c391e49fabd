"""The same Engine under virtual time: loads and batches take what the profile says, and nothing else happens.

Guarantees: no clock, thread or file; the same trace gives the same effects. Each source of loads is one link that
serves one load after another, so loads that overlap share its bandwidth and none is served for free.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from agent.core.effects import Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.events import Arrived, Finished, Loaded, Started, Tick
from experts.expert import Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.core.effects import Effect
    from agent.core.engine import Engine
    from agent.core.events import Event
    from agent.core.performance import DeviceProfile, ExecutorSpec
    from agent.core.request import Outcome


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line of a trace. ``at_s``: seconds since its start."""

    at_s: float
    component: str | None = None
    expert: str | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened: the virtual seconds it took, every effect with its time, every outcome by request number."""

    seconds: float
    effects: tuple[tuple[float, Effect], ...]
    outcomes: dict[int, Outcome]


def always_passes(request: int, expert: str) -> Prediction:
    """A prediction for simulations that are about time only; it passes any route whose steps pass ``ok``."""
    return Prediction("ok", 1.0)


@dataclass(slots=True)
class Simulator:
    """Runs one Engine once. ``predict(request, expert)`` says what an expert would have seen."""

    engine: Engine
    profile: DeviceProfile
    executors: Sequence[ExecutorSpec]
    predict: Callable[[int, str], Prediction] = always_passes
    check_every_step: bool = False
    _agenda: list[tuple[float, int, Event]] = field(default_factory=list)
    _ticket: count[int] = field(default_factory=count)
    _link_free_s: dict[str, float] = field(default_factory=dict)
    _log: list[tuple[float, Effect]] = field(default_factory=list)
    _outcomes: dict[int, Outcome] = field(default_factory=dict)

    def run(self, trace: Sequence[Arrival], *, warm_s: float | None = None) -> Simulation:
        """Play a trace to its end. ``warm_s``: how long experts may be placed before it starts; None = until done."""
        self._post(0.0, Started())
        start_s = self._play(until_s=warm_s)
        for number, arrival in enumerate(trace):
            self._post(start_s + arrival.at_s, Arrived(number, arrival.component, arrival.expert))
        end_s = self._play(until_s=None)
        return Simulation(end_s - start_s, tuple(self._log), dict(self._outcomes))

    def _play(self, until_s: float | None) -> float:
        now = until_s or 0.0
        while self._agenda and (until_s is None or self._agenda[0][0] <= until_s):
            now, _, event = heapq.heappop(self._agenda)
            for effect in self.engine.handle(event, now):
                self._log.append((now, effect))
                self._carry_out(effect, now)
            if self.check_every_step:
                self.engine.check_invariants()
            wakeup_s = self.engine.next_wakeup_s()
            if wakeup_s is not None and not self._agenda:
                self._post(wakeup_s, Tick())
        return now

    def _post(self, at_s: float, event: Event) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._ticket), event))

    def _carry_out(self, effect: Effect, now: float) -> None:
        if isinstance(effect, StartLoad):
            self._post(self._load_end_s(effect, now), Loaded(effect.load))
        elif isinstance(effect, StartBatch):
            batch = effect.batch
            processor = next(spec.processor for spec in self.executors if spec.id == batch.executor)
            performance = self.profile.experts[processor][batch.expert].performance
            results = tuple(self.predict(request, batch.expert) for request in batch.requests)
            self._post(now + performance.latency_s(len(batch.requests)), Finished(batch.id, results))
        elif isinstance(effect, Complete | Fail):
            self._outcomes[effect.request] = effect.outcome

    def _load_end_s(self, effect: StartLoad, now: float) -> float:
        """A load waits for its link, then takes the profiled time."""
        takes_s = next(
            profile.load_s[effect.source]
            for experts in self.profile.experts.values()
            for profile in experts.values()
            if profile.copy == effect.copy and effect.source in profile.load_s
        )
        end_s = max(now, self._link_free_s.get(effect.source, 0.0)) + takes_s
        self._link_free_s[effect.source] = end_s
        return end_s


def evictions(simulation: Simulation) -> list[Evict]:
    """The evictions of a simulation, in order."""
    return [effect for _, effect in simulation.effects if isinstance(effect, Evict)]
