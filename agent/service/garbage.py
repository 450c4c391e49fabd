"""Python's garbage collector in a process that runs for months: what stays is not looked at again and again.

A full collection looks at every object that may be part of a cycle, and holds the interpreter meanwhile. Beside torch
there are 350,000: 0.2 s and more in which no batch begins and nobody is answered. While modules are loaded there are
several such, in vain.

Guarantees: whatever is made later is collected as ever; so is all that reference counts free, weights for one. Only a
cycle of what was here already is kept, should it become garbage, until the process ends.
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
    """No collections while modules are loaded: what these make stays."""
    gc.disable()
    try:
        yield
    finally:
        _leave_out()
        gc.enable()


def keep_what_is_here() -> None:
    """Collect once more, then leave out what is in use now; as long as a full collection, which it is."""
    gc.unfreeze()
    gc.collect()
    _leave_out()


def _leave_out() -> None:
    """Not beyond the end of the process: what has a finalizer still runs it."""
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
