"""Levels stand for what they were made of: within half a scale, zero for zero, ends for what lies outside."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.backends.onednn.levels import (
    HIGHEST,
    MIDDLE,
    SCALE_LEAST,
    Levels,
    Values,
    levels,
    quantised_weight,
)
from experts.backends.onednn.operators import NARROW, WIDE
from experts.calibrations import Range

ZEROS = [None, 0, MIDDLE]
NUMBERS = st.floats(-1e6, 1e6, width=32)
RANGES = st.tuples(NUMBERS, NUMBERS).map(lambda ends: Range(min(ends), max(ends)))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def levels_of(seen, zero):
    """The levels of a range as an expert's table has them."""
    return Levels(torch.tensor([levels(seen, zero)], dtype=torch.float32), Values(0, zero))


def within(seen, zero):
    """Values from end to end of a range; from zero on, where zero is the lowest level."""
    low = max(seen.low, 0.0) if zero == 0 else seen.low
    return torch.linspace(low, max(seen.high, low), 1001)


@given(RANGES, st.sampled_from(ZEROS))
def test_levels_restore_a_range_within_half_a_scale_and_clamp_beyond_it(seen, zero):
    made, values = levels_of(seen, zero), within(seen, zero)
    distance = (made.back(made.of(values)) - values).abs().max()
    assert distance <= made.scale / 2 * (1 + 1e-3)  # a level's place is itself a rounded number
    assert (made.of(torch.zeros(3)).tolist(), zero in (None, made.zero)) == ([made.zero] * 3, True)
    assert made.back(torch.full((3,), made.zero, dtype=torch.uint8)).abs().max() <= made.scale * 1e-4
    span = max(abs(seen.low), abs(seen.high), made.scale)
    outside = torch.tensor([-1e3 * span, -300 * made.scale, 300 * made.scale, 1e3 * span])
    assert made.of(outside).tolist() == [0, 0, HIGHEST, HIGHEST]


@given(RANGES)
def test_range_with_its_own_zero_spends_no_level_on_unseen_values(seen):
    scale, _ = levels(seen, None)
    width = max(seen.high, 0.0) - min(seen.low, 0.0)
    assert width == 0 or scale == pytest.approx(width / HIGHEST) or width < 1e-15


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("seen", [Range(0.0, 0.0), Range(0.0, 1e-44), Range(-1e-44, 0.0), Range(-1e-40, 1e-40)])
def test_tiny_range_has_a_scale_above_zero(seen, zero):
    made = levels_of(seen, zero)
    assert made.of(torch.tensor([0.0, seen.low, seen.high])).tolist() == [made.zero] * 3
    assert math.isfinite(1 / made.scale)


@given(st.lists(st.lists(FINITE, min_size=4, max_size=4), min_size=1, max_size=3), st.sampled_from([WIDE, NARROW]))
def test_weights_of_any_size_are_rounded_per_channel(numbers, highest):
    weight = torch.tensor(numbers)
    found, scales = quantised_weight("w", weight, highest)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert (found.abs() <= highest).all()
    distance = (found.double() * scales.double()[:, None] - weight.double()).abs()
    assert (distance <= scales.double()[:, None] * 0.5 * (1 + 1e-5)).all()
    is_whole = found.abs().amax(dim=1) == highest  # the largest weight of a channel is its highest level
    assert (is_whole | (scales == SCALE_LEAST) | (weight == 0).all(dim=1)).all()
