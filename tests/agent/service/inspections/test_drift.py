"""Drift: a distance by hand, what chance gives, and when it is worth a warning."""

import math

import pytest
from hypothesis import given
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


def found(drift):
    return drift.sample().statistics()


def test_drift_distance_is_half_of_the_moved_shares():
    drift = counted({"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 10, "b": 20, "d": 10})
    sample = drift.sample()
    drift.count(["b"] * 10)
    moved = sample.statistics()  # as it was taken
    assert (moved.steps, moved.distance) == (40, 0.5)  # a -0.25, b +0.25, c -0.25, d +0.25
    assert moved.experts == (ExpertDrift("a", 0.5, 0.25), ExpertDrift("b", 0.25, 0.5), ExpertDrift("c", 0.25, 0.0))


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 200), min_size=1))
def test_usage_exactly_as_expected_never_drifts(counts):
    moved = found(counted(counts, {expert: 10 * count for expert, count in counts.items()}))
    assert moved.distance == pytest.approx(0, abs=1e-9)
    assert not moved.has_drifted


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), st.integers(LEAST_STEPS, 5000))
def test_unexpected_expert_drifts_once_its_share_exceeds_chance(counts, steps):
    moved = found(counted(counts, {"unexpected": steps}))
    assert moved.distance == pytest.approx(1)
    assert moved.has_drifted == (moved.threshold < 1)
    assert "unexpected" in [share.expert for share in moved.experts]


@given(st.integers(1, 30), st.floats(0, 1))
def test_chance_distance_is_the_mean_over_all_outcomes(draws, probability):
    by_hand = sum(
        math.comb(draws, k) * probability**k * (1 - probability) ** (draws - k) * abs(k / draws - probability)
        for k in range(draws + 1)
    )
    assert chance_distance((probability, 1 - probability), draws) == pytest.approx(by_hand, abs=1e-9)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2 * LEAST_STEPS, max_size=3 * LEAST_STEPS))
def test_images_judged_one_expert_after_another_give_no_drift_while_others_wait(arrived):
    """What comes as expected, in the order of a scheduler that groups it by expert."""
    drift = UsageDrift({expert: arrived.count(expert) for expert in "abcdefgh"})
    for done, expert in enumerate(sorted(arrived), 1):
        drift.count([expert])
        if done % 50 == 0:
            assert not drift.statistics(len(arrived) - done).has_drifted


def test_drift_warning_is_repeated_hourly_until_usage_returns():
    drift, alarm = counted({"a": 1.0, "b": 1.0}, {"a": LEAST_STEPS - 1}), DriftAlarm()
    assert alarm.due_warning(0.0, lambda: found(drift)) is None
    drift.count(["a"])
    moments = range(0, 10_000, 100)
    warned = [now for now in moments if alarm.due_warning(50.0 + now, lambda: found(drift))]
    assert warned == [0, int(WARNING_INTERVAL_S), 2 * int(WARNING_INTERVAL_S)]
    drift.count(["b"] * LEAST_STEPS)
    assert alarm.due_warning(20_000.0, lambda: found(drift)) is None


def test_forgetting_lowers_the_weight_of_old_steps_and_the_effective_sample(monkeypatch):
    """By hand: five steps, halved, then two: 4.5 together, 3.25 squared; halving these changes no share."""
    monkeypatch.setattr("agent.service.inspections.drift.FORGETTING_STEPS", 4)
    drift = counted({"a": 0.5, "b": 0.5}, {"a": 5})
    assert (found(drift).steps, found(drift).distance) == (5, 0.5)
    drift.count(["b", "b"])
    moved = found(drift)
    assert moved.steps == 6  # 4.5 * 4.5 / 3.25 = 6.2
    assert moved.experts == (ExpertDrift("a", 0.5, 2.5 / 4.5), ExpertDrift("b", 0.5, 2 / 4.5))
    assert moved.chance == chance_distance([0.5, 0.5], 6)
