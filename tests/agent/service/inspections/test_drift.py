"""Drift: a distance by hand, what chance gives, and when it is worth a warning."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.service.inspections.drift import (
    LEAST_STEPS,
    WARNING_INTERVAL_S,
    DriftAlarm,
    ExpertDrift,
    UsageDrift,
    chance_distance,
)


def counted(usage, seen):
    drift = UsageDrift(usage)
    for expert, count in seen.items():
        drift.count([expert] * count)
    return drift


def test_the_distance_is_half_of_what_all_shares_moved():
    found = counted({"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 10, "b": 20, "d": 10}).sample().statistics()
    assert (found.steps, found.distance) == (40, 0.5)  # a -0.25, b +0.25, c -0.25, d +0.25
    assert found.experts == (ExpertDrift("a", 0.5, 0.25), ExpertDrift("b", 0.25, 0.5), ExpertDrift("c", 0.25, 0.0))


def test_before_anything_was_asked_nothing_has_drifted():
    found = UsageDrift({"a": 1.0}).sample().statistics()
    assert (found.steps, found.distance, found.chance, found.experts, found.has_drifted) == (0, 0.0, 0.0, (), False)


def test_usage_probabilities_of_requests_are_made_shares_of_steps():
    """One request in two goes on to a detector: two thirds of all steps are the classifier's."""
    found = counted({"cls": 1.0, "det": 0.5}, {"cls": 2000, "det": 1000}).sample().statistics()
    assert found.distance == pytest.approx(0)
    assert not found.has_drifted


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 1), min_size=1), st.data())
def test_a_distance_is_between_0_and_1_and_0_only_for_equal_shares(usage, data):
    seen = data.draw(st.dictionaries(st.sampled_from("abcdefghi"), st.integers(1, 1000), min_size=1))
    found = counted(usage, seen).sample().statistics()
    assert 0 <= found.distance <= 1 + 1e-9
    assert 0 <= found.chance <= 1
    assert found.steps == sum(seen.values())


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 200), min_size=1))
def test_what_comes_exactly_as_expected_never_drifts(counts):
    found = counted(counts, {expert: 10 * count for expert, count in counts.items()}).sample().statistics()
    assert found.distance == pytest.approx(0, abs=1e-9)
    assert not found.has_drifted


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), st.integers(LEAST_STEPS, 5000))
def test_an_expert_that_nobody_expected_drifts_once_it_has_a_larger_share_than_chance_allows(counts, steps):
    found = counted(counts, {"unexpected": steps}).sample().statistics()
    assert found.distance == pytest.approx(1)
    assert found.has_drifted == (found.threshold < 1)
    assert "unexpected" in [moved.expert for moved in found.experts]


@pytest.mark.parametrize("draws", [1, 2, 7, 30])
@pytest.mark.parametrize("probability", [0.0, 0.03, 0.5, 0.9, 1.0])
def test_what_chance_gives_is_the_mean_over_all_outcomes(draws, probability):
    shares = (probability, 1 - probability)
    by_hand = sum(
        math.comb(draws, k) * probability**k * (1 - probability) ** (draws - k) * abs(k / draws - probability)
        for k in range(draws + 1)
    )
    assert chance_distance(shares, draws) == pytest.approx(by_hand, abs=1e-12)


def test_chance_shrinks_with_the_sample_and_grows_with_the_experts():
    few, many = [0.25] * 4, [1 / 400] * 400
    assert chance_distance(few, 500) > 1.9 * chance_distance(few, 2000)
    assert chance_distance(many, 500) > 5 * chance_distance(few, 500)


@pytest.mark.parametrize("seed", range(20))
def test_draws_from_what_is_expected_are_no_drift_and_from_something_else_are(seed):
    chance = random.Random(seed)
    usage = {f"e{number}": chance.lognormvariate(0, 2) for number in range(100)}
    experts, weights = list(usage), list(usage.values())
    steady, shifted = UsageDrift(usage), UsageDrift(usage)
    steady.count(chance.choices(experts, weights, k=2000))
    shifted.count(chance.choices(experts, weights[50:] + weights[:50], k=2000))
    assert not steady.sample().statistics().has_drifted
    assert shifted.sample().statistics().has_drifted


def test_a_few_steps_are_no_drift_whatever_they_are():
    drift = counted({"a": 1.0, "b": 1.0}, {"c": LEAST_STEPS - 1})
    alarm = DriftAlarm()
    assert drift.sample().statistics().distance == 1
    assert alarm.due_warning(drift.sample().statistics(), 0.0) is None
    drift.count(["c"])
    assert alarm.due_warning(drift.sample().statistics(), 0.0) == drift.sample().statistics()


def test_a_warning_comes_at_once_and_then_every_hour():
    found = counted({"a": 1.0, "b": 1.0}, {"a": 1000}).sample().statistics()
    alarm = DriftAlarm()
    moments = range(0, 10_000, 100)
    asked = [now for now in moments if alarm.can_warn(50.0 + now) and alarm.due_warning(found, 50.0 + now)]
    assert asked == [0, int(WARNING_INTERVAL_S), 2 * int(WARNING_INTERVAL_S)]
    alarm = DriftAlarm()
    assert [now for now in moments if alarm.due_warning(found, 50.0 + now)] == asked


def test_usage_that_came_back_is_not_warned_of_again():
    drift = counted({"a": 1.0, "b": 1.0}, {"a": 1000})
    alarm = DriftAlarm()
    assert alarm.due_warning(drift.sample().statistics(), 0.0) is not None
    drift.count(["b"] * 1000)
    assert alarm.due_warning(drift.sample().statistics(), WARNING_INTERVAL_S) is None


def test_a_sample_stays_as_it_was_taken():
    drift = counted({"a": 1.0, "b": 1.0}, {"a": 10})
    before = drift.sample()
    drift.count(["b"] * 10)
    assert before.statistics() == counted({"a": 1.0, "b": 1.0}, {"a": 10}).sample().statistics()


STEPS_A_DAY = 20_000
DAY_S = 24 * 3600.0
TURNS = 100  # of counting a day, with a look after each
AS_EXPECTED, OTHERWISE = ["a", "b"] * (STEPS_A_DAY // TURNS // 2), ["a"] * (STEPS_A_DAY // TURNS)


def warned_days(*days):
    """When it is warned, in days, of a line that expects as many of a as of b; ``days``: what is asked in each."""
    drift, alarm = UsageDrift({"a": 1.0, "b": 1.0}), DriftAlarm()
    warned = []
    for turn in range(TURNS * len(days)):
        drift.count(days[turn // TURNS])
        if alarm.due_warning(drift.sample().statistics(), (turn + 1) / TURNS * DAY_S):
            warned.append((turn + 1) / TURNS)
    return warned


def test_a_change_after_a_month_as_expected_is_told_within_the_day():
    """By hand: 4 000 of the last 20 000 steps, all of a, move a's share by 0.1."""
    warned = warned_days(*[AS_EXPECTED] * 30, OTHERWISE)
    assert 30.0 < warned[0] <= 30.25


def test_a_first_day_that_was_otherwise_is_not_told_for_ever():
    """By hand: 20 000 steps of a weigh 2 500 of 20 000 after another day and a half, which moves a's share by 0.06."""
    warned = warned_days(OTHERWISE, *[AS_EXPECTED] * 9)
    assert warned[0] < 0.1
    assert 1.0 < warned[-1] < 2.5


def test_what_is_forgotten_counts_less_and_makes_chance_as_small_as_the_sample_is_large(monkeypatch):
    """By hand: five steps, halved, then two: 4.5 together, 3.25 squared; halving these changes no share."""
    monkeypatch.setattr("agent.service.inspections.drift.FORGETTING_STEPS", 4)
    drift = counted({"a": 0.5, "b": 0.5}, {"a": 5})
    assert (drift.sample().statistics().steps, drift.sample().statistics().distance) == (5, 0.5)
    drift.count(["b", "b"])
    found = drift.sample().statistics()
    assert found.steps == 6  # 4.5 * 4.5 / 3.25 = 6.2
    assert found.experts == (ExpertDrift("a", 0.5, 2.5 / 4.5), ExpertDrift("b", 0.5, 2 / 4.5))
    assert found.chance == chance_distance([0.5, 0.5], 6)


def test_chance_is_what_draws_from_the_expected_give_however_much_was_forgotten(monkeypatch):
    monkeypatch.setattr("agent.service.inspections.drift.FORGETTING_STEPS", 1000)
    usage = {f"e{number}": 1.0 + number for number in range(40)}
    ratios = []
    for seed in range(60):
        drift = UsageDrift(usage)
        drift.count(random.Random(seed).choices(list(usage), list(usage.values()), k=4000 + 30 * seed))
        found = drift.sample().statistics()
        assert 1000 <= found.steps <= 1500
        ratios.append(found.distance / found.chance)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.05)
