"""Readers of images, one for each place, such as a share: a place that hangs holds few callers, and none of another.

Guarantees: one call of a place runs at a time. A caller waits for its patience at most, a later one for half of it.
Once a call has run for longer than the patience, further callers are refused at once, until it ends.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from agent.faults.errors import OrderRefused, Reason
from experts.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Made = TypeVar("Made")

CALLERS = 2  # that wait with all of their patience: half of the station's threads for pictures
BUSY = "the disk of the image, or the box, is busy: ask again"


class PlaceReader:
    """For any thread. ``begin``: called first by the place's thread."""

    def __init__(self, name: str, begin: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = DaemonThreads(1, name, begin)
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._callers = 0
        self._began_s: float | None = None  # of the call that runs

    def made(self, make: Callable[[], Made], patience_s: float) -> Made:
        """Raises OrderRefused where the place does not answer in time, and what ``make`` raises."""
        with self._lock:
            runs_s = 0.0 if self._began_s is None else self._clock() - self._began_s
            if runs_s > patience_s:
                reason = f"the place of the image has not answered for {runs_s:.0f} s: check its share, and ask again"
                raise OrderRefused(Reason.NOT_NOW, reason, 5.0)
            self._callers += 1
            waits_s = patience_s if self._callers <= CALLERS else patience_s / 2
        making = self._thread.submit(self._timed, make)
        try:
            return making.result(waits_s)
        except TimeoutError:
            making.cancel()  # else those that nobody waits for any more would pile up
            raise OrderRefused(Reason.NOT_NOW, BUSY, 5.0) from None
        finally:
            with self._lock:
                self._callers -= 1

    def stop(self) -> None:
        self._thread.stop(0.0)

    def _timed(self, make: Callable[[], Made]) -> Made:
        self._began_s = self._clock()
        try:
            return make()
        finally:
            self._began_s = None
