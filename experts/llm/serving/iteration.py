"""Rows and length of an iteration (Orca, OSDI 2022, section 3.1), and expected lengths of texts. Decides over numbers.

Guarantees of ``plan``: no more rows and tokens than the limits, but at least one of each. Writing requests run
together, in turns if there are more than rows. Prompts share the tokens of an iteration, least recently run first, so a
short prompt is read soon beside long ones. A prompt always has a row, however many requests write.

A text's expected length is the median of recently ended texts of its expert that are at least as long as it is so far.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from experts.llm.serving.texts import RunningText

LEAST_CHUNK_TOKENS = 16  # fewer are not worth the pass over the weights
FORGETTING = 0.9  # each iteration multiplies the weight of earlier times by this
GROWTH = 2  # limit of the next iteration, as a multiple of the most tokens measured
REMEMBERED = 256  # texts of each expert: enough for a median, few enough to follow a change within a shift
UNKNOWN_SHARE = 4  # without ended texts, a text is expected to write this fraction of its largest length,
UNKNOWN_MOST = 256  # and no more tokens than this: its lease grows with the text


@dataclass(frozen=True, slots=True)
class IterationLimits:
    """``rows``: requests in an iteration; ``tokens``: prompt tokens that it reads."""

    rows: int = 64
    tokens: int = 512


def plan(texts: Sequence[RunningText], rows: int, prompt_tokens: int) -> dict[int, int]:
    """Tokens of each request of an iteration. ``prompt_tokens``: limit on tokens of prompts; at least one row runs.

    A text with one next token writes.
    """
    writing = sorted((one for one in texts if one.next_tokens == 1), key=lambda one: (one.ran, one.arrival))
    reading = sorted((one for one in texts if one.next_tokens > 1), key=lambda one: (one.ran, one.arrival))
    if reading and (prompt_tokens > 0 or not writing):
        writing = writing[: max(rows - 1, 0)]
    picks = dict.fromkeys((one.request for one in writing[:rows]), 1)
    left = max(prompt_tokens, 0 if picks else 1)
    reading = reading[: rows - len(picks)] if left > 0 else []
    least = (one.next_tokens if one.is_whole else min(one.next_tokens, LEAST_CHUNK_TOKENS) for one in reading)
    needed = list(accumulate(least))
    sharing = max(bisect_right(needed, left), 1)  # a smaller part is not worth its row
    shares = _shares(reading[:sharing], left)
    left -= sum(shares.values())
    rest = [one for one in reading[sharing:] if not one.is_whole and left > 0]
    return picks | shares | _shares(rest[:1], left)


def _shares(reading: Sequence[RunningText], tokens: int) -> dict[int, int]:
    """Equal parts of ``tokens``; unused parts go to the others. A whole request that does not fit waits its turn."""
    picks: dict[int, int] = {}
    tokens = max(tokens, 0)
    for place, one in enumerate(sorted(reading, key=lambda each: each.next_tokens)):
        part = -(-tokens // (len(reading) - place))
        if one.is_whole and one.next_tokens > part and one is not reading[0]:
            continue
        taken = one.next_tokens if one.is_whole else min(one.next_tokens, part)
        if taken:
            picks[one.request] = taken
            tokens = max(tokens - taken, 0)
    return picks


def drafts(rows: int, texts: Mapping[int, tuple[float, int]], times: IterationTimes, room: int) -> Mapping[int, int]:
    """Tokens of each request's draft, likeliest first, ``room`` at most: while one more brings more tokens a second.

    ``texts``: probability of a token behind right ones, and the most tokens of a draft. ``rows`` texts write.
    """
    likely = [(share**n, request) for request, (share, most) in texts.items() for n in range(1, most + 1)]
    picks: Counter[int] = Counter()
    written = float(rows)
    for place, (probability, request) in enumerate(sorted(likely, reverse=True)[: max(room, 0)]):
        if probability * times.seconds(rows + place) <= written * times.further_s:
            break
        written += probability
        picks[request] += 1
    return picks


class IterationTimes:
    """Fit of ``B + K * tokens`` seconds; recent iterations weigh more. With one size measured, B is 0."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._most_tokens = 0

    def ran(self, tokens: int, seconds: float) -> None:
        self._weight = FORGETTING * self._weight + 1
        self._tokens = FORGETTING * self._tokens + tokens
        self._seconds = FORGETTING * self._seconds + seconds
        self._squares = FORGETTING * self._squares + tokens * tokens
        self._products = FORGETTING * self._products + tokens * seconds
        self._most_tokens = max(self._most_tokens, tokens)

    def seconds(self, tokens: int) -> float:
        base_s, token_s = self._line()
        return base_s + token_s * tokens

    def tokens_within(self, seconds: float) -> int:
        """Tokens that fit in the time, possibly below 0: a line is trusted up to GROWTH times the measured range."""
        if not self._weight:
            return LEAST_CHUNK_TOKENS
        base_s, token_s = self._line()
        most = max(GROWTH * self._most_tokens, LEAST_CHUNK_TOKENS)
        return int(min((seconds - base_s) / token_s, most)) if token_s > 0 else most

    def least_tokens(self, seconds: float) -> int:
        """Tokens of prompts allowed past the end of time: they cost no more than the pass over the weights itself."""
        if self.seconds(LEAST_CHUNK_TOKENS) <= max(seconds, 0.0):
            return LEAST_CHUNK_TOKENS
        most = max(GROWTH * self._most_tokens, LEAST_CHUNK_TOKENS)
        if not self._has_line:
            return GROWTH * LEAST_CHUNK_TOKENS  # a second size gives the time of the pass itself
        base_s, token_s = self._line()
        return max(int(min(base_s / token_s, most)), LEAST_CHUNK_TOKENS)

    @property
    def further_s(self) -> float:
        """Seconds of one more token; 0, so that it is tried, while one size is measured."""
        return max(self._slope, 0.0) if self._has_line else 0.0

    @property
    def _slope(self) -> float:
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        covariance = self._products / self._weight - mean_tokens * mean_s
        return min(covariance / self._variance, mean_s / mean_tokens)

    @property
    def _variance(self) -> float:
        return self._squares / self._weight - (self._tokens / self._weight) ** 2

    @property
    def _has_line(self) -> bool:
        return self._weight > 0 and self._variance >= (0.05 * self._tokens / self._weight) ** 2

    def _line(self) -> tuple[float, float]:
        if not self._tokens:
            return 0.0, 0.0
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        token_s = self._slope if self._has_line else 0.0
        if token_s <= 0:
            return 0.0, mean_s / mean_tokens
        return mean_s - token_s * mean_tokens, token_s


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
