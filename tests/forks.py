"""Processes with the agent already imported: forks of a server that only imports it.

A test that kills, hangs or breaks a process needs a new one, but not the seconds that importing torch takes. A fork
runs its code as ``python -c`` would, with its own folder, environment, arguments, output and ``__main__``. At its end
it waits for threads and runs exit handlers. It does not tear modules down: that would copy a gigabyte of shared pages.
Tests of that step, of importing, of the environment before it or of memory cannot use a fork.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "coserve",
    "torch",
    "agent.doors.grpc.client",
    "agent.doors.grpc.server",
    "agent.cli",
    "agent.commands.progress",
    "agent.runtime.loop",
    "agent.service.serve",
    "experts.backends.fake",
)
MOST_BYTES = 2**20  # of a request
POLLED_S = 0.005


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a process."""

    returncode: int
    stdout: str
    stderr: str


class Fork:
    """One process. It is reaped by ``wait`` or ``poll``; until then its process id is not reused."""

    def __init__(self, server, pid, output):
        self.pid = pid
        self._server = server
        self._output = output
        self._returncode = None

    def poll(self):
        """Exit code, or the negative number of the signal that ended it; None while it runs."""
        if self._returncode is None:
            self._returncode = self._server.asked({"reap": self.pid})
        return self._returncode

    def wait(self, timeout_s):
        """Wait for the end. After the timeout the process is killed: TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"it has not ended after {timeout_s} s; it said: {self._written(1)[-2000:]}")
            time.sleep(POLLED_S)
        return Ended(self._returncode, self._written(0), self._written(1))

    def send_signal(self, number):
        """As in subprocess: no effect after the end."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """SIGKILL; the process is gone when this returns."""
        self.send_signal(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(POLLED_S)

    @property
    def report(self):
        """Output so far, and the exit code if the process was polled since its end."""
        texts = (path.read_text("utf-8", "replace") for path in dict.fromkeys(self._output) if path.exists())
        return f"{self.pid}, exit code {self._returncode}\n{''.join(texts)}"

    def _written(self, number):
        return self._output[number].read_text("utf-8", "replace")


class Forks:
    """The process that has imported everything, and requests to it."""

    def __init__(self, folder):
        self._folder = folder
        self.begun = []  # since the last clear
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
            )

    def start(self, code, *arguments, log=None, **environment):
        """Begin one. ``environment``: added to this process's. ``log``: file that its output is appended to."""
        output = (log, log) if log else tuple(self._file(name) for name in ("out", "err"))
        request = {
            "code": code,
            "argv": ["-c", *map(str, arguments)],
            "cwd": os.getcwd(),
            "environment": os.environ | environment,
            "output": [str(path) for path in output],
        }
        self.begun.append(Fork(self, self.asked(request), output))
        return self.begun[-1]

    def run(self, code, *arguments, timeout_s=120.0, **environment):
        """Begin one and wait for its end."""
        return self.start(code, *arguments, **environment).wait(timeout_s)

    def asked(self, request):
        """The server's answer."""
        self._channel.send(json.dumps(request).encode())
        return json.loads(self._channel.recv(MOST_BYTES))

    def close(self):
        """End the server; its forks go on."""
        self._channel.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _file(self, name):
        descriptor, path = tempfile.mkstemp(suffix=f".{name}", dir=self._folder)
        os.close(descriptor)
        return Path(path)


def serve(channel):
    """Answer until the channel closes. In a fork: return the code to run."""
    while request := channel.recv(MOST_BYTES):
        request = json.loads(request)
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            channel.close()
            return become(**request)
        channel.send(json.dumps(answer).encode())
    return None


def become(code, argv, cwd, environment, output):
    """Give this fork its folder, environment, arguments and output; returns the code."""
    for number, path in enumerate(output, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = argv
    return code


def run(code):
    """The code as the program; its exit code."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    returncode = 0
    try:
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as end:
        returncode = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001  whatever ends it is told, as the interpreter does
        traceback.print_exc()
        returncode = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return returncode


def main():
    """The server, and in a fork the code."""
    sys.path[0] = str(ROOT)
    for name in IMPORTED:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # collections of a fork would write to every page that holds an object
    if (code := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        os._exit(run(code))


if __name__ == "__main__":
    main()
