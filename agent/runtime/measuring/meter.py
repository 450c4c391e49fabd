"""Memory of running batches, by the system's counters.

On Linux's CPUs: the high-water mark of this process's resident memory, without pages of files. On CUDA: the allocator's
peak. Both count bytes above those held when the meter was made, including memory that a runtime keeps for its next
batch. Linux sums the resident pages of each core in bundles, so a mark may be too low by up to ``UNCOUNTED_BYTES``.
"""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from agent.runtime.machine.box import torch_device
from agent.runtime.machine.heap import give_back_unused

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESS = Path("/proc/self")
RESET_PEAK = "5"  # written to clear_refs: VmHWM starts again from VmRSS
TRIAL_BYTES = 128 * 1024 * 1024  # glibc's malloc keeps 32 MiB on its heap at most
UNCOUNTED_BYTES = 32 * 1024 * 1024  # tolerance of a trial's mark
TRIALS = 3  # other threads may release memory during a trial


class ResidentMeter:
    """Resident memory of this process, with all of its threads. For one thread at a time."""

    def __init__(self) -> None:
        gc.collect()  # now, not during a run
        give_back_unused()
        self._held_bytes = _status_bytes("RssAnon")

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Peak bytes of this run, above those held when the meter was made."""
        give_back_unused()
        (PROCESS / "clear_refs").write_text(RESET_PEAK)
        run()
        of_files_bytes = _status_bytes("RssFile") + _status_bytes("RssShmem")
        return max(_status_bytes("VmHWM") - of_files_bytes - self._held_bytes, 0)


class CudaMeter:
    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._held_bytes: int = torch.cuda.memory_allocated()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return max(int(torch.cuda.max_memory_allocated()) - self._held_bytes, 0)


WorkspaceMeter: TypeAlias = ResidentMeter | CudaMeter


def meter_for(processor: str) -> WorkspaceMeter | None:
    """Meter of the memory of a processor's batches; None if unmeasurable."""
    device = torch_device(processor)
    if device == "cuda":
        return CudaMeter()
    return ResidentMeter() if device == "cpu" and sees_allocations() else None


@cache
def sees_allocations() -> bool:
    """True if the mark shows memory allocated and released twice: some allocators keep it."""
    return any(min(trial_peaks()) >= TRIAL_BYTES - UNCOUNTED_BYTES for _ in range(TRIALS))


def trial_peaks() -> tuple[int, int]:
    if sys.platform != "linux":
        return 0, 0
    with suppress(OSError, KeyError, AttributeError):
        meter = ResidentMeter()
        return meter.peak_bytes(_take_and_give_back), meter.peak_bytes(_take_and_give_back)
    return 0, 0


def _take_and_give_back() -> None:
    np.ones(TRIAL_BYTES, dtype=np.uint8)


def _status_bytes(key: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    values = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return int(values[key].removesuffix("kB")) * 1024
