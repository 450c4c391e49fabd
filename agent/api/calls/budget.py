"""Bytes for messages and bodies in receipt, or not yet counted by the desk; first come, first served."""

from __future__ import annotations

import asyncio


class Budget:
    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self._turns = {True: asyncio.Lock(), False: asyncio.Lock()}
        self._freed = asyncio.Event()

    async def take(self, size_bytes: int, spared_bytes: int) -> None:
        """Wait for so many bytes, with ``spared_bytes`` left free. Calls that spare none delay no others."""
        async with self._turns[spared_bytes > 0]:
            while self._free_bytes < size_bytes + spared_bytes:
                self._freed.clear()
                await self._freed.wait()
            self._free_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes
        self._freed.set()


class Room:
    """Bytes reserved for one call's message until the desk has counted it."""

    def __init__(self, budget: Budget, size_bytes: int, spared_bytes: int) -> None:
        self._budget = budget
        self._size_bytes = size_bytes
        self._spared_bytes = spared_bytes
        self._held_bytes = 0

    async def enter(self) -> None:
        await self._budget.take(self._size_bytes, self._spared_bytes)
        self._held_bytes = self._size_bytes

    def keep(self, size_bytes: int) -> None:
        """Reduce the reservation to the bytes of the received message."""
        self._budget.give_back(self._held_bytes - size_bytes)
        self._held_bytes = size_bytes

    def leave(self) -> None:
        """Release the reservation. Idempotent."""
        self.keep(0)
