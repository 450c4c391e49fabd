"""The process of ``coserve serve``: one line is served until a signal comes, or until its agent crashes.

Guarantees: a signal ends it whichever thread receives it and whenever it comes; one agent serves a line at a time.
"""

from __future__ import annotations

import logging
import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.records.database import state_held
from agent.service.line_service import LineService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.config import LineConfig

log = logging.getLogger(__name__)

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOLD = 0  # what is written where no signal is: no signal has this number


@dataclass(frozen=True, slots=True)
class _End:
    """A pipe that says when to end: by a signal's number, or TOLD."""

    reader: int
    writer: int

    def tell(self) -> None:
        """From any thread, at any moment."""
        with suppress(OSError):  # it is full of what says the same, or nobody waits any more
            os.write(self.writer, bytes([TOLD]))

    def wait(self) -> None:
        """Until somebody has told, or a signal has come; it may have come before."""
        while os.read(self.reader, 1)[0] not in (TOLD, *ENDING_SIGNALS):
            continue


@contextmanager
def _awaited_end() -> Iterator[_End]:
    """While it is open every signal that Python handles writes to its pipe.

    Not an Event or a queue that a handler sets. Handlers run on the main thread alone, and only between two of its
    instructions: a signal that another thread receives, or that comes after the last such look and before the main
    thread waits for the lock, leaves it waiting for good. The pipe is written to where the signal arrives.
    """
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield _End(reader, writer)
        finally:
            signal.set_wakeup_fd(before)
    finally:
        os.close(reader)
        os.close(writer)


def serve_line(config: LineConfig, progress: Callable[[str, int, int], None]) -> Mapping[str, Any]:
    """Serve until SIGTERM or SIGINT; what was done.

    Raises ConfigError before anything starts, AlreadyRunning, and AgentCrashed.
    """
    with state_held(config.state), _awaited_end() as end:
        service = LineService(config, progress, on_crash=end.tell)
        for number in ENDING_SIGNALS:
            signal.signal(number, lambda *_: None)  # the interpreter writes to the pipe before it comes to this
        service.start()
        end.wait()
        log.info("stopping line=%s", config.line)
        closing = service.stop()
        log.info("stopped line=%s %s", config.line, " ".join(f"{key}={value}" for key, value in closing.items()))
        return closing
