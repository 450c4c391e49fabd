"""Pages of libraries that only their loading needed: released once a process is ready, on a box without a GPU.

torch loads NVIDIA's libraries on such a box, too, and nothing calls them. Only pages that equal their file are released
(of mappings that cannot be written and hold no page of their own), so the next use reads them from the system's file
cache. MADV_PAGEOUT would also empty that cache, which the next start needs, and works for the owner of the files only.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_EQUAL_TO_FILE = re.compile(r"^(\w+)-(\w+) r-[-x]p .*\.so(?:\.\S+)?\n(?:\w+: .*\n)*?Anonymous: +0 kB$", re.MULTILINE)
_DONTNEED = 4  # MADV_DONTNEED of Linux, on all processors


def release_loaded_pages(has_gpu: Callable[[], bool] = torch.cuda.is_available) -> None:
    """No effect with a GPU, or where the system does not list mappings."""
    if has_gpu():
        return
    with suppress(OSError, AttributeError):
        mappings = Path("/proc/self/smaps").read_text()
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for begin, end in _EQUAL_TO_FILE.findall(mappings):
            advise(int(begin, 16), int(end, 16) - int(begin, 16), _DONTNEED)
