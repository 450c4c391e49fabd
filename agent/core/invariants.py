"""What must hold between the Engine's parts, recounted from scratch; each part checks itself besides.

Every check raises AssertionError saying what does not add up. They are for tests and take as long as they take.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agent.core.background import BackgroundWork
    from agent.core.batches import Batches
    from agent.core.leases import Leases
    from agent.core.placement import Placement
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue


def check_requests(
    queues: Sequence[ExecutorQueue], tickets: Collection[int], batches: Batches, background: BackgroundWork
) -> None:
    """Each request of the line stands in one queue or in one batch."""
    queued = [request for queue in queues for group in queue.groups() for request in group.requests]
    running = [request for batch in batches.all if batch.id != background.batch for request in batch.requests]
    everywhere = Counter(queued) + Counter(running)
    assert set(everywhere) == set(tickets), "a request is lost, or stands where none should"
    assert all(count == 1 for count in everywhere.values()), "a request stands in two places"
    for queue in queues:
        count = sum(len(group.requests) for group in queue.groups())
        assert count == queue.request_count, f"executor {queue.spec.id}: requests miscounted"


def check_uses(
    pools: Mapping[str, ModelPool], queues: Mapping[int, ExecutorQueue], batches: Batches, placement: Placement
) -> None:
    """Bytes add up, and a copy is in use by just those batches and loads that use it."""
    for pool in pools.values():
        pool.check_invariants()
    batches.check_invariants()
    for name, pool in pools.items():
        here = [batch for batch in batches.all if queues[batch.executor].spec.pool == name]
        uses = Counter(copy for batch in here for copy in batch.copies)
        uses += Counter(load.copy for load in placement.loads.values() if load.source == name)
        for entry in pool.entries():
            assert entry.uses == uses[entry.copy], f"{name}: {entry.copy} counts {entry.uses} uses of {uses}"


def check_background(
    tickets: Collection[int],
    queues: Mapping[int, ExecutorQueue],
    batches: Batches,
    placement: Placement,
    background: BackgroundWork,
) -> None:
    """One batch of one image or one load at most, none that the line waits for too, and no room that it took."""
    background.check_invariants()
    assert not any(request in background for request in tickets), "a request is the line's, and background"
    batch = None if background.batch is None else batches.under_way(background.batch)
    assert (batch is None) == (background.batch is None), "a background batch is lost"
    loads = [load for load in placement.loads.values() if load.is_background]
    assert (batch is not None) + len(loads) <= 1, "two things are done in the background at once"
    assert batch is None or (batch.requests == (background.request,) and batch.quantum_s is None)
    where = None if batch is None else queues[batch.executor].spec.pool
    assert placement.background_runs_in == where, "a memory is taken to be in use, or free, and is not"


def check_leases(queues: Sequence[ExecutorQueue], batches: Batches, leases: Leases) -> None:
    """Who has begun holds a lease where it is, who has not waits for one, and nobody else does either."""
    leases.check_invariants()
    pools = {queue.spec.id: queue.spec.pool for queue in queues}
    begun: dict[int, str] = {}
    waiting: set[int] = set()
    for queue in queues:
        groups = list(queue.groups())
        ongoing = [group for group in groups if group.is_ongoing]
        to_begin = [group for group in groups if not group.is_ongoing and group.profile.performance.runs_in_quanta]
        assert sorted(map(id, ongoing)) == sorted(map(id, queue.ongoing.values())), "ongoing groups miscounted"
        assert set(to_begin) == set(queue.begins), "groups that have not begun are miscounted"
        begun.update((request, queue.spec.pool) for group in ongoing for request in group.requests)
        waiting.update(request for group in to_begin for request in group.requests)
    for batch in batches.all:
        if batch.quantum_s is not None:
            begun.update(dict.fromkeys(batch.requests, pools[batch.executor]))
    assert begun == leases.begun, f"leases are held by {leases.begun}, begun are {begun}"
    assert waiting == leases.waiting, "those who wait for a lease are not those who have not begun"
