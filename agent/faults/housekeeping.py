"""Duties by time: the thread that runs them, one or several, and rounds of work that is done in short steps.

Guarantees: a duty that raises is logged, shown by ``failing``, and retried in the next step; other duties still run.
A duty that may hang has a separate thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
LOGGED_AGAIN_STEPS = 120  # a minute: a duty that keeps failing stays visible at the log's end


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
            if not failed % LOGGED_AGAIN_STEPS:
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


class Rounds(ABC):
    """Duty of one round of work after another, each when due. Call ``step`` from one thread at a time.

    ``clock``: monotonic seconds; ``due_s``: time of the next round.
    """

    def __init__(self, clock: Callable[[], float], due_s: float) -> None:
        self._clock = clock
        self._due_s = due_s
        self._round: Generator[None, None, None] | None = None

    def step(self) -> None:
        """Do a part of a round, if one is due. After an OSError, which is raised, the next step begins a new round."""
        if self._round is None and self._clock() < self._due_s:
            return
        under_way, self._round = self._round or self._steps(), None
        with suppress(StopIteration):
            next(under_way)
            self._round = under_way

    def stop(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None

    @abstractmethod
    def _steps(self) -> Generator[None, None, None]:
        """Steps of one round; its end sets ``_due_s``."""
