"""Expected lengths of an expert's texts: learned from ended texts, corrected as a text grows.

Pure: the median of recently ended texts that are at least as long as the text so far.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from threading import Lock

REMEMBERED = 256  # texts of each expert: enough for a median, few enough to follow a change within a shift
UNKNOWN_SHARE = 4  # without ended texts, a text is expected to write this fraction of its largest length,
UNKNOWN_MOST = 256  # and no more tokens than this: its lease grows with the text


@dataclass(slots=True)
class _EndedTexts:
    lately: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    ordered: list[int] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        if len(self.lately) == REMEMBERED:
            self.ordered.remove(self.lately[0])
        self.lately.append(tokens)
        insort(self.ordered, tokens)


class OutputLengths:
    """Expected lengths for all experts of an agent. Thread-safe."""

    def __init__(self) -> None:
        self._ended: dict[str, _EndedTexts] = {}
        self._lock = Lock()

    def ended(self, expert: str, tokens: int) -> None:
        """Record a text of ``tokens`` that ended regularly, or at its maximum length."""
        with self._lock:
            self._ended.setdefault(expert, _EndedTexts()).add(tokens)

    def left(self, expert: str, written: int, most: int) -> int:
        """Expected tokens still to write, at least 1, after ``written`` of at most ``most``."""
        with self._lock:
            ended = self._ended.get(expert)
            ordered = [] if ended is None else ended.ordered
            longer = ordered[bisect_right(ordered, written) :]
        if longer:
            expected = longer[len(longer) // 2]
        else:
            expected = max(2 * written, 0 if ordered else min(most // UNKNOWN_SHARE, UNKNOWN_MOST))
        return max(min(expected, most) - written, 1)
