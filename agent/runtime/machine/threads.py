"""Threads of torch's operators: a count per calling thread, no idle teams, and exclusive cores for executors of two.

Guarantees: after ``use_threads`` no other thread's count changes the caller's. Without it, a thread's first
operator takes the latest count of any thread.

A thread keeps the OpenMP team of its operators. Once all teams have more threads than the box has cores, GNU's library
lets none spin between operators (libgomp's throttled spin count): on two cores a model of 105M parameters writes 44
tokens/s instead of 100. So all threads but executors call ``end_team`` after their work.

After a pause of 10 ms, Linux wakes the second of two threads on the first one's core, though another core is idle, and
they take turns (6.18, 2 cores: a ResNet18 takes 17 ms instead of 4). So the second thread has an exclusive core
(``Team``). Larger teams were not measured.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager, suppress
from functools import lru_cache
from threading import get_native_id
from typing import TYPE_CHECKING

import torch

from agent.core.performance import HOST, ExecutorSpec
from agent.runtime.machine.box import torch_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GNU = "libgomp.so.1"
LIBRARIES = (GNU, "libomp.so", "libomp.so.5", "libiomp5.so", "libomp.dylib", "libiomp5.dylib")
KEPT_APART = 2  # threads of a team
LOWERED_BY = 10  # nice value: about a tenth of a busy core
SOFT = 1  # omp_pause_soft: settings stay (OpenMP 5.0, section 3.2.44)


def use_threads(count: int) -> None:
    """Set the number of threads of the calling thread's operators."""
    torch.get_num_threads()  # the first call of a thread takes over the latest count of any thread
    torch.set_num_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context: the calling thread's operators have no team. For thousands of small ones, as in packing.

    Beside two busy processes on two cores, a team of two packed a GGUF model of 135 million parameters in 40 s, because
    each operator waited for a thread without a core; one thread took 3 s. On an idle box both take 2 s.
    """
    before = torch.get_num_threads()
    use_threads(1)
    try:
        yield
    finally:
        use_threads(before)  # also of threads that never set their own


def give_way() -> None:
    """Lower the priority of the calling thread, on Linux.

    Not to idle priority: a thread that holds the GIL or a lock, and gets no core beside busy ones, stops the process.
    Next to two busy processes on two cores, a thread at idle priority stopped others for 7.8 s, at this one for 0.5 s.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox that forbids it
            thread = get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOWERED_BY)


def end_team() -> None:
    """End the operator threads of the calling thread; its next operator restarts them (under 1 ms).

    No effect before OpenMP 5.0.
    """
    pause = _pause()
    if pause is not None:
        pause(SOFT)


def teams(executors: Sequence[ExecutorSpec], threads: int) -> dict[int, Team]:
    """Teams of the executors, of ``threads`` each. CPU executors of two threads get exclusive cores.

    No executor gets exclusive cores if the teams have more threads than the calling thread may use cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    on_cpu = [spec.id for spec in executors if torch_device(spec.processor) == "cpu"]
    found = {spec.id: Team(threads) for spec in executors}
    if threads == KEPT_APART and len(on_cpu) * threads <= len(cores):
        for place, executor in enumerate(on_cpu):
            found[executor] = Team(threads, cores[place * threads : (place + 1) * threads])
    return found


class Team:
    """Operator threads of the calling thread. In a team of two, the second is pinned to the second of ``cores``.

    No thread is pinned without ``cores``, with another library than GNU's, or against OpenMP's variables or an
    affinity of the process or the thread.
    """

    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None:
        self.threads = threads
        self.cores = tuple(cores)
        self._second: int | None = None  # thread id of the system
        self._is_ours = len(cores) == KEPT_APART

    def keep(self) -> None:
        """Pin the second thread again before a batch, if the team was ended."""
        if self._is_ours and not self._is_kept():
            self._second = None
            self._place()
            self._is_ours = self._second is not None

    def _is_kept(self) -> bool:
        if self._second is None:
            return False
        try:
            self._is_ours = os.sched_getaffinity(self._second) == {self.cores[1]}
        except OSError:  # the thread has ended
            return False
        return True

    def _place(self) -> None:
        library = _gnu()
        if library is None or library.omp_get_proc_bind() or not set(self.cores) <= os.sched_getaffinity(0):
            return
        library.GOMP_parallel(_Function(lambda _: self._take_core(library)), None, len(self.cores), 0)

    def _take_core(self, library: ctypes.CDLL) -> None:
        """Runs on each thread of the team."""
        with suppress(OSError):  # a sandbox that forbids it
            if library.omp_get_thread_num() == 1:
                os.sched_setaffinity(0, {self.cores[1]})
                self._second = get_native_id()


def lone_team(threads: int) -> Team:
    return teams([ExecutorSpec(0, "cpu", HOST)], threads)[0]


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@lru_cache
def _gnu() -> ctypes.CDLL | None:
    """GNU's OpenMP library, if no other is loaded."""
    loaded = [name for name in LIBRARIES if _loaded(name, "omp_get_thread_num") is not None]
    return _loaded(GNU, "GOMP_parallel") if loaded == [GNU] else None


def _loaded(name: str, function: str) -> ctypes.CDLL | None:
    """Library loaded by this process, if it has this function."""
    try:
        library = ctypes.CDLL(name, os.RTLD_NOLOAD)
        getattr(library, function)
    except (OSError, AttributeError):
        return None
    return library


@lru_cache
def _pause() -> Callable[[int], int] | None:
    """omp_pause_resource_all of torch's OpenMP library."""
    function = "omp_pause_resource_all"
    library = next((each for name in LIBRARIES if (each := _loaded(name, function)) is not None), None)
    return None if library is None else library.omp_pause_resource_all
