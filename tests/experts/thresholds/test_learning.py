"""What a learned threshold promises of good and bad samples."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from experts.thresholds.learning import learned, rates_at, separation

SCORES = st.one_of(st.floats(-1e9, 1e9), st.integers(0, 5).map(float))  # the latter: many that are equal
GOOD = st.lists(SCORES, min_size=1, max_size=60)
BAD = st.lists(SCORES, max_size=30)
RATES = st.floats(0.0, 0.5)


def allowed(good, rate):
    """How many alarms the rate allows: with one more, the bound of order statistics would be above it."""
    return max([k for k in range(len(good)) if (k + 1) / (len(good) + 1) <= rate + 1e-12], default=0)


def alarms(threshold, scores):
    return sum(score >= threshold for score in scores)


@given(GOOD, BAD, RATES)
def test_false_alarms_of_a_threshold_stay_within_the_rate(good, bad, rate):
    found = learned(good, bad, rate)
    assert alarms(found.rates.threshold, good) <= allowed(good, rate)
    assert found.expected <= max(rate, 1 / (len(good) + 1)) + 1e-9


@given(GOOD, BAD, RATES)
def test_no_other_threshold_within_the_rate_catches_more(good, bad, rate):
    caught = alarms(learned(good, bad, rate).rates.threshold, bad)
    for other in {*good, *bad, *(math.nextafter(score, math.inf) for score in good)}:
        if alarms(other, good) <= allowed(good, rate):
            assert alarms(other, bad) <= caught


@given(GOOD, BAD, RATES)
def test_false_alarms_that_catch_nothing_more_are_avoided(good, bad, rate):
    """Where bad samples are caught, the threshold lies above the last good score in front of the lowest of these."""
    threshold = learned(good, bad, rate).rates.threshold
    caught = [score for score in bad if score >= threshold]
    assume(caught)
    assert not [score for score in good if threshold <= score < min(caught)]


def test_threshold_of_separable_scores_lies_amid_the_gap():
    found = learned([0.1, 0.2, 0.3], [0.9, 0.8], 0.01)
    assert found.rates.threshold == pytest.approx(0.55, abs=0.15)
    assert (found.rates.false_alarms, found.rates.caught, found.separation) == (0.0, 1.0, 1.0)


def test_threshold_without_bad_samples_lies_above_the_good_ones():
    for scale in (1e-6, 1.0, 1e6):
        found = learned([scale * number / 10 for number in range(11)], [], 0.01)
        assert scale < found.rates.threshold < 1.2 * scale
        assert (found.rates.caught, found.separation) == (None, None)
    assert learned([0.0], [], 0.01).rates.threshold > 0.0
    assert learned([0.1] * 9, [], 0.01).expected == pytest.approx(0.1), "few vouch for less than is asked"
    assert learned([number / 100 for number in range(99)], [], 0.01).expected == pytest.approx(0.01)
    with pytest.raises(ValueError, match="no good sample"):
        learned([], [1.0], 0.01)


def test_rate_holds_for_future_parts():
    """The bound is of an average: over many draws of 199 good samples, the next one is an alarm once in 20 at most."""
    draw = random.Random(0)
    draws = 2000
    hits = 0
    for _ in range(draws):
        good = [draw.gauss(0, 1) for _ in range(199)]
        bad = [draw.gauss(1.5, 1) for _ in range(20)]
        hits += draw.gauss(0, 1) >= learned(good, bad, 0.05).rates.threshold
    assert hits / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    assert hits / draws >= 0.02  # and it is no threshold that catches nothing


@given(GOOD, st.lists(SCORES, min_size=1, max_size=30))
def test_separation_is_that_of_all_pairs(good, bad):
    pairs = [1.0 if b > g else 0.5 if b == g else 0.0 for g in good for b in bad]
    assert separation(good, bad) == pytest.approx(sum(pairs) / len(pairs))


@given(GOOD, BAD, SCORES)
def test_score_at_the_threshold_counts_as_an_alarm(good, bad, threshold):
    rates = rates_at(threshold, good, bad)
    assert (rates.false_alarms, rates.caught is None) == (alarms(threshold, good) / len(good), not bad)
