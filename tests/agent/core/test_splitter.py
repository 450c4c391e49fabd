"""BatchSplitter on known cases: what bounds a batch, how the bound of memory falls, and how it is forgotten."""

import pytest

from agent.core.performance import Performance
from agent.core.scheduler import FIRST_PATIENCE, LONGEST_PATIENCE, BatchSplitter

ROW = Performance(1.0, 1.0, max_batch=8, workspace_bytes=10, workspace_base_bytes=6)


@pytest.fixture
def splitter():
    return BatchSplitter()


def size(splitter, expert="a", executor=0, row=ROW, waiting=99):
    return splitter.batch_size(expert, executor, row, waiting, free_bytes=999)


def ran(splitter, batch_size, times=1):
    for _ in range(times):
        splitter.ran("a", 0, batch_size, max_batch=8)


def test_batch_size_is_bounded_by_profile_waiting_requests_and_memory(splitter):
    sizes = [
        splitter.batch_size("a", 0, ROW, waiting, free_bytes)
        for waiting, free_bytes in [(9, 999), (8, 999), (3, 999), (9, 56), (9, 55), (9, 16), (9, 15), (9, 0)]
    ]
    assert sizes == [8, 8, 3, 5, 4, 1, 1, 1]
    assert splitter.batch_size("a", 0, Performance(1.0, 1.0, 8, workspace_bytes=0), 9, free_bytes=0) == 8


def test_out_of_memory_halves_the_batches_of_that_expert_on_that_executor_alone(splitter):
    splitter.ran_out_of_memory("a", 0, 7)
    assert (size(splitter), size(splitter, waiting=2)) == (3, 2)
    assert (size(splitter, expert="b"), size(splitter, executor=1)) == (8, 8)
    for _ in range(4):
        splitter.ran_out_of_memory("a", 0, size(splitter))
    assert size(splitter) == 1


def test_batch_limit_doubles_after_enough_batches_at_the_limit(splitter):
    splitter.ran_out_of_memory("a", 0, 6)
    ran(splitter, 3, FIRST_PATIENCE - 1)
    assert size(splitter) == 3
    ran(splitter, 2, 99)  # says nothing of a batch of three
    assert size(splitter) == 3
    ran(splitter, 3)
    assert size(splitter) == 6
    ran(splitter, 6, FIRST_PATIENCE - 1)
    assert size(splitter) == 6
    ran(splitter, 6)
    assert size(splitter) == 8  # not twelve


def test_batch_limit_that_held_at_the_profiled_maximum_is_forgotten(splitter):
    splitter.ran_out_of_memory("a", 0, 8)
    ran(splitter, 4, FIRST_PATIENCE)
    larger = Performance(1.0, 1.0, max_batch=16, workspace_bytes=0)
    ran(splitter, 8, FIRST_PATIENCE - 1)
    assert (size(splitter), size(splitter, row=larger)) == (8, 8)
    ran(splitter, 8)
    assert size(splitter, row=larger) == 16
    splitter.ran_out_of_memory("a", 0, 8)
    ran(splitter, 4, FIRST_PATIENCE)
    assert size(splitter) == 8  # and its patience is the first one again


def test_each_further_out_of_memory_doubles_the_patience_up_to_the_longest(splitter):
    patience = FIRST_PATIENCE
    for _ in range(9):
        splitter.ran_out_of_memory("a", 0, 8)
        ran(splitter, 4, patience - 1)
        assert size(splitter) == 4
        ran(splitter, 4)
        assert size(splitter) == 8
        patience = min(2 * patience, LONGEST_PATIENCE)
    assert patience == LONGEST_PATIENCE


def test_batch_limit_stays_without_an_out_of_memory(splitter):
    ran(splitter, 8, FIRST_PATIENCE)
    assert size(splitter) == 8
