"""The threads that the operators of one thread use: a count of its own for each of ours, a core for each of an
executor's, and none that are left over.

Guarantees: after ``use_threads`` no other thread's count changes this one's. torch alone does not promise that: at a
thread's first operator it takes over the count that any thread was given last, and what the thread itself had been
given before is lost. An executor with two cores then runs on one, because a preparation thread asked for one.

A thread whose operators ran on several keeps those for its next: its OpenMP team. Once all teams of a process together
are more than the box has cores, GNU's library lets none of them wait actively between two operators (libgomp,
config/linux/wait.h: its throttled spin count), and an executor takes up to twice as long, forever, because packing at
the start ran on another thread: a model of 105M parameters writes 44 tokens/s instead of 100 on two cores. So whoever
is no executor calls ``end_team`` when its work is done; after it, no thread of its team is left.

A thread that waits for the next operator keeps its core for as long. After an executor had nothing to do for some
10 ms, Linux wakes its team where the executor itself runs, with the other cores idle: there they wait for each other in
turns, a wait an operator, and are not parted before the next tick or two (6.18; 2 cores: a ResNet18 takes 17 ms that
takes 4 once they are). So the threads of an executor's team have a core each (``Team``). The executor's own thread has
all of them: whoever it starts inherits what it has.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from threading import get_native_id
from typing import TYPE_CHECKING

import torch

from agent.runtime.machine.box import torch_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.core.performance import ExecutorSpec

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


def team_cores(executors: Sequence[ExecutorSpec], threads: int) -> dict[int, tuple[int, ...]]:
    """By executor, the cores of its team: as many as it has threads, no core in two; none of executors on a device.

    ``threads``: of each. Nobody has any where this process may use fewer cores than they have threads together.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    on_cpu = [spec.id for spec in executors if torch_device(spec.processor) == "cpu"]
    if len(on_cpu) * threads > len(cores):
        return {}
    return {executor: tuple(cores[place * threads : (place + 1) * threads]) for place, executor in enumerate(on_cpu)}


class Team:
    """What the calling thread's operators run on, as many threads as there are ``cores``: each has its own of these.

    All but the calling thread, which has every core. Nothing is done for fewer than two, or where the system or the
    library offers no such thing.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._threads: dict[int, int] = {}  # those of the system -> core
        self._can_be_kept = len(cores) > 1 and hasattr(os, "sched_setaffinity")

    def keep(self) -> None:
        """Asked before a batch: an operator on fewer threads ends the others, and those that come after are new."""
        if self._can_be_kept and not self._is_kept():
            self._place()

    def _is_kept(self) -> bool:
        try:
            return bool(self._threads) and all(os.sched_getaffinity(each) == {c} for each, c in self._threads.items())
        except OSError:  # it has ended
            return False

    def _place(self) -> None:
        library = _openmp("GOMP_parallel")
        self._threads = {}
        if library is not None:
            library.GOMP_parallel(_Function(lambda _: self._take_core(library)), None, len(self._cores), 0)
        self._can_be_kept = bool(self._threads)

    def _take_core(self, library: ctypes.CDLL) -> None:
        """Runs on each thread of the team."""
        place = library.omp_get_thread_num()
        with suppress(OSError, IndexError):  # a sandbox that forbids it; a library that has its own mind of the count
            if place > 0:
                os.sched_setaffinity(0, {self._cores[place]})
                self._threads[get_native_id()] = self._cores[place]


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@lru_cache
def _openmp(name: str) -> ctypes.CDLL | None:
    """The library that torch has loaded, if it has a function of that name. GNU's and LLVM's have GOMP_parallel."""
    for each in LIBRARIES:
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(each, os.RTLD_NOLOAD)
            getattr(library, name)
            return library
    return None


@lru_cache
def _pause() -> Callable[[int], int] | None:
    """OpenMP's omp_pause_resource_all, of the library that torch has loaded."""
    library = _openmp("omp_pause_resource_all")
    return None if library is None else library.omp_pause_resource_all
