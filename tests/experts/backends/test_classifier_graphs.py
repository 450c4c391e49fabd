"""Classifiers whose small batches run as graphs: the answers of a run without."""

import pytest

from experts.backends import backend_for
from experts.devices.graphs import GRAPH_BYTES, RUNS_BEFORE, using_graphs
from tests.experts.conftest import bound
from tests.experts.played_graphs import played

RUNS = RUNS_BEFORE + 2


@pytest.mark.parametrize(("kind", "size"), [("classifier", 1), ("classifier", 4), ("classifier", 5), ("detector", 1)])
def test_answers_by_graphs_are_those_without(files, image, kind, size):
    expert = getattr(files, kind)("x")
    shown = [backend_for(expert.architecture).prepare(expert, image[n:]) for n in range(size)]
    skeleton, (graphs, recorder) = bound(expert), played()
    expected = skeleton.infer(expert, shown)
    with using_graphs(graphs):
        assert [skeleton.infer(expert, shown) for _ in range(RUNS)] == [expected] * RUNS
        assert skeleton.infer(expert, shown[::-1]) == expected[::-1]
    is_captured = kind == "classifier" and size <= 4
    assert recorder.replays == is_captured * (RUNS - RUNS_BEFORE + 1)


def test_graph_runs_the_bytes_that_are_in_the_slot_and_goes_when_it_is_bound_elsewhere(files, image):
    expert, other = (files.classifier(name, seed=seed) for seed, name in enumerate("xy"))
    backend, (graphs, recorder) = backend_for(expert.architecture), played()
    shown, elsewhere = [backend.prepare(expert, image)], backend.pack(other, "fp32").tensors
    slot = {name: tensor.clone() for name, tensor in backend.pack(expert, "fp32").tensors.items()}
    skeleton = bound(expert)
    skeleton.bind(slot)
    with using_graphs(graphs):
        for _ in range(RUNS):
            skeleton.infer(expert, shown)
        for name, tensor in slot.items():
            tensor.copy_(elsewhere[name])
        assert skeleton.infer(other, shown) == bound(other).infer(other, shown)
        assert (recorder.captures, graphs.held_bytes) == (1, GRAPH_BYTES)
        skeleton.bind(elsewhere)
        assert graphs.held_bytes == 0
