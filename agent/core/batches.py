"""Batches: which batch runs on each executor, which one it holds behind that, and by what profiles each was started.

Guarantees: an executor runs one batch and holds one more at most, and holds none while it runs none; the copies of both
are in use, and the workspace of the running one is taken, until ``end``. What was held begins as soon as the running
batch has ended, in the order in which the shell runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from agent.core.ahead import PreparedAhead
    from agent.core.performance import ExpertProfile
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue
    from agent.core.request import Batch


@dataclass(slots=True, eq=False)
class Batches:
    _queues: Mapping[int, ExecutorQueue]
    _pools: Mapping[str, ModelPool]
    _ahead: PreparedAhead
    _batches: dict[int, Batch] = field(default_factory=dict)
    _profiles: dict[int, tuple[ExpertProfile, ...]] = field(default_factory=dict)  # batch -> what its parts run by
    _running: dict[int, int] = field(default_factory=dict)  # executor -> batch
    _held: dict[int, int] = field(default_factory=dict)  # executor -> the batch behind that
    count: int = 0  # that were begun or held since the start

    @property
    def is_any(self) -> bool:
        return bool(self._running)

    @property
    def all(self) -> Collection[Batch]:
        return self._batches.values()

    def running(self, executor: int) -> Batch | None:
        number = self._running.get(executor)
        return None if number is None else self._batches[number]

    def is_running(self, executor: int) -> bool:
        return executor in self._running

    def is_holding(self, executor: int) -> bool:
        return executor in self._held

    def under_way(self, number: int) -> Batch | None:
        """The batch of this number, if it runs; None for one that is held."""
        batch = self._batches.get(number)
        return batch if batch is not None and self._running[batch.executor] == number else None

    def next_number(self) -> int:
        self.count += 1
        return self.count

    def begin(self, batch: Batch, profiles: tuple[ExpertProfile, ...], predicted_s: float, now: float) -> None:
        """An idle executor runs a batch from now on; ``predicted_s`` includes what a quantum leaves for later."""
        queue = self._queues[batch.executor]
        pool = self._pools[queue.spec.pool]
        for copy in batch.copies:
            pool.start_use(copy)
        pool.take_workspace(batch.executor, batch.workspace_bytes)
        runs_s = predicted_s if batch.quantum_s is None else min(predicted_s, batch.quantum_s)
        queue.running_until_s = now + runs_s
        queue.unfinished_s = predicted_s - runs_s
        self._batches[batch.id] = batch
        self._profiles[batch.id] = profiles
        self._running[batch.executor] = batch.id

    def hold(self, batch: Batch, profile: ExpertProfile, predicted_s: float) -> None:
        queue = self._queues[batch.executor]
        queue.held_s = predicted_s
        queue.held_requests = len(batch.requests)
        self._pools[queue.spec.pool].start_use(batch.copy)
        self._batches[batch.id] = batch
        self._profiles[batch.id] = (profile,)
        self._held[batch.executor] = batch.id

    def end(self, batch: Batch, now: float) -> tuple[ExpertProfile, ...]:
        """A running batch is over; what each of its parts ran by, as the line may have changed meanwhile."""
        queue = self._queues[batch.executor]
        pool = self._pools[queue.spec.pool]
        for copy in batch.copies:
            pool.end_use(copy)
        queue.unfinished_s = 0.0
        del self._batches[batch.id]
        if not self._begin_held(queue, now):
            pool.return_workspace(batch.executor)
            queue.running_until_s = None
            del self._running[batch.executor]
        return self._profiles.pop(batch.id)

    def _begin_held(self, queue: ExecutorQueue, now: float) -> bool:
        number = self._held.pop(queue.spec.id, None)
        if number is None:
            return False
        batch = self._batches[number]
        self._pools[queue.spec.pool].keep_workspace(queue.spec.id, batch.workspace_bytes)
        queue.running_until_s = now + queue.held_s
        queue.held_s, queue.held_requests = 0.0, 0
        queue.is_overtaken = False
        self._running[queue.spec.id] = number
        self._ahead.run(batch.requests)
        return True

    def check_invariants(self) -> None:
        for batch in self._batches.values():
            pool = self._pools[self._queues[batch.executor].spec.pool]
            for copy in batch.copies:
                assert pool.is_resident(copy), f"batch {batch.id} runs on {copy}, which is not resident"
            assert batch.id in (self._running.get(batch.executor), self._held.get(batch.executor)), "a batch is lost"
        assert self._held.keys() <= self._running.keys(), "a batch is held behind nothing"
