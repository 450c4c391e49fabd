"""The general model server: what it counts by hand, what it answers, what it leaves behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import save_file

from agent.config import read_line
from experts.backends import backend_for
from experts.errors import ConfigError
from experts.expert import NOTHING_FOUND, Precision
from profiler.generated import LineRecipe, generate_line
from profiler.naive import NaiveServer, build, drop_from_cache, infer, naive_files
from profiler.played import AgentSetup, experts_of, images_of, player
from profiler.simulator import Arrival

ON_CPU = {"COSERVE__DEVICE": "cpu"}  # the environment
RECIPE = LineRecipe(
    classifiers=4,
    architecture="squeezenet1_1",
    detectors=1,
    detector_architectures=("yolov5n",),
    requests=12,
    memory_for=2,
    classifier_px=64,
    detector_px=64,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return read_line(generate_line(tmp_path_factory.mktemp("naive") / "line", RECIPE).line, ON_CPU)


def asking(*experts):
    return tuple(Arrival(0.0, expert=expert) for expert in experts)


def played(config, trace, capacity):
    """A trace on a server that holds so many models."""
    experts = experts_of(trace, config.catalog)
    with naive_files(config, experts) as files:
        largest = max(file.stat().st_size for file in files.values())
        server = NaiveServer(config.catalog.experts, config.catalog.graph, files, capacity * largest, "cpu", 2)
        return server.play(trace, images_of(trace, config.catalog))


@pytest.mark.parametrize(
    ("capacity", "loads", "evictions"),
    [
        (1, 6, 5),  # every change of expert is a load
        (2, 5, 3),  # 0 1 0 | 2 evicts 1 | 1 evicts 0 | 0 evicts 2
        (3, 3, 0),
    ],
)
def test_the_least_recently_used_model_goes(config, capacity, loads, evictions):
    trace = asking("cls/000", "cls/001", "cls/000", "cls/002", "cls/001", "cls/000")
    result = played(config, trace, capacity)
    assert (result.loads, result.evictions, result.capacity) == (loads, evictions, capacity)
    assert result.bytes_read == pytest.approx(
        loads * config.catalog.experts["cls/000"].weights.stat().st_size, rel=0.05
    )


def test_a_memory_smaller_than_any_model_holds_one(config):
    assert played(config, asking("cls/000", "cls/000"), 0).loads == 1


def test_it_plays_again_from_an_empty_memory(config):
    trace = asking("cls/000", "cls/001")
    with naive_files(config, ["cls/000", "cls/001"]) as files:
        server = NaiveServer(config.catalog.experts, config.catalog.graph, files, 10**9, "cpu", 1)
        images = images_of(trace, config.catalog)
        first, second = server.play(trace, images), server.play(trace, images)
    assert (first.loads, second.loads) == (2, 2)
    assert first.labels == second.labels


def test_it_follows_routes_and_judges_as_the_engine_does(config):
    """Component 0 goes on to the detector; the others end with their classifier."""
    trace = tuple(Arrival(0.0, component=f"part-00{number % 4}") for number in range(8))
    images = [picture(number) for number in range(8)]
    experts = experts_of(trace, config.catalog)
    assert "det/000" in experts
    with player(config, experts, AgentSetup()) as stage:
        engine = stage.play(trace, images)
    with naive_files(config, experts) as files:
        naive = NaiveServer(config.catalog.experts, config.catalog.graph, files, 10**9, "cpu", 2).play(trace, images)
    assert naive.labels == engine.labels
    assert naive.loads == len(experts)


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def test_a_detectors_boxes_are_those_of_its_backend(config, tmp_path):
    """With a bias that lets it see things everywhere, so that there are boxes to be compared."""
    model = build(config.catalog.experts["det/000"]).eval()
    state = model.state_dict()
    for name, tensor in state.items():
        if ".cv3." in name and name.endswith(".2.bias"):
            tensor.fill_(0.5)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "seeing.safetensors")
    expert = replace(config.catalog.experts["det/000"], weights=tmp_path / "seeing.safetensors")
    backend = backend_for(expert.architecture)
    skeleton = backend.skeleton(expert, Precision.FP32, b"", "cpu")
    skeleton.bind(backend.pack(expert, Precision.FP32).tensors)
    image = picture(1)
    naive = infer(model, expert, image, "cpu")
    (known,) = skeleton.infer(expert, [backend.prepare(expert, image)])
    assert naive.label == known.label != NOTHING_FOUND
    assert naive.score == pytest.approx(known.score, rel=1e-4)
    assert [box.label for box in naive.boxes] == [box.label for box in known.boxes]


def test_its_files_are_gone_afterwards_also_when_it_breaks(config):
    with naive_files(config, ["cls/000"]) as files:
        assert all(file.is_file() for file in files.values())
        drop_from_cache(files["cls/000"])
    assert not any(file.exists() for file in files.values())
    assert not list(config.state.glob("naive-*"))


def test_what_it_cannot_run_is_told_with_its_place(tmp_path):
    (tmp_path / "f.yaml").write_text("{weight_bytes: 1000}")
    (tmp_path / "line.yaml").write_text(
        "line: l\nstate: ./state\n"
        "experts:\n  cls/f: {architecture: fake, weights: f.yaml, labels: [ok], input: {size: [8, 8]}}\n"
        "routes:\n  c: [{expert: cls/f, pass: [ok]}]\n"
    )
    fake = read_line(tmp_path / "line.yaml", ON_CPU)
    files = naive_files(fake, ["cls/f"])
    with pytest.raises(ConfigError, match=r"line\.yaml:4:\d+: experts\.cls/f: the naive server runs"):
        files.__enter__()


def test_a_rate_holds_its_loads(config):
    """Two loads of the same size through a link: the second cannot end before both are through."""
    trace = asking("cls/000", "cls/001")
    with naive_files(config, ["cls/000", "cls/001"]) as files:
        size_bytes = sum(file.stat().st_size for file in files.values())
        server = NaiveServer(config.catalog.experts, config.catalog.graph, files, 10**9, "cpu", 1, 100e6)
        result = server.play(trace, images_of(trace, config.catalog))
    assert result.seconds >= size_bytes / 100e6
    assert replace(result, seconds=0.0).bytes_read == size_bytes
