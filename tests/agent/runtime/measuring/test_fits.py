"""Fits and plateau: on lines and hyperbolas known beforehand, with noise and without, and on what hardware makes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.device_profile.records import BatchTimes
from agent.runtime.measuring.fits import (
    LEAST_S,
    WORKSPACE_QUANTUM_BYTES,
    fit_latency,
    fit_workspace,
    plateau,
    typical_s,
)

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
MIB = 2**20


def batches_of(latency_s, sizes=SIZES, repeats=5, workspace=lambda size: 0):
    return [BatchTimes(size, (latency_s(size),) * repeats, workspace(size)) for size in sizes]


def noisy(latency_s, seed, deviation, repeats=7):
    draw = random.Random(seed)
    return [
        BatchTimes(size, tuple(latency_s(size) * (1 + draw.gauss(0, deviation)) for _ in range(repeats)), 0)
        for size in SIZES
    ]


def near_end(slope_s, intercept_s, tolerance=0.03, sizes=SIZES):
    """The plateau of a line by the definition: the smallest size worth as much as the largest, but for a tolerance."""
    lowest = slope_s + intercept_s / sizes[-1]
    return next(size for size in sizes if slope_s + intercept_s / size <= lowest * (1 + tolerance))


class TestTypicalTimes:
    def test_outlier_is_winsorised_and_cannot_ruin_the_typical_time(self):
        """By hand: median 12, MAD 1, so 4.4478 may be the distance: 900 counts as 16.4478."""
        assert typical_s([10, 11, 12, 13, 900]) == pytest.approx((10 + 11 + 12 + 13 + 12 + 3 * 1.4826) / 5)
        assert typical_s([0.014, 0.014, 9.0]) == 0.014

    @given(st.lists(st.floats(0.5, 1.5), min_size=4, max_size=9), st.lists(st.floats(1e-3, 1e6), max_size=3), st.data())
    def test_outlying_minority_of_repeats_has_little_weight(self, good, bad, data):
        seconds = data.draw(st.permutations(good + bad[: (len(good) - 1) // 2]))
        assert 0 <= typical_s(seconds) <= 1.5 + 3 * 1.4826 * 1.0


class TestLatency:
    def test_latency_fit_minimises_relative_distances(self):
        """By hand: sizes 1 and 2 at 1 s and 3 s, 4 at 4 s. Weights 1, 1/9, 1/16 give K = 267/218, B = -27/218 < 0."""
        fit = fit_latency(batches_of({1: 1.0, 2: 3.0, 4: 4.0}.__getitem__, sizes=(1, 2, 4)))
        along_the_floor = (1 * 1 * 1.0 + 2 * 3.0 / 9 + 4 * 4.0 / 16) / (1 + 4 / 9 + 16 / 16)
        assert pytest.approx(along_the_floor, rel=1e-3) == fit.K_s
        assert fit.B_s == LEAST_S
        assert fit.error == pytest.approx((3.0 - 2 * along_the_floor) / 3.0, abs=1e-3)

    def test_latency_fit_weighs_sizes_by_their_runs(self):
        """By hand: 10, 22 and 30 ms at 1, 2 and 3 are on no line; were 1 run without end, its distance would be 0."""
        often = [BatchTimes(1, (0.010,) * 900, 0), BatchTimes(2, (0.022,), 0), BatchTimes(3, (0.030,), 0)]
        once = [BatchTimes(batch.batch_size, batch.seconds[:1], 0) for batch in often]
        assert fit_latency(often).latency_s(1) == pytest.approx(0.010, rel=2e-3)
        assert abs(fit_latency(once).latency_s(1) - 0.010) > 0.0001

    @given(st.dictionaries(st.sampled_from(SIZES), st.floats(1e-5, 10.0), min_size=1))
    def test_latency_fit_is_never_free_and_no_other_line_is_better(self, times):
        """A single size has no slope: B is at its floor."""
        batches = batches_of(times.__getitem__, sizes=tuple(times))
        fit = fit_latency(batches)
        assert min(fit.K_s, fit.B_s) >= LEAST_S
        if len(times) == 1:
            assert fit.B_s == LEAST_S
            return

        def distance(slope_s, intercept_s):
            return sum(((slope_s * n + intercept_s - seconds) / seconds) ** 2 for n, seconds in times.items())

        found = distance(fit.K_s, fit.B_s)
        for factor in (0.9, 0.99, 1.01, 1.1):
            assert found <= distance(max(fit.K_s * factor, LEAST_S), fit.B_s) * (1 + 1e-6) + 1e-9
            assert found <= distance(fit.K_s, max(fit.B_s * factor, LEAST_S)) * (1 + 1e-6) + 1e-9


class TestPlateau:
    @given(slope_s=st.floats(1e-4, 0.1), intercept_s=st.floats(0.0, 0.5))
    def test_plateau_of_a_hyperbola_without_noise_is_found(self, slope_s, intercept_s):
        expected = near_end(slope_s, intercept_s)
        found = plateau(batches_of(lambda n: slope_s * n + intercept_s))
        assert found == expected or abs(slope_s + intercept_s / found - 1.03 * (slope_s + intercept_s / 32)) < 1e-9

    @given(
        seed=st.integers(0, 2**32),
        fraction=st.floats(0.0, 2.0),
        deviation=st.sampled_from([0.005, 0.02, 0.05]),
    )
    def test_noise_costs_the_plateau_little_for_any_chosen_size(self, seed, fraction, deviation):
        batches = noisy(lambda n: 0.010 * n + 0.010 * fraction, seed, deviation)
        true = {size: 0.010 + 0.010 * fraction / size for size in SIZES}
        assert true[plateau(batches)] <= min(true.values()) * (1.03 + 8 * deviation)

    @pytest.mark.parametrize(
        ("averages_ms", "size"),
        [
            (dict.fromkeys(SIZES, 10.0), 1),
            ({n: 10.0 + 4.0 / n for n in SIZES}, 10),  # 10.125 at 32; 3 % more is 10.43, first undercut by 10.4
            ({8: 5.0}, 8),
            ({1: 20.0, 2: 14.0, 4: 11.0, 6: 10.0, 8: 12.0, 12: 15.0, 16: 15.5}, 6),
            ({1: 10.0, 2: 12.0, 4: 15.0}, 1),
            ({1: 14.0, 2: 10.0, 3: 9.9, 4: 10.1, 5: 10.0, 6: 9.9, 8: 10.0}, 2),  # a lone lucky size is no trough
        ],
        ids=["flat", "a hyperbola", "one size", "rises again", "only rises", "a dip"],
    )
    def test_plateau_equals_one_by_hand(self, averages_ms, size):
        batches = batches_of(lambda n: n * averages_ms[n] / 1e3, tuple(averages_ms))
        assert plateau(batches) == size


class TestWorkspace:
    @pytest.mark.parametrize(
        ("points_mib", "base_mib", "per_image_mib"),
        [
            ({1: 4, 2: 5, 4: 7}, 3, 1),
            ({1: 4, 2: 9, 4: 10}, 8, 0.5),  # the hull's edge over the mean size 7/3 is 2 -> 4
            ({1: 9, 2: 5, 4: 4}, 9, 0),
            ({1: 1, 2: 8, 4: 32}, 0, 8),  # a base is never negative
        ],
        ids=["a line", "above the points", "falls", "steep"],
    )
    def test_workspace_equals_one_by_hand(self, points_mib, base_mib, per_image_mib):
        points = {size: value * MIB for size, value in points_mib.items()}
        fit = fit_workspace(batches_of(lambda n: 0.01, tuple(points), workspace=points.__getitem__))
        assert (fit.base_bytes, fit.per_image_bytes) == (base_mib * MIB, per_image_mib * MIB)

    @given(st.dictionaries(st.sampled_from(SIZES), st.integers(0, 2**34), min_size=1))
    def test_workspace_line_is_above_every_point(self, points):
        fit = fit_workspace(batches_of(lambda n: 0.01, tuple(points), workspace=points.__getitem__))
        assert min(fit.base_bytes, fit.per_image_bytes) >= 0
        assert fit.base_bytes % WORKSPACE_QUANTUM_BYTES == fit.per_image_bytes % WORKSPACE_QUANTUM_BYTES == 0
        slack = [fit.base_bytes + size * fit.per_image_bytes - needed for size, needed in points.items()]
        assert min(slack) >= 0
        assert min(slack) <= WORKSPACE_QUANTUM_BYTES * (1 + max(points)), "and it touches one, but for the rounding"


@pytest.mark.parametrize(
    ("fit", "batches"), [(fit_workspace, []), (fit_latency, []), (plateau, [BatchTimes(1, (0.0,), 0)])]
)
def test_fit_of_no_batch_or_time_is_an_error(fit, batches):
    with pytest.raises(ValueError, match=r"measured|above 0"):
        fit(batches)
