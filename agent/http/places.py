"""Limits on connections: so many without a request yet, and so many for each application."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.http.exchange import Application


class ConnectionLimits:
    """Counts of one address. For the loop's thread only."""

    def __init__(self, arrivals: int) -> None:
        self._arrivals = arrivals
        self._taken: Counter[int | None] = Counter()  # by application; None: no request yet

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
    """Permit of one connection, counted until ``leave``."""

    def __init__(self, places: ConnectionLimits) -> None:
        self._places = places
        self._kind: int | None = None
        self._is_held = True

    def change(self, application: Application) -> bool:
        """Count the connection for an application; False if that has its maximum."""
        if not self._places.take(id(application), application.terms.connections):
            return False
        self._places.give_back(self._kind)
        self._kind = id(application)
        return True

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._places.give_back(self._kind)
