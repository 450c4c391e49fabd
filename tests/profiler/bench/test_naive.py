"""The general model server: what it counts by hand, what it answers, what it leaves behind."""

import numpy as np
import pytest

from agent.config import read_line
from experts.errors import ConfigError
from profiler.bench.naive import NaiveServer, naive_files
from profiler.replay.player import experts_of, images_of, player
from profiler.workload import generated_line
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import fakes, write_line

ON_CPU = {"COSERVE__DEVICE": "cpu"}  # the environment
RECIPE = LineRecipe(4, "squeezenet1_1", detectors=1, requests=12, memory_for=2, classifier_px=64, detector_px=64)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generated_line, "DETECTORS", ("yolov5n",))
        return read_line(generate_line(tmp_path_factory.mktemp("naive") / "line", RECIPE).line, ON_CPU)


USAGE = {"cls/000": 0.1, "cls/001": 0.2, "cls/002": 0.5}
NO_ROOM, ALL_ROOM = 0, 10**9  # bytes: for the one model that it needs to serve, and for all of them


def server_of(config, files, expert_bytes):
    return NaiveServer(config.catalog.experts, config.catalog.graph, files, expert_bytes, USAGE, "cpu", 2)


@pytest.mark.parametrize(
    ("capacity", "loads", "evictions"),
    [
        (1, 6, 6),  # 2 is there, and every change of expert is a load
        (2, 5, 5),  # 1 and 2 are there: 0 evicts 1 | 1 evicts 2 | 0 | 2 evicts 1 | 1 evicts 0 | 0 evicts 2
        (3, 0, 0),
    ],
)
def test_least_recently_used_model_is_evicted(config, capacity, loads, evictions):
    trace = tuple(TracedArrival(0.0, expert=f"cls/00{number}") for number in (0, 1, 0, 2, 1, 0))
    with naive_files(config, experts_of(trace, config.catalog)) as files:
        largest = max(file.stat().st_size for file in files.values())
        result = server_of(config, files, capacity * largest).play(trace, images_of(trace, config.catalog))
    assert (result.loads, result.evictions) == (loads, evictions)
    assert result.bytes_read == pytest.approx(
        loads * config.catalog.experts["cls/000"].weights.stat().st_size, rel=0.05
    )


def test_naive_server_follows_routes_and_judges_as_the_engine(config):
    """Component 0 goes on to the detector; the others end with their classifier."""
    trace = tuple(TracedArrival(0.0, component=f"part-00{number % 4}") for number in range(8))
    images = [np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8) for seed in range(8)]
    experts = experts_of(trace, config.catalog)
    assert "det/000" in experts
    with player(config, experts) as stage:
        engine = stage.play(trace, images)
    with naive_files(config, experts) as files:
        naive = server_of(config, files, ALL_ROOM).play(trace, images)
        turns = server_of(config, files, NO_ROOM).play(trace, images)
    assert naive.labels == turns.labels == engine.labels
    assert (naive.resident_at_start, naive.loads) == (experts, 0)


def test_model_that_the_naive_server_cannot_run_is_reported_with_its_place(tmp_path):
    files = naive_files(write_line(tmp_path, fakes(1)), ["cls/f0"])
    with pytest.raises(ConfigError, match=r"line\.yaml:1:\d+: experts\.cls/f0: the naive server runs"):
        files.__enter__()
