"""Names in the order of ranks that change: what comes first is known without looking at the rest."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

SLACK = 64  # arbitrary: so many entries that are out of date are not worth a cleaning


class Ranking:
    """Names by rank, the lowest first, equal ranks by name. Every call is O(log n), amortised.

    A heap in which a new rank is a new entry: the old one stays until it comes first, or until such ones outnumber
    those that count.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, float] = {}
        self._entries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def first_rank(self) -> float | None:
        return self._entries[0][0] if self._ranks else None

    def put(self, name: str, rank: float) -> None:
        """Rank this name, anew if it is ranked."""
        if self._ranks.get(name) == rank:
            return
        self._ranks[name] = rank
        heappush(self._entries, (rank, name))
        self._clean()

    def drop(self, name: str) -> None:
        if self._ranks.pop(name, None) is not None:
            self._clean()

    def first(self, limit: float = float("inf")) -> str | None:
        """The name that comes first, if its rank is at most ``limit``."""
        return self._entries[0][1] if self._ranks and self._entries[0][0] <= limit else None

    def clear(self) -> None:
        self._ranks.clear()
        self._entries.clear()

    def _clean(self) -> None:
        """Remove outdated entries at the head of the heap."""
        if len(self._entries) > 2 * len(self._ranks) + SLACK:
            self._entries = [(rank, name) for name, rank in self._ranks.items()]
            heapify(self._entries)
        while self._entries and self._ranks.get(self._entries[0][1]) != self._entries[0][0]:
            heappop(self._entries)
