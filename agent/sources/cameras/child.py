"""The process of one camera, as it begins: bound to the agent's life, then told what to read, then at it.

Guarantees: it ends when the agent does, however that ended: its socket tells it, and the kernel kills it where a call
into C keeps every thread from hearing. That something cannot be imported is said, not printed.
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
SWITCH_S = 0.0005  # a read that waits for the interpreter's lock is not to be taken for one that waits for the camera


def main(arguments: list[str]) -> None:
    """``arguments``: the number of the socket's descriptor, and the agent's process number."""
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
    """Have the kernel kill this process when the agent's thread that started it ends, also if it has ended already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the agent's business
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(0)


def serve(agent: socket.socket, connection: CameraConnection) -> None:
    """Until the end of either. Raises CameraFailed for what cannot be begun."""
    try:
        import cv2

        from agent.sources.cameras.grabber import Grabber
        from agent.sources.cameras.pictures.registry import source_of

        source = source_of(connection)
    except ImportError as error:
        raise CameraFailed(f"a library is not there ({error}) - install coserve anew", is_final=True) from error
    cv2.setNumThreads(1)  # the cores are the experts'
    sys.setswitchinterval(SWITCH_S)
    wire.send(agent, wire.Ready())
    Grabber(agent, connection, source).run()
