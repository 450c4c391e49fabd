"""Drive: packed weights, and the link that reads them."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.runtime.machine.memories import HostMemory, HostRegion
    from experts.packed.weights import AlignedBuffer, SegmentStore


class PacedLink:
    """Limits a link to a rate, one reservation after another. None: no limit.

    Unused time is lost: no burst after a pause. Background loads wait while the link ``is_demanded``.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._demands = 0
        self._lock = Lock()

    @property
    def is_demanded(self) -> bool:
        return self._demands > 0

    @contextmanager
    def demanded(self) -> Iterator[None]:
        with self._lock:
            self._demands += 1
        try:
            yield
        finally:
            with self._lock:
                self._demands -= 1

    def reserve(self, size_bytes: int) -> float:
        """Monotonic time at which the link delivers these bytes, after all earlier reservations."""
        now = time.monotonic()
        if self.bytes_per_s is None:
            return now
        with self._lock:
            self._free_at_s = max(self._free_at_s, now) + size_bytes / self.bytes_per_s
            return self._free_at_s


@dataclass(frozen=True, slots=True)
class Drive:
    """``staging``: memory of the buffers for loads into a device."""

    segments: SegmentStore
    staging: HostMemory
    link: PacedLink


class StagingBuffers:
    """Host buffers of one size, allocated on demand and kept for the next load."""

    def __init__(self, memory: HostMemory, size_bytes: int) -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._free: SimpleQueue[HostRegion] = SimpleQueue()

    @contextmanager
    def borrowed(self) -> Iterator[AlignedBuffer]:
        try:
            region = self._free.get_nowait()
        except Empty:
            region = self._memory.allocate(self._size_bytes)
        try:
            yield region.buffer
        finally:
            self._free.put(region)

    def close(self) -> None:
        while not self._free.empty():
            self._free.get().close()
