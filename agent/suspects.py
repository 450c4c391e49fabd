"""Images that were being judged when the agent was ended: let in again one at a time, so that a culprit is alone.

Guarantees: each that was put is let in exactly once, in order, and the next one only after the one before it has left.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")


class OneAtATime(Generic[Item]):
    """A gate. ``let_in`` is called by whoever puts or leaves; it neither blocks nor raises. For any thread."""

    def __init__(self, let_in: Callable[[Item], None]) -> None:
        self._let_in = let_in
        self._waiting: deque[tuple[str, Item]] = deque()
        self._inside: str | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many wait outside."""
        return len(self._waiting)

    def put(self, key: str, item: Item) -> None:
        """Let it in once its turn has come."""
        with self._lock:
            self._waiting.append((key, item))
        self._next()

    def left(self, key: str) -> None:
        """This one is done with; nothing happens if it was not inside."""
        with self._lock:
            if self._inside != key:
                return
            self._inside = None
        self._next()

    def _next(self) -> None:
        with self._lock:
            if self._inside is not None or not self._waiting:
                return
            self._inside, item = self._waiting.popleft()
        self._let_in(item)
