"""Limit on free memory that glibc's malloc keeps, which grew to a quarter of the experts' budget.

glibc has a heap per thread, up to eight per core. No effect with another C library.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

from experts.children.child import HEAPS

GIVEN_BACK_EVERY_S = 30.0  # a trim takes milliseconds, and pages taken again are zeroed again
_M_ARENA_MAX = -8  # from malloc.h


def bound_heaps() -> None:
    """Limit malloc to ``HEAPS`` heaps; call before the process has many threads."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, HEAPS)


def give_back_unused() -> None:
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
