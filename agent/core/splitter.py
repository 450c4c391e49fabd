"""BatchSplitter: how many requests of a group run in one go (section 4.2, 'request splitting')."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.core.performance import Performance


class BatchSplitter:
    """At most min(profiled maximum, what the free workspace holds now), and what memory has proved to allow."""

    def __init__(self) -> None:
        self._proven_limit: dict[tuple[str, int], int] = {}

    def batch_size(self, expert: str, executor: int, performance: Performance, waiting: int, free_bytes: int) -> int:
        """Requests of the next batch, at least 1: every executor is owed the workspace of one image."""
        limit = min(performance.max_batch, waiting, self._proven_limit.get((expert, executor), performance.max_batch))
        if performance.workspace_bytes:
            limit = min(limit, (free_bytes - performance.workspace_base_bytes) // performance.workspace_bytes)
        return max(limit, 1)

    def ran_out_of_memory(self, expert: str, executor: int, batch_size: int) -> None:
        """The box could not hold a batch of this size after all: from now on at most half of it."""
        self._proven_limit[expert, executor] = max(batch_size // 2, 1)
