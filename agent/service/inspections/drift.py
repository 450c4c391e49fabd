"""Usage drift: distance of the experts' shares in a line's requests from those in its device profile. Pure.

The measure is the total variation distance between the experts' shares of the counted steps and of usage probability: 0
as expected, 1 nothing in common. Counts are halved at FORGETTING_STEPS, so a change is detected as fast after a year as
after a day. Drift is a distance above LEAST_DISTANCE, and above CHANCE_FACTOR times chance at this sample size
(``chance_distance``), after LEAST_STEPS steps. The scheduler judges waiting images one expert after another, so drift
is also above the most that their steps can add to the distance. Sample size with weights w is Kish's: (sum of w)^2 /
sum of w^2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LEAST_STEPS = 500
FORGETTING_STEPS = 20_000  # a fast line's day or less; of as many draws among 370 experts chance gives about 0.05
LEAST_DISTANCE = 0.1
CHANCE_FACTOR = 3.0  # steps of one route come together, so they vary up to sqrt(2) times as much as single draws
WARNING_INTERVAL_S = 3600.0
AGAIN_S = 10.0  # between two measurements of a drift
STAYS = 0.8  # of the threshold: a drift is over below it
NAMED_EXPERTS = 3


@dataclass(frozen=True, slots=True)
class ExpertDrift:
    expert: str
    expected: float
    seen: float


@dataclass(frozen=True, slots=True)
class DriftStatistics:
    """``experts``: with the most changed shares, largest change first. ``steps``: sample size. ``waiting``: most steps
    that the images under way still have."""

    steps: int
    distance: float
    chance: float
    experts: tuple[ExpertDrift, ...]
    waiting: int = 0

    @property
    def threshold(self) -> float:
        of_waiting = self.waiting / (self.steps + self.waiting or 1)
        return max(CHANCE_FACTOR * self.chance, LEAST_DISTANCE) + of_waiting

    @property
    def has_drifted(self) -> bool:
        return self.steps >= LEAST_STEPS and self.distance > self.threshold


class UsageDrift:
    """Counts steps to compare with usage, of any sum. Not thread-safe: compute statistics of a ``sample``."""

    def __init__(self, usage: Mapping[str, float]) -> None:
        total = sum(usage.values()) or 1.0
        self._expected = {expert: probability / total for expert, probability in usage.items()}
        self._seen: defaultdict[str, float] = defaultdict(float)  # weight of each expert's steps
        self._weight = 0.0  # total weight
        self._squares = 0.0  # sum of the squares of the weights

    def count(self, experts: Iterable[str]) -> None:
        for expert in experts:
            self._seen[expert] += 1.0
            self._weight += 1.0
            self._squares += 1.0
            if self._weight > FORGETTING_STEPS:
                for each in self._seen:
                    self._seen[each] /= 2
                self._weight /= 2
                self._squares /= 4

    def sample(self) -> UsageDrift:
        """Copy that later counts do not change."""
        copied = copy(self)
        copied._seen = self._seen.copy()
        return copied

    def shares(self) -> list[ExpertDrift]:
        """Share of each expert in all steps, as expected and as counted."""
        return [
            ExpertDrift(expert, self._expected.get(expert, 0.0), self._seen.get(expert, 0.0) / (self._weight or 1.0))
            for expert in dict.fromkeys([*self._expected, *self._seen])
        ]

    def statistics(self, waiting: int = 0) -> DriftStatistics:
        """Compute the statistics. Slow: a fraction of a millisecond for hundreds of experts."""
        steps, shares = round(self._weight**2 / self._squares) if self._squares else 0, self.shares()
        moved = sorted(shares, key=lambda share: (-abs(share.seen - share.expected), share.expert))
        distance = sum(abs(share.seen - share.expected) for share in shares) / 2 if steps else 0.0
        named = tuple(share for share in moved[:NAMED_EXPERTS] if steps and share.seen != share.expected)
        return DriftStatistics(steps, distance, chance_distance(self._expected.values(), steps), named, waiting)


class DriftAlarm:
    """Warns of drifted usage: at once, then every hour. ``found``: the drift, until usage is as expected again."""

    def __init__(self) -> None:
        self.found: DriftStatistics | None = None
        self._warned_s = self._measured_s = -math.inf

    def due_warning(self, now_s: float, measure: Callable[[], DriftStatistics]) -> DriftStatistics | None:
        """Warning to log now, or None. ``now_s``: monotonic; ``measure`` is slow, and called only when due."""
        if self.found is not None and now_s - self._measured_s < AGAIN_S:
            return None
        found, self._measured_s = measure(), now_s
        stays = self.found is not None and found.distance > STAYS * found.threshold
        self.found = found if found.has_drifted or stays else None
        if not found.has_drifted or now_s - self._warned_s < WARNING_INTERVAL_S:
            return None
        self._warned_s = now_s
        return found


def chance_distance(probabilities: Iterable[float], draws: int) -> float:
    """Expected total variation distance of so many independent draws from these probabilities.

    By De Moivre's formula: E|X - np| = 2 m C(n, m) p^m (1 - p)^(n - m + 1) with m = floor(np) + 1.
    """
    if not draws:
        return 0.0
    return sum(_mean_deviation(probability, draws) for probability in probabilities) / (2 * draws)


def _mean_deviation(probability: float, draws: int) -> float:
    least_above = math.floor(probability * draws) + 1
    if probability <= 0 or least_above > draws:
        return 0.0
    ways = math.lgamma(draws + 1) - math.lgamma(least_above + 1) - math.lgamma(draws - least_above + 1)
    logarithm = ways + least_above * math.log(probability) + (draws - least_above + 1) * math.log1p(-probability)
    return 2 * least_above * math.exp(logarithm)
