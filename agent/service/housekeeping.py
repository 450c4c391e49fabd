"""Thread of periodic duties, one or several. A duty that may hang has a separate thread.

Guarantees: a duty that raises is logged, shown by ``failing``, and retried in the next step; other duties still run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
TOLD_AGAIN_STEPS = 120  # a minute: a duty that keeps failing stays visible at the log's end


class Housekeeper:
    """Runs every duty once per step, on a separate thread, every ``every_s`` seconds from ``start`` to ``stop``.

    ``failing``: duty -> error of its last run.
    """

    def __init__(
        self,
        duties: Mapping[str, Callable[[], None]],
        name: str = "housekeeper",
        every_s: float = HOUSEKEEPING_S,
    ) -> None:
        self.failing: Mapping[str, str] = {}
        self._every_s = every_s
        self._duties = dict(duties)
        self._in_a_row = dict.fromkeys(self._duties, 0)  # failures since the duty last succeeded
        self._stopping = threading.Event()
        self._began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Finish the current step; False after ``timeout_s``: a hanging step ends with the process."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """Seconds since the current step began; 0 between steps. For any thread."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def step(self) -> None:
        self._began_s = time.monotonic()
        self.failing = {duty: reason for duty in self._duties if (reason := self._do(duty)) is not None}
        self._began_s = None

    def _do(self, duty: str) -> str | None:
        try:
            self._duties[duty]()
        except Exception as error:  # boundary of the thread, which must outlive any failing duty
            failed = self._in_a_row[duty]
            self._in_a_row[duty] += 1
            if not failed % TOLD_AGAIN_STEPS:
                log.exception("housekeeping_failed duty=%s times=%d: it is tried again", duty, failed + 1)
            if isinstance(error, OSError) and error.filename is not None:
                return f"{os.fspath(error.filename)}: {error.strerror}"
            return f"{type(error).__name__}: {error}"
        if self._in_a_row[duty]:
            log.warning("housekeeping_works_again duty=%s failures=%d", duty, self._in_a_row[duty])
            self._in_a_row[duty] = 0
        return None

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self.step()
