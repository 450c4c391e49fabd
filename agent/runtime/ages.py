"""Ages of batches and loads without an answer.

Work that hangs in the kernel or a driver never answers. Past one limit its age is logged, past another it ends the
agent: another process asks the drive and the device anew. An age ends the agent only ``ended_s - told_s`` after it was
logged: a process that was suspended goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.core.effects import StartBatch, StartLoad
from agent.core.performance import SSD
from experts.errors import WorkOverdue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.core.performance import ExecutorSpec, PerformanceMatrix
    from agent.core.request import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgeLimits:
    """Ages of an open batch or load: the larger of seconds and a multiple of the predicted time.

    Generous: a cold disk and a packing beside batches cost many times the prediction.
    """

    told_s: float = 120.0
    told_multiple: float = 20.0
    ended_s: float = 600.0
    ended_multiple: float = 100.0

    def told_after_s(self, predicted_s: float) -> float:
        return max(self.told_s, self.told_multiple * predicted_s)

    def ended_after_s(self, predicted_s: float) -> float:
        return max(self.ended_s, self.ended_multiple * predicted_s)


@dataclass(slots=True)
class _Opened:
    """``told_at_s``: when its age was logged; None: not yet."""

    effect: StartBatch | StartLoad
    opened_at_s: float
    predicted_s: float
    told_at_s: float | None = None

    def due_s(self, limits: AgeLimits) -> float:
        told_after_s = limits.told_after_s(self.predicted_s)
        if self.told_at_s is None:
            return self.opened_at_s + told_after_s
        return self.told_at_s + limits.ended_after_s(self.predicted_s) - told_after_s


class OpenWork:
    """The batches and loads under way, by number. For one thread, which gives the time in monotonic seconds.

    ``ssd_bytes_per_s``: rate that loads from the SSD are held to.
    """

    def __init__(
        self,
        limits: AgeLimits,
        executors: Sequence[ExecutorSpec],
        matrix: PerformanceMatrix,
        ssd_bytes_per_s: float | None = None,
    ) -> None:
        self._limits = limits
        self._processors = {spec.id: spec.processor for spec in executors}
        self._columns = matrix.experts
        self._ssd_bytes_per_s = ssd_bytes_per_s
        self._batches: dict[int, _Opened] = {}
        self._loads: dict[int, _Opened] = {}

    def predict_by(self, matrix: PerformanceMatrix) -> None:
        self._columns = matrix.experts

    @property
    def batches(self) -> int:
        return len(self._batches)

    @property
    def loads(self) -> int:
        return len(self._loads)

    def open_batch(self, effect: StartBatch, now: float) -> None:
        self._batches[effect.batch.id] = _Opened(effect, now, self._batch_s(effect.batch))

    def runs_on(self, executor: int) -> bool:
        return any(
            isinstance(opened.effect, StartBatch) and opened.effect.batch.executor == executor
            for opened in self._batches.values()
        )

    def open_load(self, effect: StartLoad, now: float) -> None:
        waiting = [opened.effect for opened in self._loads.values()]
        waiting_bytes = sum(each.size_bytes for each in waiting if isinstance(each, StartLoad))
        predicted_s = self._load_s(effect, waiting_bytes + effect.size_bytes)
        self._loads[effect.load] = _Opened(effect, now, predicted_s)

    def close_batch(self, batch: int) -> Batch | None:
        opened = self._batches.pop(batch, None)
        return opened.effect.batch if opened is not None and isinstance(opened.effect, StartBatch) else None

    def close_load(self, load: int) -> None:
        self._loads.pop(load, None)

    def oldest_batch_s(self, now: float) -> float | None:
        return _oldest_s(self._batches.values(), now)

    def oldest_load_s(self, now: float) -> float | None:
        return _oldest_s(self._loads.values(), now)

    def next_due_s(self) -> float | None:
        return min((opened.due_s(self._limits) for opened in self._all()), default=None)

    def look(self, now: float) -> None:
        """Log ages past the first limit. Raises WorkOverdue past the second."""
        for opened in self._all():
            if now < opened.due_s(self._limits):
                continue
            age_s = now - opened.opened_at_s
            if opened.told_at_s is not None:
                is_batch = isinstance(opened.effect, StartBatch)
                raise WorkOverdue(_described(opened.effect), age_s, _advice(opened.effect), is_batch=is_batch)
            opened.told_at_s = now
            logger.error(
                "overdue age_s=%.0f predicted_s=%.1f: %s has not answered; the agent ends in %.0f s if it does not",
                age_s, opened.predicted_s, _described(opened.effect), opened.due_s(self._limits) - now,
            )  # fmt: skip

    def _batch_s(self, batch: Batch) -> float:
        """Section 4.2's prediction, or the batch's quantum, which has one iteration at least; 0 where unknown."""
        row = self._columns[self._processors[batch.executor]].get(batch.expert)
        batch_s = 0.0 if row is None else row.performance.latency_s(len(batch.requests))
        return batch_s if batch.quantum_s is None else max(batch_s, batch.quantum_s)

    def _load_s(self, effect: StartLoad, waiting_bytes: int) -> float:
        """``waiting_bytes``: of this load and those before it on the same link."""
        rows = (column.get(effect.expert) for column in self._columns.values())
        measured_s = max((row.load_s.get(effect.source, 0.0) for row in rows if row is not None), default=0.0)
        if effect.source != SSD or self._ssd_bytes_per_s is None:
            return measured_s
        return max(measured_s, waiting_bytes / self._ssd_bytes_per_s)

    def _all(self) -> tuple[_Opened, ...]:
        return (*self._batches.values(), *self._loads.values())


def _oldest_s(opened: Iterable[_Opened], now: float) -> float | None:
    return max((now - each.opened_at_s for each in opened), default=None)


def _described(effect: StartBatch | StartLoad) -> str:
    if isinstance(effect, StartLoad):
        return f"the load of {effect.expert} from {effect.source} to {effect.pool}"
    return f"the batch of {len(effect.batch.requests)} for {effect.batch.expert} on executor {effect.batch.executor}"


def _advice(effect: StartBatch | StartLoad) -> str:
    if isinstance(effect, StartLoad) and effect.source == SSD:
        return "look for errors of the drive under `state` in dmesg"
    return "look for errors of the device and of its driver in dmesg"
