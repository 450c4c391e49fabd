"""How many threads the operators of one thread use: a count of its own for each of ours, and none that are left over.

Guarantees: after ``use_threads`` no other thread's count changes this one's. torch alone does not promise that: at a
thread's first operator it takes over the count that any thread was given last, and what the thread itself had been
given before is lost. An executor with two cores then runs on one, because a preparation thread asked for one.

A thread whose operators ran on several keeps those for its next: its OpenMP team. Once all teams of a process together
are more than the box has cores, GNU's library lets none of them wait actively between two operators (libgomp,
config/linux/wait.h: its throttled spin count), and an executor takes up to twice as long, forever, because packing at
the start ran on another thread: a model of 105M parameters writes 44 tokens/s instead of 100 on two cores. So whoever
is no executor calls ``end_team`` when its work is done; after it, no thread of its team is left.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("libgomp.so.1", "libomp.so", "libomp.so.5", "libiomp5.so", "libomp.dylib", "libiomp5.dylib")
SOFT = 1  # omp_pause_soft: all that was set stays (OpenMP 5.0, section 3.2.44)


def use_threads(count: int) -> None:
    """Operators that the calling thread runs from now on use so many threads."""
    torch.get_num_threads()  # the thread's first question: the latest count of any thread is taken over here, not later
    torch.set_num_threads(count)


def give_way() -> None:
    """The calling thread runs where no other wants to run from now on, as far as the system has such a thing."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a sandbox that forbids it: then it shares, as it would elsewhere
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def end_team() -> None:
    """End the threads that the calling thread's operators ran on; its next operator starts them again (under 1 ms).

    Nothing happens where torch runs with a library that does not offer it (OpenMP before 5.0, or none).
    """
    pause = _pause()
    if pause is not None:
        pause(SOFT)


@lru_cache
def _pause() -> Callable[[int], int] | None:
    """OpenMP's omp_pause_resource_all, of the library that torch has loaded."""
    for name in LIBRARIES:
        with suppress(OSError, AttributeError):
            found: Callable[[int], int] = ctypes.CDLL(name, os.RTLD_NOLOAD).omp_pause_resource_all
            return found
    return None
