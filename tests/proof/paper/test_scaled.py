"""The scaled-down tasks: what is generated for how many experts, one tiny run for real, and the table by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proof.paper.scaled import (
    POLICIES,
    measure_scaled,
    scaled_json,
    scaled_recipe,
    scaled_table,
)

TINY = replace(
    scaled_recipe(10, 12, is_cpu_only=True),
    architecture="squeezenet1_1",
    detector_architectures=("yolov5n", "yolov8n"),
    every_s=0.001,
    classifier_px=64,
    detector_px=64,
)


@pytest.mark.parametrize(
    ("experts", "detectors", "memory_for"),
    [(3, 0, 2), (7, 0, 2), (8, 2, 2), (10, 2, 2), (40, 2, 4), (100, 3, 10), (364, 12, 36)],
)
def test_proportions_are_the_papers_as_far_as_the_number_allows(experts, detectors, memory_for):
    recipe = scaled_recipe(experts, 500, is_cpu_only=False)
    assert (recipe.classifiers + recipe.detectors, recipe.detectors) == (experts, detectors)
    assert recipe.memory_for == memory_for
    assert (recipe.architecture, recipe.detector_architectures) == ("resnet101", ("yolov5m", "yolov5l"))
    assert (recipe.requests, recipe.every_s, recipe.sigma, recipe.detector_px) == (500, 0.004, 2.0, 640)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny line for real, what was told meanwhile, and what was left in its folder."""
    folder = tmp_path_factory.mktemp("scaled")
    stages = []
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COSERVE__DEVICE", "cpu")
        measurement = measure_scaled(folder, TINY, lambda stage, done, total: stages.append((stage, done, total)))
    assert list(folder.iterdir()) == []
    return measurement, stages


def test_every_policy_plays_the_same_trace_once_and_judges_alike(measured):
    measurement, stages = measured
    assert tuple(row.policy for row in measurement.rows) == POLICIES
    assert {(row.requests, len(row.runs), row.medians.unknown) for row in measurement.rows} == {(12, 1, 0)}
    assert len({row.medians.outputs_sha256 for row in measurement.rows}) == 1
    assert [stage for stage, _, _ in stages if stage in POLICIES] == list(POLICIES)


def test_the_table_says_what_was_generated_and_that_its_weights_are_random(measured):
    text = scaled_table(measured[0])
    assert "8 squeezenet1_1 at 64 px, 1 yolov5n at 64 px, 1 yolov8n at 64 px; memory for 2 of 10" in text
    assert "12 requests, one every 1 ms; quantities log-normal, sigma 2; each policy once" in text
    assert "passes every image, in the paper's tasks 95%: weights are random" in text


def test_rows_of_scripts_say_which_task_on_which_device(measured):
    found = scaled_json(measured[0])
    for row, policy in zip(found["rows"], POLICIES, strict=True):
        assert (row["task"], row["device"], row["policy"]) == ("scaled", measured[0].machine, policy)
        assert row["switches"] >= 0
        assert row["images_per_s"] > 0
    assert found["notes"] == measured[0].notes


def told(measurement, **paper):
    """The table if every policy had done 2 images/s with 200 switches, but the paper's."""
    others = {"images_per_s": 2.0, "switches": 200}
    rows = (
        replace(row, medians=replace(row.medians, **(paper if row.policy == "paper" else others)))
        for row in measurement.rows
    )
    return [line.split() for line in scaled_table(replace(measurement, rows=tuple(rows))).splitlines()]


@pytest.mark.parametrize(
    ("images_per_s", "switches", "ratio", "fewer", "is_within", "is_reached"),
    [
        (10.0, 20, "5.00", "90.0%", "within", "reached"),
        (3.0, 100, "1.50", "50.0%", "below", "below"),
        (26.0, 43, "13.00", "78.5%", "above", "reached"),
        (2.0, 250, "1.00", "-25.0%", "below", "below"),
    ],
)
def test_the_papers_policy_stands_beside_the_papers_figures(
    measured, images_per_s, switches, ratio, fewer, is_within, is_reached
):
    lines = told(measured[0], images_per_s=images_per_s, switches=switches)
    assert ["paper", ratio, str(switches), fewer] in [line[:4] for line in lines]
    one, other = (" ".join(line) for line in lines[-2:])
    assert one.startswith(f"the paper paper is {ratio} times samba, 4.5 to 12 there at full size: {is_within}")
    assert other.startswith(f"the paper paper has {fewer} fewer switches, 78.5% at least there: {is_reached}")


def test_samba_has_no_fewer_switches_than_itself(measured):
    lines = [line[:4] for line in told(measured[0], images_per_s=10.0, switches=20)]
    assert ["samba", "1.00", "200", "-"] in lines
    assert ["coserve", "1.00", "200", "0.0%"] in lines
