"""Arena: a fixed run of bytes, handed out in spans. Offsets and sizes only; whose bytes they are is the caller's.

Guarantees: spans never overlap and start at multiples of ``ALIGNMENT_BYTES``; what is given back joins its neighbours
at once, so that an arena without spans is one gap again, whatever was taken before; and spans that were all slid down
leave one gap behind them, of all the bytes that are free. That is how the ledger's promise holds: it counts bytes, and
where they are free but scattered ``take`` refuses with enough of them free, the caller slides spans down, and what the
ledger promised is there.
Why this structure: classes of fixed sizes need no sliding, but a mix of experts that changes would leave each class the
room of its own worst day; a hundred spans are looked through in the time that one of their loads takes to be queued.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGNMENT_BYTES = 4096  # a page; more than the 512 that the kernels of any device ask for


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A run of bytes of an arena, taken or free."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


class Arena:
    """One thread at a time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: list[Span] = []  # by offset

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(span.size_bytes for span in self._taken)

    @property
    def largest_gap_bytes(self) -> int:
        return max((gap.size_bytes for gap in self._gaps()), default=0)

    @property
    def taken(self) -> tuple[Span, ...]:
        return tuple(self._taken)

    def take(self, size_bytes: int) -> Span | None:
        """A span from the smallest gap that holds it; None where no single gap does.

        The size is rounded up to whole alignments.
        """
        size_bytes = aligned(size_bytes)
        fitting = [gap for gap in self._gaps() if gap.size_bytes >= size_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda gap: (gap.size_bytes, gap.offset_bytes))
        span = Span(best.offset_bytes, size_bytes)
        insort(self._taken, span)
        return span

    def give_back(self, span: Span) -> None:
        """The span is free. Raises ValueError for what was not taken."""
        del self._taken[self._place_of(span)]

    def slide(self, span: Span) -> Span:
        """Its new place, directly behind the span below it; moving the bytes is the caller's. Raises ValueError."""
        place = self._place_of(span)
        offset_bytes = self._taken[place - 1].end_bytes if place else 0
        self._taken[place] = Span(offset_bytes, span.size_bytes)
        return self._taken[place]

    def _place_of(self, span: Span) -> int:
        place = bisect_left(self._taken, span)
        if place == len(self._taken) or self._taken[place] != span:
            raise ValueError(f"{span} is not taken")
        return place

    def _gaps(self) -> Iterator[Span]:
        start = 0
        for span in (*self._taken, Span(self.capacity_bytes, 0)):
            if span.offset_bytes > start:
                yield Span(start, span.offset_bytes - start)
            start = span.end_bytes


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
