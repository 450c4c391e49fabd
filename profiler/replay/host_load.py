"""A run's share of the box: cores, and the peak of resident memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

PEAK_RESET = "5"  # what /proc/self/clear_refs takes to forget the peak of resident memory (proc(5))
QUIET_FRACTION = 0.05  # of all cores: a larger use by other processes is reported


class CoresInUse:
    """Measures the cores' use by other processes, from construction on; ended children count as this process."""

    def __init__(self) -> None:
        self._all, self._busy, self._own = self._times()

    def others_fraction(self) -> float:
        """Share of all cores' time that other processes had; 0 while unknown."""
        everything, busy, own = self._times()
        passed_s = everything - self._all
        return min(max((busy - self._busy - (own - self._own)) / passed_s, 0.0), 1.0) if passed_s > 0 else 0.0

    def _times(self) -> tuple[float, float, float]:
        """Seconds of all cores: in all, busy, and of this process with its ended children."""
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # also in user
        idle = times.idle + getattr(times, "iowait", 0.0)
        return everything, everything - idle, own.user + own.system + own.children_user + own.children_system


def forget_peak_rss() -> None:
    """No-op where the system has no such file: the peak is then that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text(PEAK_RESET)
    except OSError:
        return


def peak_resident_bytes() -> int:
    """Peak of resident memory since ``forget_peak_rss``."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
