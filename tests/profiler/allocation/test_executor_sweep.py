"""The executor sweep: the device's executors first, then the CPU's, and when a row ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.allocation.decay_window import ExecutorCounts, executor_sweep


@pytest.mark.parametrize(
    ("device", "cpu", "run", "best"),
    [
        pytest.param(
            [0, 10, 18, 25, 24, 23, 99],
            [0, 2, 1, 0.5, 9],
            [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (3, 0), (3, 2), (3, 3)],
            (3, 1),
            id="the paper's order: two declines end a row",
        ),
        pytest.param([0, 10, 9, 12, 11, 10], [0], [(n, 0) for n in range(1, 6)], (3, 0), id="one decline does not"),
        pytest.param([0, 10, 9], [3, 2, 1], None, (1, 0), id="best without the CPU"),
        pytest.param([5] * 5, [0] * 5, None, (1, 0), id="of equal throughputs the fewest executors"),
        pytest.param([0], [0, 4, 6, 7, 6, 5, 9, 9, 9], [(0, n) for n in range(1, 6)], (0, 3), id="a CPU only"),
        pytest.param([0, 1, 2, None], [0], [(1, 0), (2, 0), (3, 0)], (2, 0), id="a row ends where the memory does"),
    ],
)
def test_a_sweep_by_hand(device, cpu, run, best):
    """A throughput made of one part by device executors and one by CPU executors; None: no room."""

    def throughput(counts):
        parts = device[counts.device], cpu[counts.cpu]
        return None if None in parts else sum(parts)

    sweep = executor_sweep(throughput, most_device=len(device) - 1, most_cpu=len(cpu) - 1)
    assert run is None or [(counts.device, counts.cpu) for counts in sweep.steps] == run
    assert sweep.best == ExecutorCounts(*best)


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
    assert list(sweep.steps) == asked
    assert all(counts.device + counts.cpu >= 1 for counts in asked)
    if asked:
        assert sweep.steps[sweep.best] == max(sweep.steps.values())
    else:
        assert (most_device, most_cpu, sweep.best) == (0, 0, None)
