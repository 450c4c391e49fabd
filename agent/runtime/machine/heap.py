"""What glibc's malloc keeps of memory that was given back to it, bounded; nothing happens under another C library.

It gives each thread a heap of its own, up to eight a core, and keeps what is freed in all of them: under batches of
many shapes, of many architectures, that grows to a quarter of the experts' budget, which no ledger counts.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HEAPS = 2  # large tensors are in mappings of their own anyhow, and the interpreter's lock lets few threads ask at once
GIVEN_BACK_EVERY_S = 30.0  # it takes milliseconds, and pages that are wanted again are zeroed again
_M_ARENA_MAX = -8  # of malloc.h


def bound_heaps() -> None:
    """No more heaps than ``HEAPS`` from now on: to be called before a process has many threads."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, HEAPS)


def give_back_unused() -> None:
    """Return free memory to the system, so that it is nobody's, and taking it again is seen."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HeapKeeper:
    """A thread that gives free memory back now and then, as long as an agent runs."""

    def __init__(self, give_back: Callable[[], None] = give_back_unused, every_s: float = GIVEN_BACK_EVERY_S) -> None:
        self._give_back = give_back
        self._every_s = every_s
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="heap-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._give_back()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._give_back()
