"""Python's garbage collector in a process that runs for months: long-lived objects are not scanned repeatedly.

A full collection stops the interpreter: with torch, 350,000 objects, for 0.2 s and more, several times while modules
are loaded. Guarantees: later objects are collected as usual. Cycles of objects frozen at the start stay until the
process ends.
"""

from __future__ import annotations

import atexit
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def loading_modules() -> Iterator[None]:
    """Disable collections while modules are loaded: their objects stay."""
    gc.disable()
    try:
        yield
    finally:
        _leave_out()
        gc.enable()


def keep_what_is_here() -> None:
    """Collect once, then freeze the remaining objects. Takes as long as a full collection."""
    gc.unfreeze()
    gc.collect()
    _leave_out()


def _leave_out() -> None:
    """Unfreeze at the end of the process: finalizers still run."""
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
