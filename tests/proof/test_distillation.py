"""``coserve bench distil``: its arithmetic, and a tiny run of the whole."""

import json

import pytest

from experts.llm.training.staged import Schedule
from proof import distillation
from proof.distillation import CHOSEN_ON, SEEDS, DistilTrial, LossRow, measure_distillation, staged_target

TINY = DistilTrial(16, (0, 2, 0, 2), (200, 100), Schedule(12, 6e-3), Schedule(4, 2e-3, alpha=1.0, stop_at=2))


def test_nothing_is_chosen_on_the_measured_seeds():
    assert not set(SEEDS) & set(CHOSEN_ON)


def test_students_differ_in_their_soft_labels_only():
    schedules = TINY.schedules()
    alphas = {name: [each.alpha_at(step) for step in range(each.steps)] for name, each in schedules.items()}
    assert alphas == {"staged": [1, 1, 0, 0], "full": [1, 1, 1, 1], "none": [0, 0, 0, 0]}
    assert {(each.steps, each.learning_rate) for each in schedules.values()} == {(4, 2e-3)}


def test_interval_is_students_t():
    row = LossRow("staged", (1.0, 2.0, 3.0, 4.0, 5.0))
    assert (row.mean, row.interval) == (3.0, pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3))


@pytest.mark.parametrize(
    ("losses", "reached"), [((0.9, 0.8, 0.9), True), ((0.7, 1.0, 1.0), False), ((1.1,) * 3, False)]
)
def test_staged_is_better_only_if_the_whole_interval_is(losses, reached):
    target = staged_target(LossRow("staged", losses), LossRow("full", (1.0, 0.95, 1.0)))
    assert target.reached is reached


@pytest.mark.slow
def test_tiny_run_has_each_students_loss_per_seed_and_is_reproducible():
    seen = []
    first, again = (measure_distillation(lambda *each: seen.append(each), (7, 8), TINY) for _ in range(2))
    assert [row.model for row in first.rows] == ["teacher", "its kept layers", "staged", "full", "none"]
    assert first.rows == again.rows
    assert all(len(row.losses) == 2 for row in first.rows)
    assert seen[-1] == ("teachers and students", 2, 2)
    assert json.loads(json.dumps(first.as_json()))["rows"][2]["model"] == "staged"
    assert "chosen on seeds 101, 102, 103, 104" in first.text()
    assert distillation.staged_target(first.rows[2], first.rows[3]) == first.targets[0]
