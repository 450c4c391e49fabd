"""Child processes: modules that run as ``python -m`` runs them, beside the process that starts them.

Guarantees: a child ends with its parent, also by kill -9, also amid C code that holds the interpreter, and takes its
forks along: its input, a pipe that carries nothing, ends, and the kernel kills the child's process group. Where the
kernel does not (not Linux, or an input that torchrun shares out), a thread ends the process. A child imports from where
its parent was imported. It ignores SIGINT and SIGTERM: its parent ends it. No call waits for the end of a child, which
is reaped as soon as it has ended. Its C library has ``HEAPS`` heaps. The error that ends a child is its last message,
[BROKEN, type and text].
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING

from experts.children.messages import Channel, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]  # folder that this code was imported from
BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from experts.children.child import begin; begin()"
BROKEN = "broken"
HEAPS = 2  # of malloc: large tensors have mappings of their own, and the GIL lets few threads allocate at once


class Child(Channel):
    """The parent's end of a child, and the channel to it. Raises OSError if it cannot be started.

    ``environment``: variables in addition to the parent's; ``is_bare``: without the parent's. ``is_quiet``: what is
    printed there is dropped. ``on_end``: called from a thread, after the child was reaped.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({}),
        is_bare: bool = False, is_quiet: bool = False, on_end: Callable[[Child], None] = lambda _: None,
    ) -> None:  # fmt: skip
        here, there = socket.socketpair()
        super().__init__(here)
        self._on_end = on_end
        self.code: int | None = None  # once it has ended; a signal's is negative
        variables = [f"{name}={value}" for name, value in {"MALLOC_ARENA_MAX": HEAPS, **environment}.items()]
        started = [sys.executable, "-P", "-c", BOOT, str(ROOT), str(there.fileno()), module, *arguments]
        output = subprocess.DEVNULL if is_quiet else None
        try:
            with there:
                self._process = subprocess.Popen(
                    ["env", *(["-i"] if is_bare else []), *variables, *started],
                    stdin=subprocess.PIPE, stdout=output, stderr=output,
                    pass_fds=(there.fileno(),), start_new_session=True,
                )  # fmt: skip
        except OSError:
            here.close()
            raise
        self._reaper = Thread(target=self._reap, name=f"child-{self.pid}", daemon=True)
        try:
            self._reaper.start()
        except RuntimeError as error:  # no thread can be started
            self.kill()
            self._wait()
            here.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End the child at once, whatever it does. What it has sent can still be received."""
        super().kill()
        if self.code is None:
            self._kill_group()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit code; None after the timeout."""
        self._reaper.join(timeout_s)
        return self.code

    def last_words(self) -> str | None:
        """Type and text of the error that has ended it, if it says so; for a child that says nothing else."""
        message = self.receive()
        return None if message is None else str(unpacked(message)[0][1])

    def _reap(self) -> None:
        self._wait()
        self._on_end(self)

    def _wait(self) -> None:
        code = self._process.wait()
        self._kill_group()  # its forks
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.close()
        self.code = code

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # gone; macOS refuses a group of zombies
            os.killpg(self.pid, signal.SIGKILL)


_parent: Channel | None = None


def parent() -> Channel | None:
    """Channel to the process that started this one; None if it is no child."""
    return _parent


def begin() -> None:
    """Run this process as the child that its arguments name, and end it: a thread that hangs keeps no child."""
    global _parent
    _parent = Channel(socket.socket(fileno=int(sys.argv.pop(1))))
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    except Exception as error:
        log.exception("child_broken")
        report(error)
        os._exit(1)
    os._exit(0)


def end_with_parent() -> None:
    """Have this process end once the other end of its input is closed."""
    if sys.platform == "linux":
        own = os.getpid()
        fcntl.fcntl(0, fcntl.F_SETOWN, -own if os.getpgrp() == own else own)  # a group, with its forks
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    Thread(target=_end_with_input, name="parent", daemon=True).start()  # also if it has been closed by now


def _end_with_input() -> None:
    while os.read(0, 1):
        continue
    os._exit(0)


def report(error: Exception) -> None:
    """Say which error ends this process, if it is a child."""
    if _parent is not None:
        with suppress(OSError):
            _parent.send(packed([BROKEN, f"{type(error).__name__}: {error}"]))
