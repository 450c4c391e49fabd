"""CoServe Best: the executors and the memory with the highest throughput on a sample (CoServe, sections 4.4 and 5.3).

First the executors are swept at an unsearched memory. Then the decay window slides over the memory of a GPU that has
one of its own; the bounds of later windows are run as well, because throughput on a sample does not rise in a line. In
unified memory the batches get their maximum, as section 4.4 has it for limited processors. CPU executors are limited to
those that a box would be given, whose operators use several cores each.

Guarantees: simulated, seeded, and every run is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.deployment.executors import CORES_PER_CPU_EXECUTOR
from experts.errors import ConfigError
from profiler.allocation.decay_window import WindowSearch, decay_window_search, decay_windows
from profiler.allocation.executor_sweep import ExecutorCounts, executor_sweep
from proof.paper.devices import CPU, GPU
from proof.paper.systems import CASUAL_FRACTION, System, SystemRow, most_experts, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proof.paper.devices import PaperDevice
    from proof.paper.tasks import PaperTask

MOST_GPU_EXECUTORS = 8  # a sweep ends before, once more of them are no better


@dataclass(frozen=True, slots=True)
class Best:
    """Best configuration of a policy on one board and device, with all runs of the search.

    ``executors``: figure 17, the GPU's beside one of the CPU, then the CPU's. ``memory``: figure 18, in ascending order
    of experts, all bounds of windows that fit; empty where the memory is unified, and ``search`` None.
    """

    board: str
    device: str
    system: System
    executors: tuple[SystemRow, ...]
    memory: tuple[SystemRow, ...]
    search: WindowSearch | None

    @property
    def gpu_sweep(self) -> tuple[SystemRow, ...]:
        """GPU executors beside one of the CPU, in ascending order; none where memory does not hold one of each."""
        return _ascending(self.executors, GPU, CPU, 1)

    @property
    def cpu_sweep(self) -> tuple[SystemRow, ...]:
        """CPU executors beside those of the GPU that were best beside one, in ascending order."""
        beside_one = max(self.gpu_sweep, key=lambda row: row.images_per_s, default=None)
        chosen = self.system if beside_one is None else beside_one
        return _ascending(self.executors, CPU, GPU, chosen.executors[GPU])


def search_best(device: PaperDevice, sample: PaperTask, board: str, start: System) -> Best:
    """The best executors and memory for a system on a sample. ``start``: everything else about it.

    The sweep ends where memory holds no more executors. Raises ConfigError where it does not even hold one.
    """
    start = replace(start, experts=None, expert_fraction=CASUAL_FRACTION if device.is_split else None)
    tried: list[SystemRow] = []
    refused: list[ConfigError] = []

    def of_executors(counts: ExecutorCounts) -> float | None:
        try:
            tried.append(simulate(replace(start, executors={GPU: counts.device, CPU: counts.cpu}), device, sample))
        except ConfigError as error:
            refused.append(error)
            return None
        return tried[-1].images_per_s

    most_cpu = max(device.cores.value // CORES_PER_CPU_EXECUTOR, 1)
    counts = executor_sweep(of_executors, MOST_GPU_EXECUTORS, most_cpu).best
    if counts is None:
        raise refused[0]
    best = replace(start, executors={GPU: counts.device, CPU: counts.cpu})
    if not device.is_split:
        return Best(board, device.device, best, tuple(tried), (), None)
    rows: dict[int, SystemRow] = {}

    def of_memory(experts: int) -> float:
        if experts not in rows:
            rows[experts] = simulate(replace(best, experts=experts), device, sample)
        return rows[experts].images_per_s

    most = most_experts(best, device, sample)
    search = decay_window_search(of_memory, most)
    for window in decay_windows(most):
        of_memory(window.upper)
    memory = tuple(rows[experts] for experts in sorted(rows))
    chosen = max(rows, key=lambda experts: (rows[experts].images_per_s, experts))
    return Best(board, device.device, replace(best, experts=chosen), tuple(tried), memory, search)


def highest(rows: Sequence[SystemRow]) -> int:
    return max(range(len(rows)), key=lambda number: rows[number].images_per_s)


def _ascending(rows: tuple[SystemRow, ...], counted: str, beside: str, count: int) -> tuple[SystemRow, ...]:
    chosen = [row for row in rows if row.executors.get(beside, 0) == count]
    return tuple(sorted(chosen, key=lambda row: row.executors.get(counted, 0)))
