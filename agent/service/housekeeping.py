"""A thread of what is due by time alone, one duty or several a step. Duties that may hang have each its own.

Guarantees: a duty that raises is logged, shown by ``failing``, and tried again in the next step, after the others.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
TOLD_AGAIN_STEPS = 120  # a minute: a duty that keeps failing is seen at the log's end, too


class Housekeeper:
    """Does every duty once a step: from ``start`` to ``stop`` on a thread of its own, every ``every_s`` seconds.

    ``failing``: duty -> why it failed in its last turn.
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
        """Finish the step under way; False after ``timeout_s``: a step that hangs ends with the process."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """Seconds of the step under way; 0 between steps. From any thread."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def step(self) -> None:
        self._began_s = time.monotonic()
        self.failing = {duty: reason for duty in self._duties if (reason := self._do(duty)) is not None}
        self._began_s = None

    def _do(self, duty: str) -> str | None:
        try:
            self._duties[duty]()
        except Exception as error:  # the boundary of the housekeeper's thread: it must outlive each of its duties
            failed = self._in_a_row[duty]
            self._in_a_row[duty] += 1
            if not failed % TOLD_AGAIN_STEPS:
                log.exception("housekeeping_failed duty=%s times=%d: it is tried again", duty, failed + 1)
            return f"{type(error).__name__}: {error}"
        if self._in_a_row[duty]:
            log.warning("housekeeping_works_again duty=%s failures=%d", duty, self._in_a_row[duty])
            self._in_a_row[duty] = 0
        return None

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self.step()
