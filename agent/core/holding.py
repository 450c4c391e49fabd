"""Holding: whether an executor is given its next batch while one runs, so that it goes from one to the other at once.

Between an answer and the next start lie two threads that wake and a decision; an executor of small experts would be
idle for a tenth of its time. What it holds cannot be taken back, so it is given one batch ahead, never more, and only
where waiting for the answer could make nothing better:

    the batch is full: nobody who comes later could join it
    it is of the first group, so nobody is passed by it who was not to be passed anyway
    its images are prepared, or the shell was told to begin them
    its expert is in memory, and stays there; another expert than the running one's only while nobody lacks room there,
    and none while somebody there has waited beyond the overtaking bound, when this was last looked at
    it takes no more workspace than what runs, and so no more than is taken already
    nothing here counts in tokens: quanta and images take turns, and whose turn it is shows only when one is over
    its requests did not fail before, and what runs is work of the line

Policies that load nothing while an executor runs decide one batch at a time, as they were published.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from agent.core.ahead import PreparedAhead
    from agent.core.placement import Placement
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.request import Batch
    from agent.core.splitter import BatchSplitter


@dataclass(slots=True, eq=False)
class Holding:
    _placement: Placement
    _splitter: BatchSplitter
    _ahead: PreparedAhead
    is_on: bool
    _overdue: Collection[str] = ()  # memories that lack room beyond the overtaking bound
    _short: Collection[str] = ()  # memories that lack room at all

    def look(self, overdue: Collection[str], short: Collection[str]) -> None:
        self._overdue, self._short = overdue, short

    def size(self, queue: ExecutorQueue, running: Batch) -> int:
        """How many requests of its first group an executor is given behind the batch that it runs; 0: not now."""
        group = queue.head
        if group is None or group.alone or queue.ongoing or queue.begins or running.quantum_s is not None:
            return 0
        performance = group.profile.performance
        pool = self._placement.pools[queue.spec.pool]
        free_bytes = pool.workspace_for(queue.spec.id) + running.workspace_bytes
        executor, most = queue.spec.id, performance.max_batch
        size = self._splitter.batch_size(group.expert, executor, performance, most, free_bytes)
        if len(group.requests) < size or performance.workspace_for(size) > running.workspace_bytes:
            return 0
        is_ready = self._may_stay(pool, group, running) and self._ahead.are_begun(islice(group.requests, size))
        return size if is_ready else 0

    def _may_stay(self, pool: ModelPool, group: Group, running: Batch) -> bool:
        copy = group.profile.copy
        if pool.name in self._overdue or not self._placement.may_use(pool, copy):
            return False
        return copy == running.copy or pool.name not in self._short
