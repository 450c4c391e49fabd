"""A recorded run's batches and loads, played back on the real runtime without any scheduling.

Guarantees: a playback gives the same batches to the same executors in the same order, and the same loads and evictions
to the same memories in the same order; what an executor was given ahead it is given ahead again, and nothing else. It
never runs a batch before its requests are there, nor moves an expert before as many requests have come as had come when
that was decided, so nothing is won by knowing the future. It cannot stall: what an effect waits for was caused, when it
was recorded, by effects before it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.core import events
from agent.core.effects import Complete, Evict, StartBatch, StartLoad
from agent.core.performance import SSD
from agent.core.request import Rejected
from agent.core.statistics import EngineStatistics
from experts.errors import ConfigError
from proof.scheduling.recorder import CopyPlace, Due, Recording

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.effects import Effect
    from agent.core.events import Event
    from agent.core.pool import PoolStatistics
    from agent.core.request import Batch
    from experts.expert import Prediction


class Playback:
    """A Decider that releases a recording's effects in order; see the module. ``executors``: id -> its memory."""

    def __init__(self, recording: Recording, executors: Mapping[int, str]) -> None:
        self._recording = recording
        self._executors = dict(executors)
        self._lanes: dict[int | str, deque[Due]] = {}  # batches by executor, moves by memory
        for due in recording.dues:
            self._lanes.setdefault(_lane(due.effect), deque()).append(due)
        self._moves: Counter[CopyPlace] = Counter()  # that are complete
        self._uses: Counter[CopyPlace] = Counter()  # that have ended
        self._loads: dict[int, StartLoad] = {}
        self._batches: dict[int, Batch] = {}  # without an answer
        self._in_flight: Counter[str] = Counter()
        self._used_bytes: Counter[str] = Counter()
        self._waits_for: dict[int, deque[int]] = {}  # request -> its batches that have not ended, in order
        for batch in recording.batches:
            for request in batch.requests:
                self._waits_for.setdefault(request, deque()).append(batch.id)
        self._here: set[int] = set()
        self._counts: Counter[str] = Counter()
        self.differences = 0  # labels unlike the recorded ones

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Everything that may happen now. Raises ConfigError when a load or a batch fails."""
        released: list[Effect] = []
        self._note(event, released)
        before = -1
        while len(released) > before:  # a move may let a batch go, in a lane that was looked at already
            before = len(released)
            for lane in self._lanes.values():
                while lane and self._may_go(lane[0]):
                    released.append(self._released(lane.popleft().effect))
        return released

    def next_wakeup_s(self) -> float | None:
        return None

    def statistics(self) -> EngineStatistics:
        """Statistics of the playback so far; switches are the recorded ones."""
        recorded, ended = self._recording.statistics, self._counts["completed"] + self._counts["failed"]
        return EngineStatistics(
            arrived=len(self._here),
            completed=self._counts["completed"],
            failed=self._counts["failed"],
            in_flight=len(self._here) - ended,
            switches=recorded.switches,
            batches=self._counts["batches"],
            loads={path: self._counts[path] for path in recorded.loads},
            bytes_read=self._counts["bytes_read"],
            evictions=self._counts["evictions"],
            unexpected_events=0,
            is_draining=False,
            quarantined=dict(recorded.quarantined),
            on_probation=dict(recorded.on_probation),
            queues=(),
            pools=tuple(self._pool(pool) for pool in recorded.pools),
        )

    def check_invariants(self) -> None:
        for pool in self._recording.statistics.pools:
            used_bytes = self._used_bytes[pool.name]
            assert used_bytes <= pool.expert_bytes, f"{pool.name}: {used_bytes} bytes of {pool.expert_bytes}"

    def _note(self, event: Event, released: list[Effect]) -> None:
        """Take down what has happened; outcomes follow from it at once."""
        if isinstance(event, events.Arrived):
            self._here.add(event.request)
            self._release_outcomes(-event.request, released)
        elif isinstance(event, events.Loaded):
            load = self._loads.pop(event.load)
            self._in_flight[load.source] -= 1
            self._moves[CopyPlace(load.pool, load.copy)] += 1
            if load.source != SSD:
                self._uses[CopyPlace(load.source, load.copy)] += 1
        elif isinstance(event, events.Finished):
            self._end_batch(event, released)
        elif isinstance(event, events.LoadFailed | events.BatchFailed):
            raise ConfigError(f"nothing may fail in a playback: {event.reason} - correct that, and measure again")

    def _end_batch(self, event: events.Finished, released: list[Effect]) -> None:
        batch = self._batches.pop(event.batch)
        self._uses[CopyPlace(self._executors[batch.executor], batch.copy)] += 1
        recorded = self._recording.results[batch.id]
        self.differences += sum(_label(one) != _label(two) for one, two in zip(event.results, recorded, strict=True))
        for request in batch.requests:
            self._waits_for[request].popleft()
        self._release_outcomes(batch.id, released)

    def _release_outcomes(self, batch: int, released: list[Effect]) -> None:
        for effect in self._recording.outcomes.get(batch, ()):
            self._counts["completed" if isinstance(effect, Complete) else "failed"] += 1
            released.append(effect)

    def _may_go(self, due: Due) -> bool:
        """Has everything happened that this effect came after?"""
        effect = due.effect
        if any(self._moves[place] != count for place, count in due.moves.items()):
            return False
        if isinstance(effect, StartBatch):
            batch = effect.batch
            before = sum(other.executor == batch.executor for other in self._batches.values())
            return before <= due.behind and all(
                request in self._here and self._waits_for[request][0] == batch.id for request in batch.requests
            )
        if due.arrived > len(self._here):
            return False
        if isinstance(effect, StartLoad):
            return self._in_flight[effect.source] < self._recording.loads_at_once[effect.source]
        return all(self._uses[place] == count for place, count in due.uses.items())

    def _released(self, effect: StartLoad | StartBatch | Evict) -> Effect:
        """Take down that it begins."""
        if isinstance(effect, StartBatch):
            self._batches[effect.batch.id] = effect.batch
            self._counts["batches"] += 1
        elif isinstance(effect, Evict):
            self._moves[CopyPlace(effect.pool, effect.copy)] += 1
            self._used_bytes[effect.pool] -= effect.freed_bytes
            self._counts["evictions"] += 1
        else:
            self._loads[effect.load] = effect
            self._in_flight[effect.source] += 1
            self._used_bytes[effect.pool] += effect.size_bytes
            self._counts[f"{effect.source}_{effect.pool}"] += 1
            self._counts["bytes_read"] += effect.size_bytes if effect.source == SSD else 0
        return effect

    def _pool(self, recorded: PoolStatistics) -> PoolStatistics:
        """A memory as it is now; its copies were moved in and out in turn."""
        copies = sorted(place.copy for place, moves in self._moves.items() if place.pool == recorded.name and moves % 2)
        return replace(
            recorded,
            used_bytes=self._used_bytes[recorded.name],
            workspace_used_bytes=0,
            resident=tuple(copies),
            loading=tuple(load.copy for load in self._loads.values() if load.pool == recorded.name),
        )


def _lane(effect: StartLoad | StartBatch | Evict) -> int | str:
    """Key of effects in one order: the batches of one executor, the moves of one memory."""
    return effect.batch.executor if isinstance(effect, StartBatch) else effect.pool


def _label(result: Prediction | Rejected) -> str | None:
    return None if isinstance(result, Rejected) else result.label
