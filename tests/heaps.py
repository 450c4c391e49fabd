"""Heaps of this process's C library, once many threads have allocated. Run as a module, it prints their number."""

import ctypes
import os
import sys
import tempfile
import threading

THREADS = 8


def count_heaps():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
    together = threading.Barrier(THREADS + 1)

    def allocate():
        libc.malloc(1000)
        together.wait()

    for _ in range(THREADS):
        threading.Thread(target=allocate).start()
    together.wait()
    with tempfile.TemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
        libc.malloc_info(0, stream)
        libc.fflush(stream)
        file.seek(0)
        return file.read().count(b"<heap nr=")


if __name__ == "__main__":
    if "bound" in sys.argv:
        from agent.runtime.machine.heap import bound_heaps

        bound_heaps()
    sys.stdout.write(f"{count_heaps()}\n")
