"""Limit on free memory that glibc's malloc keeps, which grew to a quarter of the experts' budget.

glibc has a heap per thread, up to eight per core. No effect with another C library.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from threading import Event, Thread

HEAPS = 2  # large tensors have mappings of their own, and the GIL lets few threads allocate at once
GIVEN_BACK_EVERY_S = 30.0  # a trim takes milliseconds, and pages taken again are zeroed again
_M_ARENA_MAX = -8  # from malloc.h


def bound_heaps() -> None:
    """Limit malloc to ``HEAPS`` heaps; call before the process has many threads."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, HEAPS)


def give_back_unused() -> None:
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HeapKeeper:
    """Thread that returns free memory periodically."""

    def __init__(self) -> None:
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="heap-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        give_back_unused()

    def _run(self) -> None:
        while not self._stopping.wait(GIVEN_BACK_EVERY_S):
            give_back_unused()
