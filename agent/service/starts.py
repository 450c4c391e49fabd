"""Backoff between starts that end soon: systemd retries without limit.

Guarantees: the count survives any end; it is reset by a boot, HEALTHY_S of serving, a requested end of an agent that
serves or waits, and a mistake in the line file. An unwritable count costs the backoff, never the start.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from experts.backoff import Backoff
from experts.filesystem import whole_text_file

FREE_STARTS = 3  # without a pause: one for the failure, one for an image that ended the agent twice
BACKOFF = Backoff(5.0, 300.0)
HEALTHY_S = 120.0
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Starts:
    """Starts of one line's agent since it last served for HEALTHY_S."""

    def __init__(self, state: Path, boot: Path = BOOT) -> None:
        self._file = state / "starts.json"
        self._boot = boot
        self._ready_s: float | None = None

    def begin(self) -> float:
        """Count a start; returns the seconds to wait before it."""
        boot, starts = "", 1
        with suppress(OSError):
            boot = self._boot.read_text().strip()
        with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            then = json.loads(self._file.read_text())
            starts += int(then["starts"]) if then["boot"] == boot else 0
        with suppress(OSError), whole_text_file(self._file) as file:
            json.dump({"boot": boot, "starts": starts}, file)
        return BACKOFF.pause_s(starts - FREE_STARTS)

    def served(self, now_s: float) -> None:
        """Call it while serving: HEALTHY_S of it reset the count."""
        self._ready_s = now_s if self._ready_s is None else self._ready_s
        if now_s - self._ready_s >= HEALTHY_S:
            self.forget()

    def forget(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
