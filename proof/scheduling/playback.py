"""A run's batches and loads, recorded and played back on the real runtime without any scheduling.

Guarantees: a playback gives the same batches to the same executors in the same order, and the same loads and evictions
to the same memories in the same order; batches queued ahead are queued ahead again. No batch runs before its requests
are there, and no expert moves before as many requests have come as at the decision: the future wins nothing. A playback
cannot stall: every recorded effect waits only for effects before it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.effects import Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.events import Arrived, BatchFailed, Finished, Loaded, LoadFailed
from agent.core.performance import SSD
from experts.errors import ConfigError
from profiler.replay.timed_decider import DeciderAround

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.request import Batch, Rejected
    from agent.core.state import EngineStatistics
    from agent.runtime.loop import Decider
    from experts.expert import Prediction

    Move = StartLoad | Evict
    Answer = tuple[type, int]  # a load's or a batch's end, by its number; or a request's arrival


@dataclass(frozen=True, slots=True)
class Due:
    """A recorded effect and what it waits for.

    ``arrived``: requests that had come when it was decided. ``needs``: answers that had to come before. ``ahead``:
    batches that its executor had not answered.
    """

    effect: StartLoad | StartBatch | Evict
    arrived: int
    needs: frozenset[Answer]
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class PlayedRecording:
    """A run's effects in order, the answers of its batches, and what its Engine counted in the end.

    ``outcomes``: by the batch that decided them, or by -n: when request n arrived. ``loads_at_once``: the most in
    flight, by source.
    """

    dues: tuple[Due, ...]
    outcomes: Mapping[int, tuple[Complete | Fail, ...]]
    results: Mapping[int, tuple[Prediction | Rejected, ...]]
    loads_at_once: Mapping[str, int]
    statistics: EngineStatistics

    @property
    def batches(self) -> tuple[Batch, ...]:
        return tuple(due.effect.batch for due in self.dues if isinstance(due.effect, StartBatch))


class Recorder(DeciderAround):
    """A Decider that keeps the decisions of another one. ``executors``: id -> name of its memory."""

    def __init__(self, decider: Decider, executors: Mapping[int, str]) -> None:
        super().__init__(decider)
        self._executors = dict(executors)
        self._dues: list[Due] = []
        self._outcomes: defaultdict[int, list[Complete | Fail]] = defaultdict(list)
        self._results: dict[int, tuple[Prediction | Rejected, ...]] = {}
        self._loaded_by: dict[tuple[str, str], Answer] = {}  # by memory and copy
        self._users: defaultdict[tuple[str, str], set[Answer]] = defaultdict(set)  # since that load
        self._last_batch: dict[int, int] = {}  # by request
        self._unanswered: dict[int, int] = {}  # executor by batch
        self._loading: dict[int, str] = {}  # source by load
        self._loads_at_once: Counter[str] = Counter()
        self._arrived = 0
        self._failure: str | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._decider.handle(event, now)
        if isinstance(event, Arrived):
            self._arrived += 1
        elif isinstance(event, Finished):
            self._results[event.batch] = event.results
            del self._unanswered[event.batch]
        elif isinstance(event, Loaded):
            del self._loading[event.load]
        elif isinstance(event, LoadFailed | BatchFailed):
            self._failure = event.reason
        for effect in effects:
            self._record(effect)
        return effects

    def recording(self) -> PlayedRecording:
        """Decisions so far, once nothing is under way. Raises ConfigError when a load or a batch failed."""
        if self._failure is not None:
            raise ConfigError(f"only a run without failures can be played back: {self._failure} - correct that first")
        outcomes = {batch: tuple(ended) for batch, ended in self._outcomes.items()}
        return PlayedRecording(
            tuple(self._dues), outcomes, dict(self._results), dict(self._loads_at_once), self._decider.statistics()
        )

    def _record(self, effect: Effect) -> None:
        if isinstance(effect, Complete | Fail):
            self._outcomes[self._last_batch.get(effect.request, -effect.request)].append(effect)
        elif isinstance(effect, StartBatch):
            self._record_batch(effect, effect.batch)
        elif isinstance(effect, Evict):
            place = (effect.pool, effect.copy)
            self._dues.append(
                Due(effect, self._arrived, frozenset({self._loaded_by.pop(place), *self._users.pop(place, ())}))
            )
        elif isinstance(effect, StartLoad):
            self._record_load(effect)

    def _record_batch(self, effect: StartBatch, batch: Batch) -> None:
        place = (self._executors[batch.executor], batch.copy)
        needs: set[Answer] = {(Loaded, self._loaded_by[place][1])}
        for request in batch.requests:
            before = self._last_batch.get(request)
            needs.add((Arrived, request) if before is None else (Finished, before))
            self._last_batch[request] = batch.id
        ahead = sum(executor == batch.executor for executor in self._unanswered.values())
        self._dues.append(Due(effect, 0, frozenset(needs), ahead))
        self._users[place].add((Finished, batch.id))
        self._unanswered[batch.id] = batch.executor

    def _record_load(self, load: StartLoad) -> None:
        needs: frozenset[Answer] = frozenset()
        if load.source != SSD:
            source = (load.source, load.copy)
            needs = frozenset({self._loaded_by[source]})
            self._users[source].add((Loaded, load.load))
        self._dues.append(Due(load, self._arrived, needs))
        self._loaded_by[load.pool, load.copy] = (Loaded, load.load)
        self._loading[load.load] = load.source
        in_flight = sum(source == load.source for source in self._loading.values())
        self._loads_at_once[load.source] = max(self._loads_at_once[load.source], in_flight)


class Playback:
    """A Decider that releases a recording's effects in order; see the module. ``executors``: id -> its memory."""

    def __init__(self, recording: PlayedRecording, executors: Mapping[int, str]) -> None:
        self._recording = recording
        self._executors = dict(executors)
        self._lanes: defaultdict[int | str, deque[Due]] = defaultdict(deque)  # batches by executor, moves by memory
        for due in recording.dues:
            effect = due.effect
            self._lanes[effect.batch.executor if isinstance(effect, StartBatch) else effect.pool].append(due)
        self._answers: set[Answer] = set()
        self._loads: dict[int, StartLoad] = {}  # in flight
        self._batches: dict[int, Batch] = {}  # without an answer
        self._resident: defaultdict[str, set[str]] = defaultdict(set)
        self._used_bytes: Counter[str] = Counter()
        self._counts: Counter[str | type] = Counter()
        self.differences = 0  # labels unlike the recorded ones

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Everything that may happen now. Raises ConfigError when a load or a batch fails."""
        released: list[Effect] = list(self._outcomes_after(event))
        before = -1
        while len(released) > before:  # an eviction may let a batch go, in a lane that was looked at already
            before = len(released)
            for lane in self._lanes.values():
                while lane and self._may_go(lane[0]):
                    released.append(self._released(lane.popleft().effect))
        return released

    def next_wakeup_s(self) -> float | None:
        return None

    def statistics(self) -> EngineStatistics:
        """Counts of the playback so far; the rest is as recorded."""
        recorded, counts = self._recording.statistics, self._counts
        pools = (
            replace(
                pool,
                used_bytes=self._used_bytes[pool.name],
                workspace_used_bytes=0,
                resident=tuple(sorted(self._resident[pool.name])),
                loading=tuple(load.copy for load in self._loads.values() if load.pool == pool.name),
            )
            for pool in recorded.pools
        )
        return replace(
            recorded,
            arrived=counts[Arrived],
            completed=counts[Complete],
            failed=counts[Fail],
            in_flight=counts[Arrived] - counts[Complete] - counts[Fail],
            batches=counts[StartBatch],
            loads={path: counts[path] for path in recorded.loads},
            bytes_read=counts["bytes_read"],
            evictions=counts[Evict],
            queues=(),
            pools=tuple(pools),
        )

    def check_invariants(self) -> None:
        for pool in self._recording.statistics.pools:
            used_bytes = self._used_bytes[pool.name]
            assert used_bytes <= pool.expert_bytes, f"{pool.name}: {used_bytes} bytes of {pool.expert_bytes}"

    def _outcomes_after(self, event: Event) -> Iterator[Effect]:
        """Count an event; outcomes follow from it at once."""
        if isinstance(event, Arrived):
            self._counts[Arrived] += 1
            self._answers.add((Arrived, event.request))
            decided = -event.request
        elif isinstance(event, Loaded):
            load = self._loads.pop(event.load)
            self._answers.add((Loaded, event.load))
            self._resident[load.pool].add(load.copy)
            return
        elif isinstance(event, Finished):
            del self._batches[event.batch]
            self._answers.add((Finished, event.batch))
            recorded, decided = self._recording.results[event.batch], event.batch
            pairs = zip(event.results, recorded, strict=True)
            self.differences += sum(getattr(one, "label", None) != getattr(two, "label", None) for one, two in pairs)
        elif isinstance(event, LoadFailed | BatchFailed):
            raise ConfigError(f"nothing may fail in a playback: {event.reason} - correct that, and measure again")
        else:
            return
        for effect in self._recording.outcomes.get(decided, ()):
            self._counts[type(effect)] += 1
            yield effect

    def _may_go(self, due: Due) -> bool:
        effect = due.effect
        if due.arrived > self._counts[Arrived] or not due.needs <= self._answers:
            return False
        if isinstance(effect, StartBatch):
            return sum(batch.executor == effect.batch.executor for batch in self._batches.values()) <= due.ahead
        if isinstance(effect, StartLoad):
            in_flight = sum(load.source == effect.source for load in self._loads.values())
            return in_flight < self._recording.loads_at_once[effect.source]
        return True

    def _released(self, effect: StartLoad | StartBatch | Evict) -> Effect:
        self._counts[type(effect)] += 1
        if isinstance(effect, StartBatch):
            self._batches[effect.batch.id] = effect.batch
        elif isinstance(effect, Evict):
            self._resident[effect.pool].discard(effect.copy)
            self._used_bytes[effect.pool] -= effect.freed_bytes
        else:
            self._loads[effect.load] = effect
            self._used_bytes[effect.pool] += effect.size_bytes
            self._counts[f"{effect.source}_{effect.pool}"] += 1
            self._counts["bytes_read"] += effect.size_bytes if effect.source == SSD else 0
        return effect
