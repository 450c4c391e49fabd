"""Workers as processes of this box: ``python -m agent.runtime.workers.processes FD FOLDER LEVEL``.

Guarantees: a worker's process ends with its agent, also by kill -9: its socket closes. It ignores SIGINT and SIGTERM,
so that a service manager that stops the whole group lets the agent finish its work first.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

WAIT_S = 5.0  # for the end of a killed process


class SocketChannel:
    """Channel over a connected socket; ``process``: the worker, at the agent's end."""

    def __init__(self, connected: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._process = process
        self._sending = Lock()

    def send(self, *messages: bytes) -> None:
        with self._sending:
            for message in messages:
                self._connection.send_bytes(message)

    def receive(self) -> bytes | None:
        with suppress(EOFError, OSError):
            return self._connection.recv_bytes()
        return None

    def kill(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        self._connection.close()
        self._socket.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):  # in the kernel: its end is not waited for
                self._process.wait(WAIT_S)


def start_process(folder: Path, environment: Mapping[str, str] | None = None) -> SocketChannel:
    """Start a worker's process, which keeps its files in ``folder``. ``environment``: variables in addition."""
    here, there = socket.socketpair()
    command = [sys.executable, "-m", __spec__.name, str(there.fileno()), str(folder), str(logging.root.level)]
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    with there:
        process = subprocess.Popen(["env", *variables, *command], pass_fds=[there.fileno()], start_new_session=True)
    return SocketChannel(here, process)


def main() -> None:
    from agent.runtime.workers.host import WorkerHost  # here, as the agent's end imports this module, too

    descriptor, folder, level = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name = folder.parent.name
    form = f"%(asctime)s %(levelname)s %(name)s worker={name} %(message)s"
    logging.basicConfig(level=level, stream=sys.stderr, format=form)
    channel = SocketChannel(socket.socket(fileno=descriptor))
    with suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone
        WorkerHost(channel, folder).serve()
    os._exit(0)  # a thread that hangs keeps no worker


if __name__ == "__main__":
    main()
