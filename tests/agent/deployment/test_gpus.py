"""Each process of a box gets a GPU of its own: the agent, its workers, and ranks of language models."""

import pytest

from agent.deployment.gpus import gpus_of_ranks, gpus_of_workers
from agent.environment import VISIBLE_GPUS
from tests.agent.line_files import LineFile, expert, fake, route

WORKERS = {"workers": [{"count": 2, "device": "cuda"}, {"device": "cpu"}]}


def line(folder, **keys):
    fake(folder / "f.yaml")
    experts = {"cls/f": expert("f.yaml")}
    for name, parallel in (("llm/two", {"tensor": 2}), ("llm/four", {"expert": 4})):
        experts[name] = {"architecture": "llm", "weights": "none", "parallel": parallel}
    return LineFile(folder, **{"experts": experts, "routes": {"part": route("cls/f")}} | keys)


@pytest.mark.parametrize(
    ("keys", "visible", "workers"),
    [
        ({}, None, {"w1": "1", "w2": "2"}),
        ({"executors": {"cpu": 2}}, None, {"w1": "0", "w2": "1"}),
        ({"device": "cpu"}, None, {"w1": "0", "w2": "1"}),
        ({}, "5,7", {"w1": "7", "w2": ""}),
    ],
)
def test_workers_get_gpus_behind_the_agent_s_own(tmp_path, monkeypatch, keys, visible, workers):
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_GPUS, visible)
    assert gpus_of_workers(line(tmp_path, cluster=WORKERS, **keys).config) == workers


@pytest.mark.parametrize(
    ("keys", "count", "ranks"),
    [
        ({}, 0, {}),
        ({}, 2, {}),
        ({}, 3, {"llm/two": ("1", "2")}),
        ({}, 7, {"llm/four": ("1", "2", "3", "4"), "llm/two": ("5", "6")}),
        ({"executors": {"cpu": 1}}, 4, {"llm/four": ("0", "1", "2", "3")}),
        ({"device": "cpu"}, 8, {}),
        ({"cluster": WORKERS}, 5, {"llm/two": ("3", "4")}),
    ],
)
def test_ranks_get_a_gpu_each_where_enough_are_left(tmp_path, monkeypatch, keys, count, ranks):
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    assert gpus_of_ranks(line(tmp_path, **keys).config, count) == ranks


def test_ranks_of_several_boxes_stay_on_cpus(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "box-1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpus_of_ranks(line(tmp_path).config, 8) == {}
