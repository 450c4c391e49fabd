"""How many may be connected at once: so many who have not said yet what they want, and so many of each application's.

Guarantees: nobody is counted twice, or after the end.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.http.exchange import Application


class ConnectionLimits:
    """Those of one address. Of the loop's thread alone."""

    def __init__(self, arrivals: int) -> None:
        self._arrivals = arrivals
        self._taken: Counter[int | None] = Counter()  # by application; None: for those who come

    def enter(self) -> ConnectionPermit | None:
        return ConnectionPermit(self) if self.take(None, self._arrivals) else None

    def take(self, kind: int | None, most: int) -> bool:
        if self._taken[kind] >= most:
            return False
        self._taken[kind] += 1
        return True

    def give_back(self, kind: int | None) -> None:
        self._taken[kind] -= 1


class ConnectionPermit:
    """Somebody's, until it is left; once."""

    def __init__(self, places: ConnectionLimits) -> None:
        self._places = places
        self._kind: int | None = None
        self._is_held = True

    def change(self, application: Application) -> bool:
        """For one of an application's; False where all of these are taken."""
        if not self._places.take(id(application), application.terms.connections):
            return False
        self._places.give_back(self._kind)
        self._kind = id(application)
        return True

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._places.give_back(self._kind)
