"""Fits of the performance matrix to measured batches: K and B, the maximum batch, the workspace. Pure.

A batch's time is ``typical_s`` of its repeats. K and B are the least squares of *relative* distances from these times:
timing noise grows with the time, and a single image counts as much as a full batch. A size counts more the more often
it was run. Neither K nor B is below LEAST_S.

The maximum batch is the smallest measured size whose average latency (time over batch size), smoothed by unimodal
regression, is within a tolerance of the lowest: 3 %, and twice the uncertainty of the times on top. So a plateau is
entered at its near end, noise does not stretch it, and a size beyond which the average rises again is not chosen.

Sources: CoServe (ASPLOS '25), section 4.2 for K and B, section 4.5 for the maximum batch, Figures 5, 6 and 12.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.device_profile.records import BatchTimes

LEAST_S = 1e-4  # handing work over: lower bound of a load, of K and of B
TOLERANCE = 0.03  # of the lowest average latency: a larger batch has to save more
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
OUTLIER_DEVIATIONS = 3.0
WORKSPACE_QUANTUM_BYTES = 64 * 1024  # workspaces are rounded up to multiples of it


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """A batch of n takes ``K_s * n + B_s``. ``error``: the largest relative distance of a size's time from that."""

    K_s: float
    B_s: float
    error: float

    def latency_s(self, batch_size: int) -> float:
        return self.K_s * batch_size + self.B_s


@dataclass(frozen=True, slots=True)
class WorkspaceFit:
    """A batch of n needs at most ``base_bytes + n * per_image_bytes`` in addition to the weights."""

    base_bytes: int
    per_image_bytes: int


@dataclass(frozen=True, slots=True)
class _Point:
    size: int
    value: float
    weight: float


def fit_curve(batches: Sequence[BatchTimes]) -> tuple[int, LatencyFit]:
    """The maximum batch, and K and B of the sizes up to it."""
    largest = plateau(batches)
    return largest, fit_latency([batch for batch in batches if batch.batch_size <= largest])


def fit_latency(batches: Sequence[BatchTimes]) -> LatencyFit:
    """K and B of these batches, of at least one size; of a single size, B is LEAST_S. Source: section 4.2.

    Raises ValueError without a batch, or for times that are not above 0.
    """
    repeats = {batch.batch_size: len(batch.seconds) for batch in batches}
    points = [_Point(size, seconds, repeats[size] / seconds**2) for size, seconds in _times(batches).items()]
    if len(points) == 1:
        (point,) = points
        return _with_error(points, max((point.value - LEAST_S) / point.size, LEAST_S), LEAST_S)

    def squares(line: tuple[float, float]) -> float:
        return sum(point.weight * (point.value - line[0] * point.size - line[1]) ** 2 for point in points)

    return _with_error(points, *min(_constrained_lines(points), key=squares))


def typical_s(seconds: Sequence[float]) -> float:
    """Seconds of a batch from its repeats: the winsorised mean. Half of the repeats may be outliers.

    Repeats further than OUTLIER_DEVIATIONS robust deviations from the median count as if they were there. Not the
    median: it was 3 % below the mean of batches of one, and batches are added up. Raises ValueError without a repeat.
    """
    middle = median(seconds)
    reach = OUTLIER_DEVIATIONS * _deviation(seconds)
    return fmean(min(max(each, middle - reach), middle + reach) for each in seconds)


def uncertainty(batches: Sequence[BatchTimes]) -> float:
    """Relative error of the times: the median of all sizes.

    1.4826 x MAD / median / sqrt(repeats) of each size of which there are at least two repeats; 0 where none has.
    """
    fractions = [
        _deviation(batch.seconds) / median(batch.seconds) / math.sqrt(len(batch.seconds))
        for batch in batches
        if len(batch.seconds) > 1
    ]
    return median(fractions) if fractions else 0.0


def plateau(batches: Sequence[BatchTimes], tolerance: float = TOLERANCE) -> int:
    """The maximum batch: where the average latency stops falling; the rule is the module's. Source: section 4.5.

    One of the measured sizes. Raises ValueError without a batch, or for times that are not above 0.
    """
    repeats = {batch.batch_size: len(batch.seconds) for batch in batches}
    points = [_Point(size, seconds / size, repeats[size]) for size, seconds in _times(batches).items()]
    smoothed = _unimodal(points)
    limit = min(smoothed) * (1 + tolerance + 2 * uncertainty(batches))
    return next(point.size for point, average in zip(points, smoothed, strict=True) if average <= limit)


def fit_workspace(batches: Sequence[BatchTimes]) -> WorkspaceFit:
    """The workspace line that covers every batch, rounded up to WORKSPACE_QUANTUM_BYTES. Source: Figure 6.

    Of the lines that cover the points and do not fall, the one with the least excess in sum: it runs along the edge of
    the points' upper hull above their mean size. Raises ValueError without a batch.
    """
    if not batches:
        raise ValueError("no batch was measured")
    points = sorted((batch.batch_size, batch.workspace_bytes) for batch in batches)
    mean_size = sum(size for size, _ in points) / len(points)
    slope = max(_hull_slope(points, mean_size), 0.0)
    base = max(value - slope * size for size, value in points)
    if base < 0:
        base, slope = 0.0, max(value / size for size, value in points)
    per_image_bytes = _rounded_up(slope)
    left_bytes = max(value - per_image_bytes * size for size, value in points)
    return WorkspaceFit(_rounded_up(max(left_bytes, 0)), per_image_bytes)


def _deviation(seconds: Sequence[float]) -> float:
    middle = median(seconds)
    return MAD_TO_DEVIATION * median(abs(each - middle) for each in seconds)


def _times(batches: Sequence[BatchTimes]) -> dict[int, float]:
    found = {batch.batch_size: typical_s(batch.seconds) for batch in batches if batch.seconds}
    if not found:
        raise ValueError("no batch was measured")
    if min(found) < 1 or min(found.values()) <= 0:
        raise ValueError(f"sizes count from 1 and times are above 0, not {found}")
    return dict(sorted(found.items()))


def _constrained_lines(points: Sequence[_Point]) -> list[tuple[float, float]]:
    """The least squares line where it keeps to the floors, else the best line along each floor."""
    weight = sum(point.weight for point in points)
    mean_size = sum(point.weight * point.size for point in points) / weight
    mean = sum(point.weight * point.value for point in points) / weight
    variance = sum(point.weight * (point.size - mean_size) ** 2 for point in points)
    covariance = sum(point.weight * (point.size - mean_size) * (point.value - mean) for point in points)
    slope = covariance / variance
    if slope >= LEAST_S and mean - slope * mean_size >= LEAST_S:
        return [(slope, mean - slope * mean_size)]
    squares = sum(point.weight * point.size**2 for point in points)
    products = sum(point.weight * point.size * (point.value - LEAST_S) for point in points)
    return [(LEAST_S, max(mean - LEAST_S * mean_size, LEAST_S)), (max(products / squares, LEAST_S), LEAST_S)]


def _with_error(points: Sequence[_Point], slope_s: float, intercept_s: float) -> LatencyFit:
    distances = [abs(slope_s * point.size + intercept_s - point.value) / point.value for point in points]
    return LatencyFit(slope_s, intercept_s, max(distances))


def _unimodal(points: Sequence[_Point]) -> list[float]:
    """The closest values that fall and then rise, by least squares over all turning points."""

    def turned(at: int) -> list[float]:
        rising = _isotonic([_Point(point.size, -point.value, point.weight) for point in points[at:]])
        return [*_isotonic(points[:at]), *(-value for value in rising)]

    def distance(values: Sequence[float]) -> float:
        return sum(point.weight * (point.value - value) ** 2 for point, value in zip(points, values, strict=True))

    return min((turned(at) for at in range(len(points), 0, -1)), key=distance)


def _isotonic(points: Sequence[_Point]) -> list[float]:
    """The closest values that never rise: rising neighbours are pooled into their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # weighted mean, weight, points
    for point in points:
        mean, weight, count = point.value, point.weight, 1
        while pools and pools[-1][0] < mean:
            earlier, earlier_weight, earlier_count = pools.pop()
            mean = (earlier * earlier_weight + mean * weight) / (earlier_weight + weight)
            weight += earlier_weight
            count += earlier_count
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _hull_slope(points: Sequence[tuple[int, int]], at: float) -> float:
    """The slope of the points' upper hull above ``at``; 0 where they have one size only. ``points`` ascend."""
    hull: list[tuple[int, int]] = []
    for point in points:
        while len(hull) > 1 and _is_under(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    for (left, left_value), (right, right_value) in itertools.pairwise(hull):
        if left <= at <= right and left < right:
            return (right_value - left_value) / (right - left)
    return 0.0


def _is_under(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    rise_to_middle = (middle[1] - left[1]) * (right[0] - left[0])
    rise_to_right = (right[1] - left[1]) * (middle[0] - left[0])
    return rise_to_middle <= rise_to_right


def _rounded_up(size_bytes: float) -> int:
    return math.ceil(size_bytes / WORKSPACE_QUANTUM_BYTES) * WORKSPACE_QUANTUM_BYTES
