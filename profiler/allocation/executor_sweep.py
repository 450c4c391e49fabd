"""Sweep over executors of the device, then of the CPU (CoServe, section 5.3, Figure 17).

Guarantees: pure but for the given throughput; no pair of counts is run twice; the best run is chosen, of equal ones the
run with the fewest executors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DECLINES = 2  # in a row: more executors only get in one another's way (section 5.3)


@dataclass(frozen=True, slots=True)
class ExecutorCounts:
    device: int
    cpu: int


@dataclass(slots=True)
class ExecutorSweep:
    """Runs each pair of counts once. ``steps``: throughputs in order; None where memory does not hold so many."""

    throughput: Callable[[ExecutorCounts], float | None]
    steps: dict[ExecutorCounts, float | None] = field(default_factory=dict)

    @property
    def best(self) -> ExecutorCounts | None:
        """The best run, of equal ones the one with the fewest executors; None where no run was possible."""
        able = [
            (value, -counts.device - counts.cpu, counts) for counts, value in self.steps.items() if value is not None
        ]
        return max(able, key=lambda each: each[:2])[2] if able else None

    def value(self, counts: ExecutorCounts) -> float | None:
        if counts not in self.steps:
            self.steps[counts] = self.throughput(counts)
        return self.steps[counts]

    def climb(self, ascending: Iterable[ExecutorCounts]) -> None:
        """Runs counts until DECLINES in a row are no better than the best, or one cannot be run."""
        best: float | None = None
        fallen = 0
        for counts in ascending:
            value = self.value(counts)
            if best is not None and (value is None or (fallen + 1 == DECLINES and value <= best)):
                return
            if value is not None:
                best, fallen = (value, 0) if best is None or value > best else (best, fallen + 1)


def executor_sweep(
    throughput: Callable[[ExecutorCounts], float | None], most_device: int, most_cpu: int
) -> ExecutorSweep:
    """Sweep device executors from 1 on beside one of the CPU, then, with the best count, CPU executors from none on.

    ``most_device`` 0: a box with a CPU only; ``most_cpu`` 0: a CPU that runs no experts. Each row ends after DECLINES
    counts in a row that are no better than its best. The paper begins with one CPU executor, and never tries none.
    """
    sweep = ExecutorSweep(throughput)
    beside = min(most_cpu, 1)
    if most_device:
        sweep.climb(ExecutorCounts(device, beside) for device in range(1, most_device + 1))
    best = sweep.best
    device = best.device if best else min(most_device, 1)
    sweep.climb(ExecutorCounts(device, cpu) for cpu in range(0 if device else 1, most_cpu + 1))
    return sweep
