"""Arena: a fixed range of bytes, divided into spans. Offsets and sizes only; the caller owns the bytes.

Guarantees: spans never overlap, and start at multiples of ``ALIGNMENT_BYTES``. After all spans slide down, the free
bytes form one gap. So a ledger may count bytes only.
Size classes would need no sliding, but each class would keep its peak size when the mix of experts changes.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGNMENT_BYTES = 4096  # a page; kernels of devices need 512 at most


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Range of bytes of an arena, taken or free."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


class Arena:
    """For one thread at a time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._taken: list[Span] = []  # by offset

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(span.size_bytes for span in self._taken)

    @property
    def taken(self) -> tuple[Span, ...]:
        return tuple(self._taken)

    def take(self, size_bytes: int) -> Span | None:
        """Span from the smallest sufficient gap, its size rounded up to the alignment; None without such a gap."""
        size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fitting = [gap for gap in self._gaps() if gap.size_bytes >= size_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda gap: (gap.size_bytes, gap.offset_bytes))
        span = Span(best.offset_bytes, size_bytes)
        insort(self._taken, span)
        return span

    def give_back(self, span: Span) -> None:
        self._taken.remove(span)

    def slide(self, span: Span) -> Span:
        """Move a span down to the end of the span below; the caller moves the bytes."""
        place = self._taken.index(span)
        offset_bytes = self._taken[place - 1].end_bytes if place else 0
        self._taken[place] = Span(offset_bytes, span.size_bytes)
        return self._taken[place]

    def _gaps(self) -> Iterator[Span]:
        start = 0
        for span in (*self._taken, Span(self.capacity_bytes, 0)):
            if span.offset_bytes > start:
                yield Span(start, span.offset_bytes - start)
            start = span.end_bytes
