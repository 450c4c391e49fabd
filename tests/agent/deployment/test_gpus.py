"""Each process of a box gets a GPU of its own: the agent, its workers, and ranks of language models."""

import pytest

from agent.deployment.executors import gpus_of_ranks, gpus_of_workers
from agent.environment import VISIBLE_GPUS
from tests.agent.line_files import LineFile

WORKERS = {"workers": [{"count": 2, "device": "cuda"}, {"device": "cpu"}]}
TWO, FOUR = ({"architecture": "llm", "weights": "none", "parallel": shape} for shape in ({"tensor": 2}, {"expert": 4}))
CASES = [  # keys of the line, visible GPUs, all GPUs, those of workers and of ranks
    ({"cluster": WORKERS}, None, 5, ("1", "2"), {"b": ("3", "4")}),
    ({"cluster": WORKERS, "executors": {"cpu": 2}}, None, 3, ("0", "1"), {}),
    ({"cluster": WORKERS, "device": "cpu"}, None, 8, ("0", "1"), {}),
    ({"cluster": WORKERS}, "5,7", 2, ("7", ""), {}),
    ({}, None, 2, (), {}),
    ({}, None, 3, (), {"b": ("1", "2")}),
    ({}, None, 7, (), {"a": ("1", "2", "3", "4"), "b": ("5", "6")}),
    ({"executors": {"cpu": 1}}, "0,3", 2, (), {"b": ("0", "3")}),
]


@pytest.mark.parametrize(("keys", "visible", "count", "workers", "ranks"), CASES)
def test_workers_and_then_ranks_get_gpus_behind_the_agent_s_own(
    tmp_path, monkeypatch, keys, visible, count, workers, ranks
):
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_GPUS, visible)
    config = LineFile(tmp_path, experts={"llm/a": FOUR, "llm/b": TWO}, **keys).config
    assert tuple(gpus_of_workers(config).values()) == workers
    assert {name[-1]: gpus for name, gpus in gpus_of_ranks(config, count).items()} == ranks
    monkeypatch.setenv("MASTER_ADDR", "box-1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpus_of_ranks(config, count) == {}, "ranks of several boxes compute on CPUs"
