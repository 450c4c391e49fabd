"""Drive: packed weights, the link that reads them, and the buffers between an SSD and a device.

Guarantees: buffers of one memory never take more than ``staging_bytes``, which ``memory.host`` has set aside.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.runtime.machine.memories import HostMemory, HostRegion
    from experts.packed.weights import AlignedBuffer, SegmentStore


STAGED_LOADS = 3  # from an SSD into a device at once: two that requests wait for, one in the background
STAGED_PARTS = 16  # of a host memory, one is for these loads
LARGEST_BUFFER_BYTES = 32 * 1024 * 1024  # four reads of a direct reader
SMALLEST_BUFFER_BYTES = 4 * 4096


def staging_bytes(host_bytes: int) -> int:
    """Bytes of all buffers of loads into a device, in a host memory of that size."""
    share_bytes = host_bytes // STAGED_PARTS // STAGED_LOADS & -SMALLEST_BUFFER_BYTES
    return STAGED_LOADS * max(min(share_bytes, LARGEST_BUFFER_BYTES), SMALLEST_BUFFER_BYTES)


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


class StagingBuffers:
    """Host buffers of one size, at most ``count``: allocated on demand and kept for the next load, which may wait."""

    def __init__(self, memory: HostMemory, size_bytes: int, count: int) -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._room = BoundedSemaphore(count)
        self._free: SimpleQueue[HostRegion] = SimpleQueue()

    @contextmanager
    def borrowed(self) -> Iterator[AlignedBuffer]:
        with self._room:
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


@dataclass(frozen=True, slots=True)
class Drive:
    """``memory``: gives buffers for loads into a device. ``staged_bytes``: all buffers for whole weights."""

    segments: SegmentStore
    memory: HostMemory
    link: PacedLink
    staged_bytes: int = STAGED_LOADS * LARGEST_BUFFER_BYTES

    def staging(self) -> StagingBuffers:
        """Buffers for whole weights, of an agent's only transfers."""
        return StagingBuffers(self.memory, self.staged_bytes // STAGED_LOADS, STAGED_LOADS)
