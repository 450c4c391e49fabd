"""BatchSplitter: how many requests of a group run in one go (section 4.2, 'request splitting').

A batch that runs out of memory says that the box cannot hold it now, not that it never will: memory is fragmented for
a while, or somebody else took some of it. So the limit of that expert on that executor goes down at once and up slowly:

    out of memory with n requests     the limit becomes n / 2, at least 1
    ``patience`` good batches in a    the limit doubles, up to the profiled maximum; once it has held there for as long,
    row, each as large as the limit   it is forgotten

``patience`` begins at FIRST_PATIENCE and doubles at each further out-of-memory until the limit is forgotten, up to
LONGEST_PATIENCE: where memory really is too small one batch in a thousand finds that out again, not every other one.
A smaller batch says nothing about the limit, and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.core.performance import Performance

FIRST_PATIENCE = 16
LONGEST_PATIENCE = 1024


@dataclass(slots=True)
class ProvenLimit:
    """What memory has proved to allow one expert on one executor, and how many batches in a row it held for."""

    requests: int
    patience: int
    good_batches: int = 0


class BatchSplitter:
    """At most min(profiled maximum, what the free workspace holds now), and what memory has proved to allow."""

    def __init__(self) -> None:
        self._limits: dict[tuple[str, int], ProvenLimit] = {}

    def batch_size(self, expert: str, executor: int, performance: Performance, waiting: int, free_bytes: int) -> int:
        """Requests of the next batch, at least 1: every executor is owed the workspace of one image."""
        limit = min(performance.max_batch, waiting)
        proven = self._limits.get((expert, executor))
        if proven is not None:
            limit = min(limit, proven.requests)
        if performance.workspace_bytes:
            limit = min(limit, (free_bytes - performance.workspace_base_bytes) // performance.workspace_bytes)
        return max(limit, 1)

    def ran_out_of_memory(self, expert: str, executor: int, batch_size: int) -> None:
        before = self._limits.get((expert, executor))
        patience = FIRST_PATIENCE if before is None else min(before.patience * 2, LONGEST_PATIENCE)
        self._limits[expert, executor] = ProvenLimit(max(batch_size // 2, 1), patience)

    def ran(self, expert: str, executor: int, batch_size: int, max_batch: int) -> None:
        proven = self._limits.get((expert, executor))
        if proven is None or batch_size < proven.requests:
            return
        proven.good_batches += 1
        if proven.good_batches < proven.patience:
            return
        if proven.requests >= max_batch:
            del self._limits[expert, executor]
        else:
            proven.requests, proven.good_batches = min(proven.requests * 2, max_batch), 0
