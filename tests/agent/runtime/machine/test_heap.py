"""The C library's heaps: how many there are, and what they keep."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.runtime.machine import heap

ROOT = Path(__file__).parents[4]
PATIENCE_S = 30.0
IN_MANY_THREADS = """
import ctypes, sys, threading
sys.path.insert(0, {root!r})
from agent.runtime.machine.heap import bound_heaps
if {is_bound}:
    bound_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(9)

def allocate():
    libc.malloc(1000)
    together.wait()

for _ in range(8):
    threading.Thread(target=allocate).start()
together.wait()
libc.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
"""


def heaps(*, is_bound):
    script = IN_MANY_THREADS.format(root=str(ROOT), is_bound=is_bound)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc only")
def test_threads_share_few_heaps():
    assert heaps(is_bound=False) > 2
    assert heaps(is_bound=True) == 2


def test_what_is_free_is_given_back_now_and_then_and_in_the_end(monkeypatch):
    given_back, thrice = [], threading.Event()

    def give_back():
        given_back.append(threading.current_thread().name)
        if len(given_back) == 3:
            thrice.set()

    monkeypatch.setattr(heap, "give_back_unused", give_back)
    monkeypatch.setattr(heap, "GIVEN_BACK_EVERY_S", 0.001)
    keeper = heap.HeapKeeper()
    keeper.start()
    assert thrice.wait(PATIENCE_S)
    keeper.stop()
    assert (given_back[:3], given_back[-1]) == (["heap-keeper"] * 3, threading.current_thread().name)
