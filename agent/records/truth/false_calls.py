"""Drift of an expert's false calls: its latest reviewed NG answers beside earlier ones.

The test is Fisher's exact one, one-sided: the probability of so many false calls or more among the latest answers, if
their share were that of the earlier ones. It is asked again with each review, so an alarm is raised at RAISED_AT, far
below the usual 0.05, and cleared at CLEARED_AT. Chance alone raised
it in 8 of 1,200 simulated rows of 1,000 reviews, with shares of 5, 20 and 50 %.
"""

from __future__ import annotations

from collections import defaultdict
from math import comb
from typing import TYPE_CHECKING

from agent.records.database import read_rows
from agent.records.truth.figures import Rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LATEST = 50  # reviewed NG answers
EARLIER = 200
LEAST = 20  # of each kind; with less nothing is compared
RAISED_AT = 0.0001
CLEARED_AT = 0.01
READ_REVIEWS = 20_000  # over all experts, read in 0.06 s
REVIEWED_NG = """
    SELECT json_extract(results.experts, '$[#-1]'), reviews.verdict = 'OK' FROM reviews
    JOIN results ON results.seq = reviews.result
    WHERE undone_at IS NULL AND results.verdict = 'NG' ORDER BY number DESC LIMIT ?
"""


def read_calls(path: Path) -> Mapping[str, Sequence[bool]]:
    """Reviewed NG answers by expert, latest first: True for a false call."""
    calls: defaultdict[str, list[bool]] = defaultdict(list)
    for expert, is_false in read_rows(path, REVIEWED_NG, (READ_REVIEWS,)):
        if expert is not None:
            calls[expert].append(bool(is_false))
    return calls


def more_false_calls(calls: Sequence[bool], *, is_raised: bool) -> tuple[Rate, Rate] | None:
    """False calls among the latest and the earlier answers of an expert, if the latest have more; None: no drift.

    ``calls``: whether each reviewed NG answer was a false call, latest first; ``is_raised``: there is an alarm now.
    """
    count = min(LATEST, len(calls) // 2)
    if count < LEAST:
        return None
    latest, earlier = calls[:count], calls[count : count + EARLIER]
    rates = Rate(sum(latest), len(latest)), Rate(sum(earlier), len(earlier))
    return rates if chance_of(*rates) <= (CLEARED_AT if is_raised else RAISED_AT) else None


def chance_of(latest: Rate, earlier: Rate) -> float:
    """Probability of ``latest.count`` or more, if all false calls are spread over both by chance (hypergeometric)."""
    total = latest.count + earlier.count
    most = min(latest.of, total)
    ways = sum(comb(latest.of, count) * comb(earlier.of, total - count) for count in range(latest.count, most + 1))
    return ways / comb(latest.of + earlier.of, total)
