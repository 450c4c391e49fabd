"""Work on what others wrote: it runs in a fork of a child, within limits, the last line of defence behind the checks.

Guarantees: this process runs nothing of it, and waits for no answer beyond the limit by the clock. Work beyond its
limits ends, no other. Its error is raised here as the ExpertError that it is for its caller; an unforeseen one with its
type and text. An answer of another shape is WeightsCorrupt.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from experts import errors
from experts.children.child import Child, parent
from experts.children.messages import packed, unpacked
from experts.errors import ExpertError, LoadError, WeightsCorrupt, WeightsRefused, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from experts.children.messages import Channel

IDLE_S = 20.0  # without work, until the child ends
REASON_CHARACTERS = 400
ANSWER_BYTES = 64 * 1024 * 1024  # of JSON
OURS = {name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, ExpertError)}
GRACE_S = 10.0  # beyond the limit by the clock, for a process that is ended amid its answer


class ResourceLimits(NamedTuple):
    """Limits of a process. ``memory_bytes``: beyond what it has taken; ``written_bytes``: limit of each file that it
    writes.

    ``processor_s``: its own time; ``clock_s``: waiting included.
    """

    memory_bytes: int
    written_bytes: int
    processor_s: int
    clock_s: int

    def keep(self) -> None:
        """Bound this process from now on: it is killed, or has no more memory."""
        pages = Path("/proc/self/statm")
        if pages.is_file():  # other systems lack the limit or ignore it
            taken_bytes = int(pages.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + self.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.written_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (self.processor_s,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(self.clock_s)


@dataclass(frozen=True, slots=True)
class BoundedWork:
    """A function of a module, which returns what JSON can say. ``unforeseen``: before an unforeseen error's text.

    ``too_large``: text for a lack of memory; ``too_long``: for an end by the limits, of an exit code.
    """

    run: Callable[[], object]
    limits: ResourceLimits
    too_large: str
    too_long: Callable[[int], str]
    unforeseen: str = ""


class BoundedProcess:
    """The child, for one work at a time; started when it is needed. Options as of ``Child``."""

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({}), *, is_bare: bool = False) -> None:
        self._environment = environment
        self._is_bare = is_bare
        self._lock = Lock()
        self._child: Child | None = None

    def result(self, work: BoundedWork, expert: str, about: str = "") -> Any:  # noqa: ANN401 - of the work
        """Run the work, and return its result. Raises an ExpertError of ``expert``, with ``about`` before its text."""
        answer, code = self._answer(work, expert, about)
        kind, value = (WeightsRefused.__name__, work.too_long(code)) if answer is None else answer
        if kind is None:
            return value
        error = Exception.__new__(OURS.get(str(kind), WeightsCorrupt))
        ExpertError.__init__(error, expert, f"{about}{value}")
        raise error

    def _answer(self, work: BoundedWork, expert: str, about: str) -> tuple[tuple[Any, Any] | None, int]:
        job = pickle.dumps((work.run, work.limits, work.too_large, work.unforeseen))
        with self._lock:
            silent_s = work.limits.clock_s + GRACE_S
            try:
                with suppress(OSError):  # an idle child has ended
                    return self._send(job, silent_s)
                return self._send(job, silent_s)
            except OSError as error:
                raise LoadError(expert, f"{about}{error}") from error

    def _send(self, job: bytes, silent_s: float) -> tuple[tuple[Any, Any] | None, int]:
        """Answer of the work, if it gave one, and its exit code. Raises OSError if the child has ended or is silent."""
        if self._child is None:
            self._child = Child(
                "experts.children.bounded", environment=self._environment, is_bare=self._is_bare, is_quiet=True
            )
        self._child.wait_at_most(silent_s)
        answer = None
        with suppress(OSError, ValueError):  # ValueError: no message, as of a process that was ended amid its answer
            self._child.send(job)
            while (message := self._child.receive(ANSWER_BYTES)) is not None:
                value, _ = unpacked(message)
                if isinstance(value, int):
                    return answer, value
                answer = (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else (value, value)
        self.close()
        raise OSError(f"the process for files from elsewhere has ended: {answer}")

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child = None


def main() -> None:
    agent = parent()
    assert agent is not None, "a child"
    while agent.is_readable(IDLE_S) and (job := agent.receive()) is not None:
        work = pickle.loads(job)  # imports for all later work
        fork = os.fork()
        if not fork:
            _work(agent, *work)
        agent.send(packed(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])))


def _work(agent: Channel, run: Callable[[], object], limits: ResourceLimits, too_large: str, unforeseen: str) -> None:
    try:
        limits.keep()
        message = packed([None, run()])
    except Exception as error:  # noqa: BLE001 - the boundary of the process: any fault is that one file's
        kind, reason = _fault(error, too_large, unforeseen)
        message = packed([kind.__name__, " ".join(reason.split())[:REASON_CHARACTERS]])
    try:
        agent.send(message)
    finally:
        os._exit(0)


def _fault(error: Exception, too_large: str, unforeseen: str) -> tuple[type[ExpertError], str]:
    if is_out_of_memory(error):
        return WeightsRefused, too_large
    if isinstance(error, ExpertError):
        return type(error), error.message
    if isinstance(error, OSError):
        return LoadError, str(error)
    return WeightsCorrupt, f"{unforeseen}{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
