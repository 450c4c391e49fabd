"""What every test stands on."""

from __future__ import annotations

import gc
import time

import pytest

from tests.forks import Forks

FROZEN_FROM_S = 0.01  # that a full collection takes


class Heap:
    """Keeps full collections, of which measuring makes many, from going over all that was there before a test.

    That is a million objects of torch, and as many of what torch and others import when they are first asked to export.
    """

    def __init__(self) -> None:
        self._is_slow = True
        self._began_s = 0.0

    def collected(self, phase: str, told: dict[str, int]) -> None:
        """The interpreter's word of a collection that begins or ends."""
        if phase == "start":
            self._began_s = time.thread_time()
        elif told["generation"] == 2 and time.thread_time() - self._began_s > FROZEN_FROM_S:
            self._is_slow = True

    def freeze(self) -> None:
        """Leave out what is here, if it makes collections slow."""
        if self._is_slow:
            gc.collect()
            gc.freeze()
            self._is_slow = False


@pytest.fixture(scope="session")
def _heap():
    heap = Heap()
    gc.callbacks.append(heap.collected)
    yield heap
    gc.callbacks.remove(heap.collected)
    gc.unfreeze()  # what has a finalizer still runs it


@pytest.fixture(autouse=True)
def _frozen_heap(_heap):
    _heap.freeze()


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Processes that have the agent imported already."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()
