"""Cache of objects that are costly to make and shared: templates of modules, sessions, graphs."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")
Key = TypeVarTuple("Key")


class MadeOnce(Generic[*Key, Made]):
    """Thread-safe. An object in use is never made twice; the latest ``kept`` unused ones stay. Errors are not kept."""

    def __init__(self, make: Callable[[*Key], Made], kept: int) -> None:
        self._make = make
        self._kept = kept
        self._alive: WeakValueDictionary[tuple[*Key], Made] = WeakValueDictionary()
        self._recent: OrderedDict[tuple[*Key], Made] = OrderedDict()  # latest last
        self._lock = Lock()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def __call__(self, *key: *Key) -> Made:
        with self._lock:
            made = self._alive.get(key)
            if made is None:
                made = self._make(*key)
                self._alive[key] = made
                self._count += 1
            self._recent[key] = made
            self._recent.move_to_end(key)
            while len(self._recent) > self._kept:
                self._recent.popitem(last=False)
            return made
