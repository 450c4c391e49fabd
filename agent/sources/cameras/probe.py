"""Fetches one frame of a camera, to check the line file."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING

from agent.sources.cameras import wire
from agent.sources.cameras.process import ChildProcess, Received, connection_of
from agent.sources.cameras.supervision import ProcessEnded

if TYPE_CHECKING:
    from agent.line_file.intake import CameraSection
    from agent.sources.cameras.process import Heard

END_S = 1.0  # for a regular end of the process


def probe(config: CameraSection, password: str | None, timeout_s: float) -> str | None:
    """None if a readable frame arrived within ``timeout_s``; else the reason.

    A camera that admits one viewer fails while an agent serves the line.
    """
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout_s
    try:
        process = ChildProcess(connection_of(config, password), heard.put)
    except OSError as error:
        return f"no process can be started: {error.strerror}"
    try:
        process.ask(wire.Take(1, since=None))
        return _first_frame(heard, deadline, timeout_s)
    finally:
        process.close()
        if not process.join(END_S):
            process.kill()


def _first_frame(heard: queue.SimpleQueue[Heard], deadline: float, timeout_s: float) -> str | None:
    seen = "it does not answer"
    while True:
        try:
            said = heard.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return f"no frame within {timeout_s:g} s: {seen}"
        match said:
            case Received():
                return None
            case wire.Failed(reason):
                return reason
            case ProcessEnded(how):
                return how
            case wire.Opened():
                seen = "it is connected, and sends nothing that can be read"
