"""Batches: the next batch of each executor, and the batch queued ahead behind a running one.

A batch queued ahead cannot be revoked. So an executor has at most one, behind a batch of images, and only if waiting
for the answer could not improve it: the batch is full, of the first group, its images are begun, and its workspace is
no larger than the running batch's. Its expert is not reserved; for another expert than the running one, no claim lacks
room in that memory. No queued request counts in tokens or failed before, and the running batch is not of idle
precedence. Policies without overlap decide one batch at a time, as published.

Guarantees: an executor has a batch queued ahead only while it runs one; until ``end`` the copies of both are in use and
the workspace of the running one is taken; a batch of texts has a quantum and its leases, a batch of images neither.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from agent.core import turns
from agent.core.demand import speculate
from agent.core.effects import StartBatch
from agent.core.request import IMAGE, Batch, Portion

UNDISTURBED_QUANTA = 20  # the layer of a pass that long takes a quantum, in a model of 20 layers

if TYPE_CHECKING:
    from agent.core.performance import ExpertProfile
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.state import State


def start_batches(state: State) -> None:
    """Start the next batch of every idle executor."""
    for queue in state.touched_queues:
        if queue.spec.id not in state.running and queue.head is not None:
            group, pool = turns.next_group(state, queue), state.pools[queue.spec.pool]
            free_bytes = pool.workspace_for(queue.spec.id)  # lacking only after a reload raised the guaranteed bytes
            if group is not None and group.profile.performance.workspace_for(1) <= free_bytes:
                _start_batch(state, queue, group)


def queue_batches_ahead(state: State) -> None:
    """Queue a batch ahead on running executors, where that costs nothing."""
    for queue in state.touched_queues:
        running = state.running_batch(queue.spec.id)
        if running is None or queue.spec.id in state.queued_ahead or state.idle_request in running.requests:
            continue
        size = _size_ahead(state, queue, running)
        if size:
            _queue_ahead(state, queue, size)


def end(state: State, batch: Batch) -> list[tuple[Portion, ExpertProfile]]:
    """End a running batch; returns its portions with the rows that they ran by: the line may have changed since."""
    queue, pool = state.queue_of[batch.executor], state.pool_of(batch.executor)
    for copy in batch.copies:
        pool.end_use(copy)
    queue.unfinished_s = 0.0
    state.touched.add(queue.spec.worker)
    del state.batches[batch.id]
    number = state.queued_ahead.pop(batch.executor, None)
    if number is None:
        pool.return_workspace(batch.executor)
        queue.running_until_s = None
        del state.running[batch.executor]
    else:
        following = state.batches[number]
        pool.keep_workspace(batch.executor, following.workspace_bytes)
        queue.running_until_s = state.now + queue.ahead_s
        queue.ahead_s, queue.ahead_requests = 0.0, 0
        queue.is_overtaken = False
        state.running[batch.executor] = number
        state.images.run(following)
    return state.parts.pop(batch.id)


def _start_batch(state: State, queue: ExecutorQueue, group: Group) -> None:
    performance, is_front, executor = group.profile.performance, group is queue.front, queue.spec.id
    profiles: tuple[ExpertProfile, ...] = (group.profile,)
    if performance.runs_in_quanta:
        batch, profiles = _batch_of_texts(state, queue, group)
    else:
        waiting = 1 if group.alone else len(group.requests)
        batch = _batch_of_images(state, queue, group, turns.batch_size(state, queue, group, waiting))
        queue.had_quantum = False
    state.pools[queue.spec.pool].take_workspace(executor, batch.workspace_bytes)
    predicted_s = performance.latency_s(len(batch.requests)) + _enter(state, batch, profiles)
    runs_s = predicted_s if batch.quantum_s is None else min(predicted_s, batch.quantum_s)
    queue.running_until_s = state.now + runs_s
    queue.unfinished_s = predicted_s - runs_s
    queue.is_overtaken = not is_front
    state.running[executor] = batch.id
    if batch.quantum_s is None and state.images.is_on:
        state.images.started(batch, state.now, state.effects)
    state.effects.append(StartBatch(batch))
    for portion in batch.all_portions:
        speculate(state, queue.spec, portion.expert)


def _enter(state: State, batch: Batch, profiles: tuple[ExpertProfile, ...]) -> float:
    """Register a new batch, and use its copies until it ends; returns the predicted seconds of its tokens."""
    pool, is_idle = state.pool_of(batch.executor), state.idle_request in batch.requests
    for copy in batch.copies:
        pool.start_use(copy, is_spare=is_idle)
    state.counts["idle_batches"] += is_idle
    state.batches[batch.id] = batch
    parts = state.parts[batch.id] = list(zip(batch.all_portions, profiles, strict=True))
    tokens_s = 0.0
    for portion, profile in parts:
        tickets = [state.tickets[request] for request in portion.requests]
        for ticket in tickets:
            ticket.queue = ticket.group = None
            ticket.worker = pool.spec.worker
        tokens_s += sum(profile.performance.tokens_s(each.left) for each in tickets if each.left is not IMAGE)
    return tokens_s


def _size_ahead(state: State, queue: ExecutorQueue, running: Batch) -> int:
    """Size of the batch to queue ahead, of the first group; 0: not now."""
    group, executor = queue.head, queue.spec.id
    if group is None or group.alone or queue.ongoing or queue.begins or running.quantum_s is not None:
        return 0
    performance, pool, copy = group.profile.performance, state.pools[queue.spec.pool], group.profile.copy
    if pool.name in state.full or not state.may_use(pool, copy):
        return 0
    if copy != running.copy and pool.name in state.short:
        return 0
    free_bytes = pool.workspace_for(executor) + running.workspace_bytes
    size = state.splitter.batch_size(group.expert, executor, performance, performance.max_batch, free_bytes)
    if len(group.requests) < size or performance.workspace_for(size) > running.workspace_bytes:
        return 0
    return size if state.images.are_begun(islice(group.requests, size)) else 0


def _queue_ahead(state: State, queue: ExecutorQueue, size: int) -> None:
    group = queue.head
    assert group is not None  # its first requests are queued ahead
    batch = _batch_of_images(state, queue, group, size)
    queue.ahead_s = group.profile.performance.latency_s(size) + _enter(state, batch, (group.profile,))
    queue.ahead_requests = size
    state.queued_ahead[batch.executor] = batch.id
    state.images.queued_ahead(batch, state.now)
    state.effects.append(StartBatch(batch))
    state.images.advance(state.effects)
    speculate(state, queue.spec, batch.expert)


def _batch_of_images(state: State, queue: ExecutorQueue, group: Group, size: int) -> Batch:
    requests, workspace_bytes = queue.take(group, size), group.profile.performance.workspace_for(size)
    return Batch(_next_number(state), queue.spec.id, group.expert, group.profile.copy, requests, workspace_bytes)


def _batch_of_texts(state: State, queue: ExecutorQueue, group: Group) -> tuple[Batch, tuple[ExpertProfile, ...]]:
    """Batch of a quantum, with the rows of its portions; the portion of ``group`` is first."""
    expert, copy = group.expert, group.profile.copy
    portions, profiles = {copy: Portion(expert, copy, ())}, {copy: group.profile}
    for share in turns.quantum_starts(state, queue, group):
        profile = share.group.profile
        before = portions.get(profile.copy, Portion(share.group.expert, profile.copy, ()))
        portions[profile.copy] = before._replace(requests=before.requests + queue.take(share.group, share.count))
        profiles[profile.copy] = profile
    turns.look_again(state)
    listed, rows = tuple(portions.values()), tuple(profiles.values())
    requests = tuple(request for portion in listed for request in portion.requests)
    workspace_bytes = max(row.performance.workspace_for(len(requests)) for row in rows)
    number, executor, quantum_s = _next_number(state), queue.spec.id, _quantum_s(state, queue)
    several = listed if len(listed) > 1 else ()
    undisturbed_s = max(UNDISTURBED_QUANTA * state.limits.quantum_s, quantum_s) if queue.head is None else None
    return Batch(number, executor, expert, copy, requests, workspace_bytes, quantum_s, several, undisturbed_s), rows


def _quantum_s(state: State, queue: ExecutorQueue) -> float:
    """Seconds of a quantum; longer on a line that can have no images."""
    lone_s = state.limits.lone_quantum_s
    if lone_s is None:
        return state.limits.quantum_s
    rows = state.line.matrix.experts[queue.spec.processor]
    served = (row for expert, row in rows.items() if expert not in state.line.retired)
    return lone_s if all(row.performance.runs_in_quanta for row in served) else state.limits.quantum_s


def _next_number(state: State) -> int:
    state.last_batch += 1
    return state.last_batch
