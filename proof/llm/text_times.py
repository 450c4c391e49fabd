"""Times of the texts of one run, by one clock for all systems."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proof.llm.random_models import TextJob

LEAD = 4  # tokens that each text has written before a late one begins


@dataclass(slots=True)
class TokenTimes:
    began_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.tokens_s[0] - self.began_s

    @property
    def tokens_per_s(self) -> float:
        """Rate of decoding: without the prompt and the first token."""
        return (len(self.tokens_s) - 1) / (self.tokens_s[-1] - self.tokens_s[0])


class TimedTexts:
    """One run. ``begin`` hands a system a text and its number, by which it tells ``wrote`` of each token.

    A late text begins once all others have written, and its first token ends the run.
    """

    def __init__(self, jobs: Sequence[TextJob], late: TextJob | None, begin: Callable[[int, TextJob], None]) -> None:
        self._jobs = [*jobs, *([late] if late else ())]
        self._begin = begin
        self._lock = Lock()
        self.times = [TokenTimes() for _ in self._jobs]
        self._late = self.times[-1] if late else None
        for number in range(len(jobs)):
            self._start(number)

    def wrote(self, number: int) -> bool:
        """True where the text is to end now."""
        with self._lock:
            self.times[number].tokens_s.append(perf_counter())
            if self._late is None:
                return False
            if not self._late.began_s and min(len(each.tokens_s) for each in self.times[:-1]) >= LEAD:
                self._start(len(self._jobs) - 1)
            return bool(self._late.tokens_s)

    def _start(self, number: int) -> None:
        self.times[number].began_s = perf_counter()
        self._begin(number, self._jobs[number])
