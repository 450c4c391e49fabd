"""Start of a camera's process.

Guarantees: the process ends with the agent, however the agent ends: the socket closes, and the kernel kills a process
that hangs in C. A failed import is reported to the agent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

from agent.sources.cameras import wire
from agent.sources.cameras.pictures.source import CameraConnection
from experts.errors import CameraFailed

PR_SET_PDEATHSIG = 1
SWITCH_S = 0.0005  # short, to tell waits for the interpreter's lock from waits for the camera


def main(arguments: list[str]) -> None:
    """``arguments``: the socket's descriptor, and the agent's process id."""
    descriptor, agent_pid = (int(argument) for argument in arguments)
    end_with(agent_pid)
    agent = socket.socket(fileno=descriptor)
    received = wire.receive(agent)
    if received is None:
        return
    connection = received[0]
    assert isinstance(connection, CameraConnection), "the first message"
    try:
        serve(agent, connection)
    except CameraFailed as error:
        wire.send(agent, wire.Failed(error.reason, error.is_final))


def end_with(agent_pid: int) -> None:
    """Have the kernel kill this process at the end of the agent's thread that started it, even if already ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles a terminal's Ctrl-C
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(0)


def serve(agent: socket.socket, connection: CameraConnection) -> None:
    """Read the camera until either end closes. Raises CameraFailed if the start fails."""
    try:
        import cv2

        from agent.sources.cameras.grabber import Grabber
        from agent.sources.cameras.pictures.registry import source_of

        source = source_of(connection)
    except ImportError as error:
        raise CameraFailed(f"a library is not there ({error}) - install coserve again", is_final=True) from error
    cv2.setNumThreads(1)  # the cores are for the experts
    sys.setswitchinterval(SWITCH_S)
    wire.send(agent, wire.Ready())
    Grabber(agent, connection, source).run()
