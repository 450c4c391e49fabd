"""Limits of a child that works on what others wrote: the last line of defence behind the checks.

Guarantees: an error of such a work is answered as the kind of ExpertError that it is for its caller.
"""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experts import errors
from experts.children.messages import packed, unpacked
from experts.errors import ExpertError, LoadError, WeightsCorrupt, WeightsRefused, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from experts.children.messages import Channel

REASON_CHARACTERS = 400


class ResourceLimits(NamedTuple):
    """Of a process. ``memory_bytes``: beyond what it has taken; ``written_bytes``: of each file that it writes.

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


def answer(to: Channel, work: Callable[[], object], *, too_large: str, unforeseen: str = "") -> None:
    """Send what the work returns, as JSON, or its error. ``unforeseen``: before the type and text of any other error.

    The text for a lack of memory is ``too_large``.
    """
    try:
        message = packed([None, work()])
    except Exception as error:  # noqa: BLE001 - the boundary of the process: any fault is that one file's
        kind, reason = _fault(error, too_large, unforeseen)
        message = packed([kind.__name__, " ".join(reason.split())[:REASON_CHARACTERS]])
    to.send(message)


def _fault(error: Exception, too_large: str, unforeseen: str) -> tuple[type[ExpertError], str]:
    if is_out_of_memory(error):
        return WeightsRefused, too_large
    if isinstance(error, ExpertError):
        return type(error), error.message
    if isinstance(error, OSError):
        return LoadError, str(error)
    return WeightsCorrupt, f"{unforeseen}{type(error).__name__}: {error}"


def answered(message: bytes, expert: str, about: str = "") -> Any:  # noqa: ANN401 - the work's value
    """Value that was sent. Raises the ExpertError of ``expert`` that it was there, ``about`` before its text.

    The error that ended the process is a LoadError.
    """
    (kind, value), _ = unpacked(message)
    if kind is None:
        return value
    error = Exception.__new__(getattr(errors, kind, LoadError))
    ExpertError.__init__(error, expert, f"{about}{value}")
    raise error
