"""The Engine whose decisions are timed is at work all the time."""

from dataclasses import asdict, replace

import pytest

from proof.parts.decisions import (
    decision_targets,
    measure_decisions,
    measure_growth,
    measure_workers,
    workers_target,
)


@pytest.mark.parametrize("policy", ["coserve", *(pytest.param(n, marks=pytest.mark.slow) for n in ("paper", "samba"))])
def test_batches_end_and_experts_come_and_go_in_both_halves(policy):
    half, whole = (measure_decisions(500, calls, policy) for calls in (1000, 2000))
    first = {name: asdict(half)[name] for name in ("batches", "loads", "evictions")}
    second = {name: asdict(whole)[name] - count for name, count in first.items()}
    assert min(first.values()) > 10
    assert all(second[name] > count / 2 for name, count in first.items())


def test_a_longer_queue_is_a_row_and_growth_a_target():
    found = measure_growth((100, 400), 200, 70)
    assert [(row.workers, row.queued) for row in found.rows] == [(1, 100), (1, 400), (1, 300), (32, 9600)]
    assert "policy coserve" in found.text()
    assert all(0 < row.over_inference < 1 for row in found.rows)
    at_target = replace(found.rows[1], queued=10_000, cpu_an_image_s=101e-6)
    of_image, growth = decision_targets((replace(found.rows[0], cpu_an_image_s=75e-6), at_target))
    assert (of_image.found, of_image.reached) == ("101 us", False)
    assert (growth.found, growth.reached) == ("1.35", True)


def test_every_worker_is_at_work_and_the_time_of_many_is_told_beside_one():
    one, three = (measure_workers(workers, 1500, experts=100) for workers in (1, 3))
    assert (one.queued, three.queued) == (300, 900)
    assert min(one.batches, one.loads, three.batches, three.loads) > 10
    told = workers_target(replace(one, cpu_p99_s=100e-6), replace(three, cpu_p99_s=201e-6))
    assert (told.found, told.reached) == ("2.01", False)
