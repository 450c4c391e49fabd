"""The executor sweep: the device's executors first, then the CPU's, and when a row ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from profiler.allocation.executor_sweep import ExecutorCounts, executor_sweep


def by_sum(device, cpu):
    """A throughput made of one part by device executors and one by CPU executors."""
    return lambda counts: device[counts.device] + cpu[counts.cpu]


def run_of(sweep):
    return [(step.counts.device, step.counts.cpu) for step in sweep.steps]


def test_the_papers_order_device_first_and_two_declines_end_a_row():
    sweep = executor_sweep(by_sum([0, 10, 18, 25, 24, 23, 99], [0, 2, 1, 0.5, 9]), most_device=6, most_cpu=4)
    assert run_of(sweep) == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (3, 0), (3, 2), (3, 3)]
    assert sweep.best == ExecutorCounts(3, 1)


def test_one_decline_between_two_rises_does_not_end_a_row():
    sweep = executor_sweep(by_sum([0, 10, 9, 12, 11, 10], [0]), most_device=5, most_cpu=0)
    assert run_of(sweep) == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]
    assert sweep.best == ExecutorCounts(3, 0)


def test_a_box_may_do_best_without_its_cpu():
    assert executor_sweep(by_sum([0, 10, 9], [3, 2, 1]), 2, 4).best == ExecutorCounts(1, 0)


def test_of_equal_throughputs_the_fewest_executors():
    assert executor_sweep(lambda counts: 5.0, 4, 4).best == ExecutorCounts(1, 0)


def test_a_box_with_a_cpu_only_sweeps_that():
    sweep = executor_sweep(by_sum([0], [0, 4, 6, 7, 6, 5]), most_device=0, most_cpu=8)
    assert run_of(sweep) == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
    assert sweep.best == ExecutorCounts(0, 3)


def test_a_row_ends_where_the_memory_does():
    sweep = executor_sweep(lambda counts: None if counts.device > 2 else float(counts.device), 6, 0)
    assert run_of(sweep) == [(1, 0), (2, 0), (3, 0)]
    assert sweep.steps[-1].images_per_s is None
    assert sweep.best == ExecutorCounts(2, 0)


@given(
    st.lists(st.integers(0, 50), min_size=7, max_size=7),
    st.lists(st.integers(0, 50), min_size=5, max_size=5),
    st.integers(0, 6),
    st.integers(0, 4),
)
def test_nothing_is_run_twice_and_nothing_that_was_run_is_better(device, cpu, most_device, most_cpu):
    asked = []

    def throughput(counts):
        asked.append(counts)
        return float(device[counts.device] + cpu[counts.cpu])

    sweep = executor_sweep(throughput, most_device, most_cpu)
    assert len(asked) == len(set(asked))
    assert [step.counts for step in sweep.steps] == asked
    assert all(counts.device + counts.cpu >= 1 for counts in asked)
    if asked:
        best = next(step.images_per_s for step in sweep.steps if step.counts == sweep.best)
        assert best == max(step.images_per_s for step in sweep.steps)
    else:
        assert (most_device, most_cpu, sweep.best) == (0, 0, None)
