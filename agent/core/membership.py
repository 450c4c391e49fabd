"""Membership: executors are lost and join, with their memories; homes of pinned experts among those present.

    executors are lost  their requests are assigned anew; a request that ran there, or whose image was begun, runs alone
                        and is not prepared ahead. It ends UNKNOWN once ``LOSSES`` executors were lost with it. A
                        request that no other executor can run waits for the lost ones for up to ``absence_s``
    executors join      requests that have not begun move to them, from the ends of the longest queues, while that makes
                        the longest queue shorter; requests that have waited beyond the overtaking bound stay

Guarantees: no request is lost or runs twice at a time. A join costs one decision for each moved request, and compares
queues once for each waiting batch. Executors whose memories are too small for an expert do not join. No pinned expert
leaves another expert too little room.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from agent.core import demand, failures, requests, room, running
from agent.core.performance import footprints_in, pinned_homes
from agent.core.pool import ModelPool, misfits
from agent.core.request import CANCELLED, GAVE_WAY
from experts.errors import MemoryExceeded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from agent.core.events import ExecutorsJoined, ExecutorsLost
    from agent.core.performance import ExecutorSpec, PerformanceMatrix, PoolSpec
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.state import ServedLine, State

LOSSES = 3  # an image that ends each executor that runs it ends no more of them; arbitrary


# -- executors are lost --


def executors_lost(state: State, event: ExecutorsLost) -> bool:
    """Take requests, batches, loads and memories off lost executors."""
    lost = {queue.spec.id: queue for queue in state.queues if queue.spec.id in event.executors}
    returning = state.away.keys() & event.executors
    if not lost and not returning:
        return state.unexpected()
    for executor in returning:
        del state.away[executor]
    if event.may_return:
        state.away |= {executor: queue.spec for executor, queue in lost.items()}
    freed = [each for queue in lost.values() for each in _take_off(state, queue)]
    state.scheduler.lose(lost.keys())
    state.splitter.forget(lost.keys())
    for executor, queue in lost.items():
        del state.pools[queue.spec.pool].guaranteed_workspace[executor]
    _drop_memories(state, {queue.spec.pool for queue in lost.values()})
    demand.keep_wishes(state, lambda wish: wish.spec.id not in lost)
    state.connect()
    change_line(state, state.line)
    for request, expert in sorted(freed, key=lambda each: (state.tickets[each[0]].queued_s, each[0])):
        _assign_anew(state, request, expert, event.reason)
    _retry_stranded(state)
    for expert in {expert for _, expert in freed}:
        room.discard_if_gone(state, expert)
    return True


def end_absence(state: State) -> None:
    """End the requests that have waited too long for lost executors."""
    for request, expert in tuple(state.stranded.items()):
        if state.tickets[request].queued_s + state.limits.absence_s <= state.now:
            reason = f"{expert}: no executor could run it for {state.limits.absence_s:g} s"
            requests.fail(state, request, reason)


def _take_off(state: State, queue: ExecutorQueue) -> Iterator[tuple[int, str]]:
    """End batches and empty the queue of a lost executor: its requests, each with its expert."""
    for group in tuple(queue.groups()):
        for request in tuple(group.requests):
            state.tickets[request].losses += state.images.are_begun((request,))
            requests.leave_executor(state, request)
            yield request, group.expert
    while (batch := state.running_batch(queue.spec.id)) is not None:
        for portion, _ in running.end(state, batch):
            for request in portion.requests:
                state.tickets[request].losses += 1
                if batch.quantum_s is not None:
                    requests.lose(state, request, batch.executor)
                yield request, portion.expert


def _drop_memories(state: State, names: set[str]) -> None:
    """Drop these memories and their caches, with their loads, unless an executor runs or loads from them."""
    used = {queue.spec.pool for queue in state.scheduler.queues}
    caches = {state.pools[name].spec.cache for name in names}
    kept = used | {state.pools[name].spec.cache for name in used}
    gone = {name for name in names | caches if name is not None} - kept
    for number, load in tuple(state.loads.items()):
        if load.pool in gone:
            demand.load_over(state, state.loads.pop(number))
    for name in sorted(gone):
        for entry in state.pools.pop(name).entries():
            state.presence[entry.expert] -= 1
        state.lowered.pop(name, None)
    state.setbacks = {where: each for where, each in state.setbacks.items() if where[0] not in gone}


def _assign_anew(state: State, request: int, expert: str, reason: str) -> None:
    ticket = state.tickets[request]
    ticket.attempts = 0
    if ticket.worker not in state.queues_at:
        ticket.worker = ""
    if ticket.losses:
        state.images.forget(request, state.effects)
    if ticket.is_cancelled:
        requests.fail(state, request, CANCELLED)
    elif request == state.idle_request:
        requests.fail(state, request, GAVE_WAY)
    elif ticket.losses >= LOSSES:
        requests.fail(state, request, f"{expert}: {LOSSES} executors were lost while they ran it, last: {reason}")
    else:
        requests.enqueue(state, request, expert)


def _retry_stranded(state: State) -> None:
    for request, expert in tuple(state.stranded.items()):
        requests.enqueue(state, request, expert)


# -- executors join --


def executors_joined(state: State, event: ExecutorsJoined) -> bool:
    """Add executors and memories, unless they are known already, incomplete, or too small for an expert."""
    added = {pool.name: pool for pool in event.pools if pool.name not in state.pools}
    pools = {name: pool.spec for name, pool in state.pools.items()} | added
    needed = {spec.pool for spec in event.executors} | {pool.cache for pool in event.pools if pool.cache is not None}
    ids, columns = {spec.id for spec in event.executors}, state.line.matrix.experts
    is_complete = needed <= pools.keys() and all(spec.processor in columns for spec in event.executors)
    if not ids or not ids.isdisjoint(state.queue_of) or not is_complete:
        return state.unexpected()
    executors = [*state.executors, *event.executors]
    if lacking([pools[name] for name in sorted(needed)], executors, state.line.matrix, state.line.homes) is not None:
        return state.unexpected()
    state.pools |= {name: ModelPool(spec) for name, spec in added.items()}
    state.scheduler.join(event.executors)
    for executor in ids:
        state.away.pop(executor, None)
    state.connect()
    guarantee_workspaces(state)
    change_line(state, state.line, {spec.pool for spec in event.executors})
    _share_waiting(state, [queue for queue in state.queues if queue.spec.id in ids])
    _retry_stranded(state)
    return True


def _share_waiting(state: State, joined: Sequence[ExecutorQueue]) -> None:
    """Move requests to the executors that joined, a batch at a time, oldest first into each queue."""
    lengths_s = dict.fromkeys((queue.spec for queue in joined), 0.0)
    movable = {queue: _movable(state, queue) for queue in state.queues if queue.spec not in lengths_s}
    moved: list[tuple[float, int, str, int]] = []
    opened: set[tuple[ExecutorSpec, str]] = set()
    while movable and lengths_s:
        source = max(movable, key=lambda queue: queue.length_s(state.now))
        if not movable[source]:
            del movable[source]
            continue
        group = movable[source][-1]
        batch = tuple(islice(reversed(group.requests), group.profile.performance.max_batch))
        costs = (
            (length_s + _cost_s(state, spec, group.expert, batch, opened), spec.id, spec)
            for spec, length_s in lengths_s.items()
        )
        after_s, _, target = min(costs)
        if after_s >= source.length_s(state.now):
            movable[source].pop()
            continue
        if len(batch) == len(group.requests):
            movable[source].pop()
        lengths_s[target] = after_s
        opened.add((target, group.expert))
        for request in batch:
            moved.append((state.tickets[request].queued_s, request, group.expert, target.id))
            requests.leave_queue(state, request)
    for _, request, expert, executor in sorted(moved):
        requests.enqueue(state, request, expert, home=executor)


def _movable(state: State, queue: ExecutorQueue) -> list[Group]:
    """Groups that may move, first those to keep: in their plan's memory, and soon to run."""
    groups = [
        group
        for group in queue.groups()
        if state.now - group.opened_s < state.overtake_s
        and not (group.alone or group.is_ongoing or state.idle_request in group.requests)
    ]
    return sorted(groups, key=lambda group: not state.is_planned(queue.spec, group.expert))


def _cost_s(
    state: State, spec: ExecutorSpec, expert: str, batch: Collection[int], opened: Collection[tuple[ExecutorSpec, str]]
) -> float:
    """Predicted seconds of these requests on an executor that joined; infinity if it cannot or should not run them."""
    row = state.line.matrix.experts[spec.processor].get(expert)
    if row is None or not state.is_planned(spec, expert):
        return inf
    performance, works = row.performance, [state.tickets[request].left for request in batch]
    if any(performance.most_for(work) > state.pools[spec.pool].lease_bytes for work in works):
        return inf
    opening_s = 0.0 if (spec, expert) in opened else performance.B_s + demand.switch_s(state, spec, row)
    return opening_s + performance.K_s * len(works) + sum(map(performance.tokens_s, works))


# -- room that every expert needs --


def change_line(state: State, line: ServedLine, memories: Collection[str] = ()) -> None:
    """Serve a line; ``memories``: new ones. No expert is pinned where another would have too little room."""
    columns = line.matrix.experts
    homes = pinned_homes(state.limits.pinned, state.executors, columns)
    for name in sorted({home.pool for home in homes.values()}):
        if misfits(footprints_in(name, state.executors, columns, homes), state.pools[name].spec.expert_bytes):
            homes = {expert: home for expert, home in homes.items() if home.pool != name}
    demand.change_line(state, replace(line, homes=homes), memories)
    failures.raise_budgets(state)


def lacking(
    pools: Iterable[PoolSpec],
    executors: Sequence[ExecutorSpec],
    matrix: PerformanceMatrix,
    homes: Mapping[str, ExecutorSpec],
) -> MemoryExceeded | None:
    """The first of these memories that is too small for one of its experts, or for its executors' workspaces."""
    for pool in pools:
        needs = misfits(footprints_in(pool.name, executors, matrix.experts, homes), pool.expert_bytes)
        if needs:
            expert = max(needs, key=lambda each: needs[each])
            return MemoryExceeded(f"{pool.name}, for {expert}", needs[expert], pool.expert_bytes)
        owed = sum(_workspace_for_one(matrix, spec) for spec in executors if spec.pool == pool.name)
        if owed > pool.workspace_bytes:
            return MemoryExceeded(f"{pool.name}, workspace of one image per executor", owed, pool.workspace_bytes)
    return None


def guarantee_workspaces(state: State) -> None:
    """Guarantee each executor the workspace of one image of each of its experts."""
    for spec in state.executors:
        state.pools[spec.pool].guaranteed_workspace[spec.id] = _workspace_for_one(state.line.matrix, spec)


def _workspace_for_one(matrix: PerformanceMatrix, spec: ExecutorSpec) -> int:
    return max((row.performance.workspace_for(1) for row in matrix.experts[spec.processor].values()), default=0)
