"""Graphs of an executor: captured once they are worth it, gone with their owner, and left out once a capture fails."""

import pytest
import torch

from experts.devices.graphs import GRAPH_BYTES, RUNS_BEFORE
from tests.experts.played_graphs import MOST_BYTES, played


class Owner:
    pass


def doubled(numbers):
    return numbers * 2


def run_often(graphs, owner, rows=1, key=None):
    inputs = [torch.arange(float(rows))]
    return [graphs.run(owner, doubled, inputs, [(rows,)], key) for _ in range(RUNS_BEFORE + 1)]


def test_work_is_captured_for_its_shapes_and_addresses_once_it_has_run_some_times():
    graphs, recorder = played()
    owner = Owner()
    *before, result = run_often(graphs, owner, rows=4)
    assert before == [None] * RUNS_BEFORE
    assert result.tolist() == [0, 2, 4, 6]
    widened = graphs.run(owner, doubled, [torch.tensor([3.0, 4.0, 5.0])], [(4,)])
    assert widened.tolist() == [6, 8, 10, 6], "the first row fills the rest"
    assert (recorder.captures, recorder.replays) == (1, 2)
    run_often(graphs, owner)
    run_often(graphs, owner, key=7)
    assert recorder.captures == 3


def test_graphs_go_with_their_owner_and_keep_to_their_memory():
    graphs, recorder = played(taken_bytes=MOST_BYTES - 2 * GRAPH_BYTES)
    owner = Owner()
    run_often(graphs, owner)
    assert graphs.held_bytes == MOST_BYTES - GRAPH_BYTES
    del owner
    assert graphs.held_bytes == MOST_BYTES - 2 * GRAPH_BYTES
    owner = Owner()
    run_often(graphs, owner)
    assert run_often(graphs, owner, rows=2)[-1] is None
    assert recorder.captures == 2


@pytest.mark.parametrize("fault", ["operation not permitted when stream is capturing", "CUDA out of memory"])
def test_failed_capture_leaves_graphs_out_and_is_said_once(caplog, fault):
    graphs, recorder = played(error=RuntimeError(fault))
    for owner in (Owner(), Owner()):
        assert run_often(graphs, owner)[-1] is None
    assert (recorder.captures, graphs.held_bytes) == (1, 0)
    assert [fault in each.getMessage() for each in caplog.records] == [True]
