"""The gate before the agent: an image that was being judged when the agent was ended is judged alone.

Guarantees: each item is let in exactly once, in the order of its kind, suspects first and alone: so the item that ends
the agent is known.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")


class Gate(Generic[Item]):
    """For any thread. ``let_in`` never blocks or raises; it says whether the item is inside and will ``leave``."""

    def __init__(self, let_in: Callable[[Item], bool]) -> None:
        self._let_in = let_in
        self._suspects: deque[Item] = deque()
        self._others: deque[Item] = deque()
        self._inside = 0
        self._is_alone = False
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return len(self._suspects) + len(self._others)

    def admit(self, item: Item, *, is_suspect: bool) -> None:
        with self._lock:
            (self._suspects if is_suspect else self._others).append(item)
        self._open()

    def leave(self) -> None:
        self._left()
        self._open()

    def _left(self) -> None:
        with self._lock:
            self._inside -= 1
            self._is_alone = False

    def _open(self) -> None:
        """A loop, not recursion: any number of items may turn back."""
        while (item := self._next()) is not None:
            if not self._let_in(item):
                self._left()

    def _next(self) -> Item | None:
        with self._lock:
            if self._suspects:
                if self._inside:
                    return None
                self._is_alone = True
                self._inside = 1
                return self._suspects.popleft()
            if self._is_alone or not self._others:
                return None
            self._inside += 1
            return self._others.popleft()
