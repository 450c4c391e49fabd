"""Ages of batches and loads without an answer.

Work that hangs in the kernel or a driver never answers. Past one limit its age is logged; past another the agent ends,
as only a new process can reopen the drive and the device. At least ``ended_s - logged_s`` pass between log line and
end, so a suspended and resumed process survives. A device whose times are known has the shorter limits.
"""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agent.core.performance import SSD, tier_of
from agent.faults.errors import WorkOverdue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.core.effects import StartLoad
    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch

logger = logging.getLogger(__name__)

DRIVE_ADVICE = "look for errors of the drive under `state` in dmesg"
DEVICE_ADVICE = "look for errors of the device and of its driver in dmesg"

Work = TypeVar("Work")


@dataclass(frozen=True, slots=True)
class AgeLimits:
    """Ages of an open batch or load: the larger of seconds and a multiple of the predicted time.

    Generous: a cold disk and a packing beside batches cost many times the prediction.
    """

    logged_s: float = 120.0
    logged_multiple: float = 20.0
    ended_s: float = 600.0
    ended_multiple: float = 100.0


IN_WORKERS = AgeLimits(logged_s=30.0, ended_s=120.0)  # a worker that is killed starts again at once
ON_DEVICES = AgeLimits(logged_s=15.0, ended_s=60.0)  # no disk, no packing: what is predicted of a device holds there


@dataclass(slots=True)
class OpenedWork(Generic[Work]):
    """``logged_at_s``: time its age was logged; None: not yet."""

    limits: AgeLimits
    work: Work
    described: str
    advice: str
    opened_at_s: float
    predicted_s: float
    logged_at_s: float | None = None

    @property
    def due_s(self) -> float:
        limits = self.limits
        logged_after_s = max(limits.logged_s, limits.logged_multiple * self.predicted_s)
        if self.logged_at_s is None:
            return self.opened_at_s + logged_after_s
        return self.logged_at_s + max(limits.ended_s, limits.ended_multiple * self.predicted_s) - logged_after_s


class OpenWork:
    """Batches and loads under way, by number. For one thread; times are monotonic seconds.

    ``ssd_bytes_per_s``: limit on the rate of loads from the SSD.
    """

    def __init__(
        self,
        limits: AgeLimits,
        executors: Sequence[ExecutorSpec],
        matrix: PerformanceMatrix,
        ssd_bytes_per_s: float | None = None,
    ) -> None:
        self._limits = limits
        self._specs = {spec.id: spec for spec in executors}
        self._columns = matrix.experts
        self._ssd_bytes_per_s = ssd_bytes_per_s
        self.batches: dict[int, OpenedWork[Batch]] = {}
        self.loads: dict[int, OpenedWork[StartLoad]] = {}

    def predict_by(self, matrix: PerformanceMatrix) -> None:
        self._columns = matrix.experts

    def know_executors(self, executors: Sequence[ExecutorSpec]) -> None:
        self._specs |= {spec.id: spec for spec in executors}

    def open_batch(self, batch: Batch, now: float) -> None:
        """Record a batch. Predicted time: by section 4.2, or the quantum, at least one iteration; 0 if unknown."""
        described = f"the batch of {len(batch.requests)} for {batch.expert} on executor {batch.executor}"
        row = self._columns[self._specs[batch.executor].processor].get(batch.expert)
        batch_s = 0.0 if row is None else row.performance.latency_s(len(batch.requests))
        predicted_s = max(batch_s, batch.undisturbed_s or batch.quantum_s or 0.0)
        spec = self._specs[batch.executor]
        limits = self._limits_in(spec.pool, is_on_device=tier_of(spec.processor) != "cpu" and predicted_s > 0.0)
        self.batches[batch.id] = OpenedWork(limits, batch, described, DEVICE_ADVICE, now, predicted_s)

    def runs_on(self, executor: int) -> bool:
        return any(opened.work.executor == executor for opened in self.batches.values())

    def runs_quantum(self, executor: int) -> bool:
        works = (opened.work for opened in self.batches.values())
        return any(batch.executor == executor and batch.quantum_s is not None for batch in works)

    def open_load(self, effect: StartLoad, now: float) -> None:
        described = f"the load of {effect.expert} from {effect.source} to {effect.pool}"
        advice = DRIVE_ADVICE if effect.source == SSD else DEVICE_ADVICE
        rows = (column.get(effect.expert) for column in self._columns.values())
        predicted_s = max((row.load_s.get(tier_of(effect.source), 0.0) for row in rows if row is not None), default=0.0)
        if effect.source == SSD and self._ssd_bytes_per_s is not None:  # after all loads on the link
            waiting_bytes = sum(opened.work.size_bytes for opened in self.loads.values()) + effect.size_bytes
            predicted_s = max(predicted_s, waiting_bytes / self._ssd_bytes_per_s)
        limits = self._limits_in(effect.pool, is_on_device=effect.source != SSD and predicted_s > 0.0)
        self.loads[effect.load] = OpenedWork(limits, effect, described, advice, now, predicted_s)

    def close_batch(self, batch: int) -> OpenedWork[Batch] | None:
        return self.batches.pop(batch, None)

    def close_load(self, load: int) -> None:
        self.loads.pop(load, None)

    def next_due_s(self) -> float | None:
        return min((opened.due_s for opened in self._all()), default=None)

    def look(self, now: float) -> None:
        """Log ages past the first limit. Raises WorkOverdue past the second."""
        for opened in self._all():
            if now < opened.due_s:
                continue
            age_s = now - opened.opened_at_s
            if opened.logged_at_s is not None:
                is_batch = opened in self.batches.values()
                pool = self._specs[opened.work.executor].pool if is_batch else opened.work.pool
                raise WorkOverdue(opened.described, age_s, opened.advice, pool, is_batch=is_batch)
            opened.logged_at_s = now
            logger.error(
                "overdue age_s=%.0f predicted_s=%.1f: %s has not answered; its process ends in %.0f s if it does not",
                age_s, opened.predicted_s, opened.described, opened.due_s - now,
            )  # fmt: skip

    def _limits_in(self, pool: str, *, is_on_device: bool) -> AgeLimits:
        limits = self._limits if tier_of(pool) == pool else IN_WORKERS
        return AgeLimits(*map(min, astuple(limits), astuple(ON_DEVICES))) if is_on_device else limits

    def _all(self) -> tuple[OpenedWork[Any], ...]:
        return (*self.batches.values(), *self.loads.values())
