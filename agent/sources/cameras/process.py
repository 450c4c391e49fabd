"""The agent's end of a camera's process: starts it, sends requests, listens, kills.

Guarantees: no call waits for the camera: a thread posts the messages of its process, and its end last. The password
is sent over the socket, never as an argument or in the environment. The output of FFmpeg and drivers is dropped: it may
be endless, and may contain secrets. A frame arrives whole or not at all.
"""

from __future__ import annotations

import errno
import queue
import signal
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from agent.sources.cameras import wire
from agent.sources.cameras.pictures.source import CameraConnection
from agent.sources.cameras.supervision import ProcessEnded
from experts.children.child import Child

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.line_file.intake import CameraSection

END_S = 1.0  # for a regular end of the process
SLOW_FRAMES = 2.0  # periods of a slowly played clip, before it counts as stalled
PROCESS = "agent.sources.cameras.child"


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    taken: wire.Taken
    content: bytes


Heard: TypeAlias = "wire.Ready | wire.Opened | wire.Seen | wire.Failed | Received | ProcessEnded"


def stall_timeout_s(section: CameraSection) -> float:
    """Seconds without a frame before a camera counts as stalled; longer for a slowly played clip."""
    return max(section.stall_timeout_s, SLOW_FRAMES / section.frames_per_s if section.frames_per_s else 0.0)


def connection_of(section: CameraSection, password: str | None) -> CameraConnection:
    """Parameters with which the camera's process connects."""
    return CameraConnection(
        url=section.url,
        open_timeout_s=section.open_timeout_s,
        stall_timeout_s=stall_timeout_s(section),
        max_pixels=section.max_pixels,
        user=section.user,
        password=password,
        loop=section.loop,
        frames_per_s=section.frames_per_s,
        rtsp_transport=section.rtsp_transport,
        ca=None if section.ca is None else str(section.ca),
        insecure_ok=section.insecure_ok,
    )


class CameraProcess:
    """Process of one camera, a child of the agent. Raises OSError if it cannot be started.

    ``post`` is called with each message, on a separate thread; ProcessEnded is the last message, exactly once.
    """

    def __init__(self, connection: CameraConnection, post: Callable[[Heard], None]) -> None:
        self._child = Child(PROCESS, is_quiet=True)
        self._post = post
        self._say(connection)
        self._listener = threading.Thread(target=self._listen, name=f"camera-process-{self.pid}", daemon=True)
        try:
            self._listener.start()
        except RuntimeError as error:  # no thread can be started
            self._child.kill()
            self._child.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, take: wire.Take) -> None:
        """Request a frame; a process that has ended does not answer."""
        self._say(take)

    def close(self) -> None:
        """Request that the process release the camera and end. Returns at once."""
        self._child.finish()

    def kill(self) -> None:
        self._child.kill()

    def join(self, timeout_s: float) -> bool:
        """True if the process ended within the timeout, and its end was posted."""
        self._listener.join(timeout_s)
        return not self._listener.is_alive()

    def _say(self, message: wire.Message) -> None:
        with suppress(OSError):  # the process has ended, and its end is posted
            self._child.send(wire.encode(message))

    def _listen(self) -> None:
        unheard = None
        with closing(self._child):
            try:
                while (message := self._child.receive()) is not None:
                    self._post(_heard(message))
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: no memory for a frame
                unheard = (
                    f"the messages of its process could not be read ({type(error).__name__}: {error}), and it was ended"
                )
                self._child.kill()
        code = self._child.wait()
        assert code is not None, "waited for"
        self._post(_exited(code) if unheard is None else ProcessEnded(unheard))


def _heard(content: bytes) -> Heard:
    message, frame = wire.decode(content)
    if isinstance(message, wire.Taken):
        return Received(message, frame)
    assert not isinstance(message, CameraConnection | wire.Take), "only the agent sends these"
    return message


def _exited(code: int) -> ProcessEnded:
    if code >= 0:
        return ProcessEnded(f"its process ended by itself with exit code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return ProcessEnded(f"its process was ended by {name}")


def probe(config: CameraSection, password: str | None, timeout_s: float) -> str | None:
    """None if a readable frame arrived within ``timeout_s``; else the reason.

    A camera that admits one viewer fails while an agent serves the line.
    """
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout_s
    try:
        process = CameraProcess(connection_of(config, password), heard.put)
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
            message = heard.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return f"no frame within {timeout_s:g} s: {seen}"
        match message:
            case Received():
                return None
            case wire.Failed(reason):
                return reason
            case ProcessEnded(how):
                return how
            case wire.Opened():
                seen = "it is connected, and sends nothing that can be read"
