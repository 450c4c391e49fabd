"""A run's decisions, recorded with what each of them waited for, so that they can be played back."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core import events
from agent.core.effects import Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.performance import SSD
from experts.errors import ConfigError
from profiler.replay.timed_decider import DeciderAround

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.request import Batch, Rejected
    from agent.core.statistics import EngineStatistics
    from agent.runtime.loop import Decider
    from experts.expert import Prediction


@dataclass(frozen=True, slots=True)
class CopyPlace:
    pool: str
    copy: str


@dataclass(frozen=True, slots=True)
class Due:
    """A recorded effect and what it waits for.

    ``arrived``: requests that had come when it was decided. ``moves`` and ``uses``: how often each of these places had
    been loaded or evicted, and how often run or copied from, by the effects before it. ``behind``: batches that its
    executor had not answered.
    """

    effect: StartLoad | StartBatch | Evict
    arrived: int
    moves: Mapping[CopyPlace, int]
    uses: Mapping[CopyPlace, int]
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """A run's effects in order, the answers of its batches, and what its Engine counted in the end.

    ``loads_at_once``: the most that were in flight, by source.
    """

    dues: tuple[Due, ...]
    outcomes: Mapping[int, tuple[Complete | Fail, ...]]  # behind the batch that decided them; -n: when n arrived
    results: Mapping[int, tuple[Prediction | Rejected, ...]]
    loads_at_once: Mapping[str, int]
    statistics: EngineStatistics

    @property
    def batches(self) -> tuple[Batch, ...]:
        return tuple(due.effect.batch for due in self.dues if isinstance(due.effect, StartBatch))


class Recorder(DeciderAround):
    """A Decider that keeps what another one decides. ``executors``: id -> name of its memory."""

    def __init__(self, decider: Decider, executors: Mapping[int, str]) -> None:
        super().__init__(decider)
        self._executors = dict(executors)
        self._dues: list[Due] = []
        self._outcomes: defaultdict[int, list[Complete | Fail]] = defaultdict(list)
        self._results: dict[int, tuple[Prediction | Rejected, ...]] = {}
        self._moves: Counter[CopyPlace] = Counter()
        self._uses: Counter[CopyPlace] = Counter()
        self._last_batch: dict[int, int] = {}
        self._executor_of: dict[int, int] = {}  # of batches without an answer
        self._sources: dict[int, str] = {}
        self._in_flight: Counter[str] = Counter()
        self._loads_at_once: Counter[str] = Counter()
        self._arrived = 0
        self._failure: str | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._decider.handle(event, now)
        if isinstance(event, events.Arrived):
            self._arrived += 1
        elif isinstance(event, events.Finished):
            self._results[event.batch] = event.results
            del self._executor_of[event.batch]
        elif isinstance(event, events.Loaded):
            self._in_flight[self._sources.pop(event.load)] -= 1
        elif isinstance(event, events.LoadFailed | events.BatchFailed):
            self._failure = event.reason
        for effect in effects:
            self._keep(effect)
        return effects

    def recording(self) -> Recording:
        """Decisions so far, once nothing is under way. Raises ConfigError when one of them failed."""
        if self._failure is not None:
            raise ConfigError(f"only a run without failures can be played back: {self._failure} - correct that first")
        outcomes = {batch: tuple(ended) for batch, ended in self._outcomes.items()}
        return Recording(
            tuple(self._dues), outcomes, dict(self._results), dict(self._loads_at_once), self._decider.statistics()
        )

    def _keep(self, effect: Effect) -> None:
        if isinstance(effect, Complete | Fail):
            self._outcomes[self._last_batch.get(effect.request, -effect.request)].append(effect)
        elif isinstance(effect, StartBatch):
            batch = effect.batch
            place = CopyPlace(self._executors[batch.executor], batch.copy)
            self._due(effect, place)
            self._executor_of[batch.id] = batch.executor
            self._uses[place] += 1
            self._last_batch |= dict.fromkeys(batch.requests, batch.id)
        elif isinstance(effect, Evict):
            place = CopyPlace(effect.pool, effect.copy)
            self._due(effect, place)
            self._moves[place] += 1
        elif isinstance(effect, StartLoad):
            self._keep_load(effect)

    def _keep_load(self, load: StartLoad) -> None:
        target, source = CopyPlace(load.pool, load.copy), CopyPlace(load.source, load.copy)
        self._due(load, target, source)
        self._moves[target] += 1
        if load.source != SSD:
            self._uses[source] += 1
        self._sources[load.load] = load.source
        self._in_flight[load.source] += 1
        self._loads_at_once[load.source] = max(self._loads_at_once[load.source], self._in_flight[load.source])

    def _due(self, effect: StartLoad | StartBatch | Evict, *places: CopyPlace) -> None:
        moves = {place: self._moves[place] for place in places}
        uses = {places[0]: self._uses[places[0]]} if isinstance(effect, Evict) else {}
        on = effect.batch.executor if isinstance(effect, StartBatch) else None
        behind = sum(executor == on for executor in self._executor_of.values())
        self._dues.append(Due(effect, self._arrived, moves, uses, behind))
