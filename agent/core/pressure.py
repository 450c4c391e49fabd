"""MemoryPressure: a box that has less memory than was planned with, as loads and batches that run short of it show.

    a load ran short              its memory keeps to what lay there then; the load is tried again, as any that failed
    a batch of one ran short      its memory keeps to so much less as the batch would have taken; what no expert there
                                  can make room for comes off what begun requests may lease, the youngest first
    no shortage for a while       half of what was taken off a budget comes back, then half of the rest, then all
    a copy fails too often        who waits for it there waits where the expert can still be had

Guarantees: no budget is lower than what each expert of the line needs to run there, whatever ran short and however the
line changes, and none for leases lower than the most that anybody may need who was taken; what one is lowered by leaves
that memory first, but for what is in use. The pauses without shortage begin
at ``budget_pause_s`` and double up to ``longest_budget_pause_s`` until one has passed with the whole budget back: where
memory really is too small that is found out again once a day, not every minute. A memory that is taken in one piece at
the start keeps its budget: what leaves it makes no room for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.effects import BudgetChanged, LeasesChanged
from agent.core.placement import footprints_in
from agent.core.pool import least_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.core.effects import Effect
    from agent.core.performance import ExecutorSpec, ExpertProfile, Limits, PerformanceMatrix
    from agent.core.placement import Placement
    from agent.core.pool import ModelPool
    from agent.core.queue import ExecutorQueue

NO_SHORTAGE = "it did not run short again"
LITTLE = 8  # what is less than this part of a share for leases comes back at once; arbitrary
NOWHERE: frozenset[int] = frozenset()
LARGER_EXPERTS = "the line has larger experts now"


@dataclass(slots=True)
class _Lowered:
    """A memory whose budget was lowered: how long it is left at what it is, and until when."""

    pause_s: float
    until_s: float


@dataclass(slots=True, eq=False)
class MemoryPressure:
    _queues: Sequence[ExecutorQueue]
    _placement: Placement
    _limits: Limits
    _matrix: PerformanceMatrix
    _homes: Mapping[str, ExecutorSpec]
    _lowered: dict[str, _Lowered] = field(default_factory=dict)

    def change_line(self, matrix: PerformanceMatrix, homes: Mapping[str, ExecutorSpec], effects: list[Effect]) -> None:
        """From now on by these experts: a budget that was lowered is raised to what they need."""
        self._matrix, self._homes = matrix, homes
        for pool in [self._placement.pools[name] for name in self._lowered]:
            needed_bytes = min(self._least_bytes(pool), pool.spec.expert_bytes)
            self._set_budget(pool, max(pool.expert_bytes, needed_bytes), LARGER_EXPERTS, effects)

    # -- budgets --

    @property
    def is_lasting(self) -> bool:
        return bool(self._lowered)

    def ran_short(self, pool: ModelPool, to_bytes: int, reason: str, now: float, effects: list[Effect]) -> None:
        if pool.spec.is_one_piece:
            return
        target_bytes = max(to_bytes, self._least_bytes(pool))
        if target_bytes < pool.expert_bytes:
            self._placement.shrink(pool, target_bytes, effects)
            self._set_budget(pool, max(target_bytes, pool.used_bytes), reason, effects)
        if pool.missing_bytes:
            self._pause(pool, now)

    def lower_leases(self, pool: ModelPool, to_bytes: int, reason: str, now: float, effects: list[Effect]) -> None:
        self._set_leases(pool, max(to_bytes, pool.lease_used_bytes), reason, effects)
        if pool.missing_lease_bytes:
            self._pause(pool, now)

    def _pause(self, pool: ModelPool, now: float) -> None:
        pause_s = self._lowered[pool.name].pause_s if pool.name in self._lowered else self._limits.budget_pause_s
        self._lowered[pool.name] = _Lowered(pause_s, now + pause_s)

    def next_relief_s(self) -> float | None:
        return min((each.until_s for each in self._lowered.values()), default=None)

    def relieve(self, now: float, effects: list[Effect]) -> bool:
        """Give back to budgets what is due; True if there was any."""
        due = [name for name, each in self._lowered.items() if each.until_s <= now]
        for name in due:
            pool, lowered = self._placement.pools[name], self._lowered.pop(name)
            if pool.missing_bytes or pool.missing_lease_bytes:
                is_little = pool.missing_bytes <= self._least_bytes(pool)
                kept_bytes = 0 if is_little else pool.missing_bytes // 2
                self._set_budget(pool, pool.spec.expert_bytes - kept_bytes, NO_SHORTAGE, effects)
                is_little = pool.missing_lease_bytes <= pool.spec.lease_bytes // LITTLE
                kept_bytes = 0 if is_little else pool.missing_lease_bytes // 2
                self._set_leases(pool, pool.spec.lease_bytes - kept_bytes, NO_SHORTAGE, effects)
                pause_s = min(lowered.pause_s * 2, self._limits.longest_budget_pause_s)
                self._lowered[name] = _Lowered(pause_s, now + pause_s)
        return bool(due)

    def _set_budget(self, pool: ModelPool, to_bytes: int, reason: str, effects: list[Effect]) -> None:
        before_bytes = pool.expert_bytes
        if to_bytes != before_bytes:
            pool.set_budget(to_bytes)
            effects.append(BudgetChanged(pool.name, before_bytes, to_bytes, reason))

    def _set_leases(self, pool: ModelPool, to_bytes: int, reason: str, effects: list[Effect]) -> None:
        before_bytes = pool.lease_bytes
        if to_bytes != before_bytes:
            pool.set_lease_budget(to_bytes)
            effects.append(LeasesChanged(pool.name, before_bytes, to_bytes, reason))

    def _least_bytes(self, pool: ModelPool) -> int:
        users = [queue.spec for queue in self._queues if queue.spec.pool == pool.name]
        return least_bytes(footprints_in(pool.name, users, self._matrix.experts, self._homes))

    # -- other executors --

    def has_alternative(self, expert: str, pool: str, copy: str, now: float) -> bool:
        """Is there an executor that the expert can be had on, but for this copy in this memory?"""
        return any(
            not self._placement.is_barred(spec.pool, row.copy, now)
            and (row.copy != copy or not self._comes_through(spec, copy, pool))
            for spec, row in self._able(expert)
        )

    def barred(self, expert: str, now: float) -> frozenset[int]:
        if not self._placement.has_setbacks:
            return NOWHERE
        able = self._able(expert)
        return frozenset(spec.id for spec, row in able if self._placement.is_barred(spec.pool, row.copy, now))

    def stranded(self, expert: str, now: float) -> list[int]:
        barred = self.barred(expert, now)
        return [
            request
            for queue in self._queues
            if queue.spec.id in barred
            for group in queue.groups()
            if group.expert == expert
            for request in group.requests
        ]

    def _able(self, expert: str) -> Iterator[tuple[ExecutorSpec, ExpertProfile]]:
        for queue in self._queues:
            row = self._matrix.experts[queue.spec.processor].get(expert)
            if row is not None:
                yield queue.spec, row

    def _comes_through(self, spec: ExecutorSpec, copy: str, pool: str) -> bool:
        """Has the copy to be in this memory for the executor to run it?"""
        own = self._placement.pools[spec.pool]
        return pool == own.name or (pool == own.spec.cache and own.entry(copy) is None)
