"""The threshold of an anomaly expert: its scores as the agent computes them, and a threshold from good and bad samples.

A score that reaches the threshold is an alarm. Take n good samples, and a next good part whose score is drawn from the
same distribution. That score exceeds the (k + 1)-th highest of the samples with a probability of at most (k + 1) / (n +
1) (order statistics; the bound of conformal prediction: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random
World, 2005, section 2.2). So a threshold above that sample keeps false alarms to this rate; k samples may be alarms.

Guarantees: at most k good samples reach the threshold, where k is as above, or 0 where the samples are too few for the
rate asked for (``Learned.expected`` shows the rate reached). No other such threshold catches more bad samples. Among
equals, the threshold lies in the middle of the gap below the lowest score to catch. Scores equal the agent's on the CPU
in fp32, with any threshold or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experts.images import Decoded
from experts.proving.judging import Judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from experts.expert import Expert

MARGIN = 0.1  # of the distance from the median good score to the highest, without samples above that
LONGEST_DIGITS = 17  # significant digits that tell any two floats apart


@dataclass(frozen=True, slots=True)
class Rates:
    """Effect of a threshold on the samples: shares from 0 to 1. ``caught`` is None without a bad sample."""

    threshold: float
    false_alarms: float
    caught: float | None


@dataclass(frozen=True, slots=True)
class Learned:
    """Learned threshold. ``expected``: rate of false alarms that the samples warrant; few samples raise it.

    ``separation``: probability that a bad sample scores higher than a good one (area under the ROC curve); None
    without a bad sample.
    """

    rates: Rates
    expected: float
    separation: float | None


def learned(good: Sequence[float], bad: Sequence[float], false_alarms: float) -> Learned:
    """The threshold at this rate of false alarms, 0 to 1. Raises ValueError without a good sample."""
    if not good:
        raise ValueError("no good sample: a rate of false alarms is one among good parts")
    falling = sorted(good, reverse=True)
    allowed = _allowed(len(good), false_alarms)
    threshold = _amid(*_gap(falling, bad, allowed))
    expected = (allowed + 1) / (len(good) + 1)
    return Learned(rates_at(threshold, good, bad), expected, separation(good, bad) if bad else None)


def rates_at(threshold: float, good: Sequence[float], bad: Sequence[float]) -> Rates:
    caught = sum(score >= threshold for score in bad) / len(bad) if bad else None
    return Rates(threshold, sum(score >= threshold for score in good) / len(good), caught)


def separation(good: Sequence[float], bad: Sequence[float]) -> float:
    """Probability that a bad sample scores higher than a good one; equal scores count half (Mann and Whitney, 1947)."""
    ranked = sorted([(score, False) for score in good] + [(score, True) for score in bad])
    higher, below, start = 0.0, 0, 0
    while start < len(ranked):
        end = start
        while end < len(ranked) and ranked[end][0] == ranked[start][0]:
            end += 1
        bad_here = sum(is_bad for _, is_bad in ranked[start:end])
        good_here = end - start - bad_here
        higher += bad_here * (below + good_here / 2)
        below += good_here
        start = end
    return higher / (len(good) * len(bad))


def _allowed(count: int, false_alarms: float) -> int:
    """Allowed false alarms among n good samples: the largest k with (k + 1) / (n + 1) within the rate, or 0."""
    return min(max(math.floor(false_alarms * (count + 1) + 1e-9) - 1, 0), count - 1)


def _gap(falling: Sequence[float], bad: Sequence[float], allowed: int) -> tuple[float, float]:
    """Scores around the threshold: above the first, at most the second."""
    highest_good = falling[allowed]  # score that must pass, with all equal ones
    catchable = [score for score in bad if score > highest_good]
    if catchable:
        lowest = min(catchable)
        return max(score for score in falling if score < lowest), lowest
    above = [score for score in falling if score > highest_good]
    if above:
        return highest_good, min(above)
    middle = falling[len(falling) // 2]
    margin = MARGIN * (highest_good - middle) or MARGIN * abs(highest_good) or MARGIN
    return highest_good, max(highest_good + 2 * margin, math.nextafter(highest_good, math.inf))


def _amid(low: float, high: float) -> float:
    """Number with the fewest digits in the middle half of (low, high]."""
    quarter = (high - low) / 4
    middle = low + 2 * quarter
    for digits in range(1, LONGEST_DIGITS + 1):
        found = float(f"{middle:.{digits}g}")
        if low + quarter <= found <= high - quarter and low < found <= high:
            return found
    return high


class Meter:
    """Anomaly expert, loaded to score images. The constructor raises as packing does."""

    def __init__(self, expert: Expert) -> None:
        self._judge = Judge(replace(expert, threshold=None))

    def score(self, image: np.ndarray) -> float:
        """Score of an image, uint8 RGB (height, width, 3). Raises OutputInvalid for NaN or infinity."""
        anomaly = self._judge.answer(Decoded(image, *image.shape[:2])).anomaly
        assert anomaly is not None, "an anomaly expert's program measures"
        return anomaly.score
