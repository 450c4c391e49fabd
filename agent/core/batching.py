"""Batching: what an executor runs next, as a batch: its requests leave their queue, and StartBatch says so.

An idle executor is given the group whose turn it is (``turns``), as many of its requests as batch size and workspace
allow (``splitter``); one that runs may be given the next batch behind that (``holding``). Whatever starts says what is
worth having after it.

Guarantees: a request stands in its queue or in one batch, never in both; a batch of texts has a quantum and its leases,
a batch of images has neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.effects import StartBatch
from agent.core.request import IMAGE, Batch, Part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.core.ahead import PreparedAhead
    from agent.core.batches import Batches
    from agent.core.effects import Effect
    from agent.core.holding import Holding
    from agent.core.performance import ExpertProfile, Limits, Performance
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.served_line import ServedLine
    from agent.core.supply import Supply
    from agent.core.ticket import Ticket
    from agent.core.turns import Turns


@dataclass(slots=True, eq=False)
class Batching:
    _queues: Sequence[ExecutorQueue]
    _pools: Mapping[str, ModelPool]
    _tickets: Mapping[int, Ticket]
    _batches: Batches
    _turns: Turns
    _holding: Holding
    _ahead: PreparedAhead
    _supply: Supply
    _limits: Limits

    def start(self, line: ServedLine, now: float, effects: list[Effect]) -> None:
        for queue in self._queues:
            if not self._batches.is_running(queue.spec.id) and queue.head is not None:
                group = self._turns.next_group(queue)
                if group is not None and self._has_workspace(queue, group):
                    self._start_batch(queue, group, line, now, effects)

    def hold(self, background: int | None, line: ServedLine, now: float, effects: list[Effect]) -> None:
        """Executors that run are given their next batch, where that costs nothing; none behind background work."""
        for queue in self._queues:
            running = self._batches.running(queue.spec.id)
            if running is None or self._batches.is_holding(queue.spec.id) or running.id == background:
                continue
            size = self._holding.size(queue, running)
            if size:
                self._hold_batch(queue, size, line, now, effects)

    def _has_workspace(self, queue: ExecutorQueue, group: Group) -> bool:
        """False only after a reload raised the guaranteed workspace."""
        pool = self._pools[queue.spec.pool]
        return pool.workspace_for(queue.spec.id) >= group.profile.performance.workspace_for(1)

    def _start_batch(
        self, queue: ExecutorQueue, group: Group, line: ServedLine, now: float, effects: list[Effect]
    ) -> None:
        performance, is_front = group.profile.performance, group is queue.front
        if performance.runs_in_quanta:
            batch, profiles, tokens_s = self._batch_of_texts(queue, group, line)
        else:
            batch, profiles, tokens_s = self._batch_of_images(queue, group)
        self._batches.begin(batch, profiles, performance.latency_s(len(batch.requests)) + tokens_s, now)
        queue.is_overtaken = not is_front
        if batch.quantum_s is None and self._ahead.is_on:
            self._ahead.started(batch.requests, now, effects)
        effects.append(StartBatch(batch))
        for part in batch.all_parts:
            self._supply.speculate(queue.spec, part.expert, line, now)

    def _hold_batch(self, queue: ExecutorQueue, size: int, line: ServedLine, now: float, effects: list[Effect]) -> None:
        group, spec = queue.head, queue.spec
        assert group is not None, "its first requests are held"
        performance, copy = group.profile.performance, group.profile.copy
        number, requests = self._batches.next_number(), queue.take(group, size)
        batch = Batch(number, spec.id, group.expert, copy, requests, performance.workspace_for(size))
        predicted_s = performance.latency_s(size) + self._off_queue(requests, performance)
        self._batches.hold(batch, group.profile, predicted_s)
        self._ahead.held(requests, now)
        effects.append(StartBatch(batch))
        self._ahead.advance(effects)
        self._supply.speculate(spec, batch.expert, line, now)

    def _batch_of_images(self, queue: ExecutorQueue, group: Group) -> tuple[Batch, tuple[ExpertProfile, ...], float]:
        self._turns.images_start(queue)
        waiting, performance = 1 if group.alone else len(group.requests), group.profile.performance
        requests = queue.take(group, self._turns.batch_size(queue, group, waiting))
        number, workspace_bytes = self._batches.next_number(), performance.workspace_for(len(requests))
        batch = Batch(number, queue.spec.id, group.expert, group.profile.copy, requests, workspace_bytes)
        return batch, (group.profile,), self._off_queue(requests, performance)

    def _batch_of_texts(
        self, queue: ExecutorQueue, group: Group, line: ServedLine
    ) -> tuple[Batch, tuple[ExpertProfile, ...], float]:
        parts, profiles = self._take_quantum(queue, group)
        requests = tuple(request for part in parts for request in part.requests)
        workspace_bytes = max(profile.performance.workspace_for(len(requests)) for profile in profiles)
        number, executor, copy = self._batches.next_number(), queue.spec.id, group.profile.copy
        quantum_s, listed = self._quantum_s(queue, line), parts if len(parts) > 1 else ()
        batch = Batch(number, executor, group.expert, copy, requests, workspace_bytes, quantum_s, listed)
        tokens_s = (self._off_queue(part.requests, row.performance) for part, row in zip(parts, profiles, strict=True))
        return batch, profiles, sum(tokens_s)

    def _quantum_s(self, queue: ExecutorQueue, line: ServedLine) -> float:
        """Shorter where images may come, now or after the next change of the line."""
        lone_s = self._limits.lone_quantum_s
        if lone_s is None:
            return self._limits.quantum_s
        rows = line.matrix.experts[queue.spec.processor]
        served = (row for expert, row in rows.items() if expert not in line.retired)
        return lone_s if all(row.performance.runs_in_quanta for row in served) else self._limits.quantum_s

    def _take_quantum(self, queue: ExecutorQueue, group: Group) -> tuple[tuple[Part, ...], tuple[ExpertProfile, ...]]:
        """Requests that run for a quantum, by expert, and their profiles; the group whose turn it is comes first."""
        parts = {group.profile.copy: Part(group.expert, group.profile.copy, ())}
        profiles = {group.profile.copy: group.profile}
        for share in self._turns.quantum_starts(queue, group):
            expert, profile = share.group.expert, share.group.profile
            before = parts.get(profile.copy, Part(expert, profile.copy, ()))
            parts[profile.copy] = before._replace(requests=before.requests + queue.take(share.group, share.count))
            profiles[profile.copy] = profile
        self._turns.look_again(self._queues)
        return tuple(parts.values()), tuple(profiles.values())

    def _off_queue(self, requests: tuple[int, ...], performance: Performance) -> float:
        """Note that requests stand in a batch; the predicted seconds of their tokens."""
        tokens_s = 0.0
        for request in requests:
            ticket = self._tickets[request]
            ticket.queue = ticket.group = None
            if ticket.left is not IMAGE:
                tokens_s += performance.tokens_s(ticket.left)
        return tokens_s
