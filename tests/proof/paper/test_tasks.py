"""Tasks A1 to B2: what the paper's text says of them, and what is stated where it does not."""

from collections import Counter

import pytest

from proof.paper.tasks import (
    CLASSIFIER,
    DETECTORS,
    DETECTORS_OF_EACH,
    INTERVAL_S,
    PASS_RATE,
    TASKS,
    PaperBoard,
    paper_task,
    sample_of,
    task_of,
)


@pytest.mark.parametrize(
    ("name", "types", "requests"), [("A1", 352, 2500), ("A2", 352, 3500), ("B1", 342, 2500), ("B2", 342, 3500)]
)
def test_a_task_is_what_section_5_1_says(name, types, requests):
    task = paper_task(name)
    kinds = Counter(task.architectures.values())
    assert len(task.graph.routes) == kinds[CLASSIFIER] == types
    assert len(task.trace) == requests
    assert [arrival.at_s for arrival in task.trace[:3]] == pytest.approx([0.0, 0.004, 0.008])
    assert task.trace[-1].at_s == pytest.approx((requests - 1) * INTERVAL_S)
    assert {arrival.component for arrival in task.trace} <= set(task.graph.routes)
    assert set(kinds) == {CLASSIFIER, *DETECTORS}
    first = {steps[0].expert for steps in task.graph.routes.values()}
    after = Counter(steps[1].expert for steps in task.graph.routes.values() if len(steps) == 2)
    assert (len(first), len(after)) == (types, len(DETECTORS) * DETECTORS_OF_EACH)
    assert min(after.values()) > 1  # detectors are shared, and come after a classifier
    assert not first & set(after)


def test_the_same_task_every_time_and_another_sample():
    assert TASKS == ("A1", "A2", "B1", "B2")
    first, again = paper_task("B1"), paper_task("B1")
    assert (first.trace, first.passes, first.usage) == (again.trace, again.passes, again.usage)
    assert first.trace == paper_task("B2").trace[:2500]
    sample = sample_of("B", 2500)
    assert (sample.usage, sample.architectures) == (first.usage, first.architectures)
    assert sample.trace != first.trace


def test_usage_follows_the_quantities_and_the_pass_rate():
    """All classifiers together are used once a request, all detectors as often as what leads to them passes."""
    task = task_of(PaperBoard("T", 9, seed=3), 4000, "T")
    classifiers = [expert for expert, kind in task.architectures.items() if kind == CLASSIFIER]
    assert sum(task.usage[expert] for expert in classifiers) == pytest.approx(1.0)
    for steps in task.graph.routes.values():
        if len(steps) == 2:
            assert task.usage[steps[1].expert] == pytest.approx(PASS_RATE * task.usage[steps[0].expert])
    counted = Counter(arrival.component for arrival in task.trace)
    for component, steps in task.graph.routes.items():
        assert counted[component] / 4000 == pytest.approx(task.usage[steps[0].expert], abs=0.03)


def test_a_classifier_passes_what_the_task_says_and_a_detector_everything():
    task = paper_task("A1")
    assert sum(task.passes) / len(task.passes) == pytest.approx(PASS_RATE, abs=0.02)
    component = next(steps for steps in task.graph.routes.values() if len(steps) == 2)
    rejected = task.passes.index(False)
    assert task.predict(rejected, component[0].expert).label not in component[0].passing
    assert task.predict(rejected, component[1].expert).label in component[1].passing
