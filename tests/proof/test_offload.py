"""Half of a model's moe_experts in memory: all ways run, and say the same."""

import pytest
import torch

from proof.llm import offload
from proof.llm.offload import measure_offload
from proof.llm.random_models import TINY


@pytest.fixture(autouse=True)
def short(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(offload, "PROMPT", 8)
    monkeypatch.setattr(offload, "OUTPUT", 4)
    yield
    torch.set_num_threads(before)


def test_a_tiny_model_is_measured_whole(tmp_path):
    part = measure_offload(tmp_path, TINY, 2)
    found = {figure.what: figure.value for figure in part.figures}
    assert min(found[way] for way in (offload.ALL, offload.HALF, offload.UNPREDICTED)) > 0
    assert 0 < found["found in their places"] < 100
    assert found["read a run"] > 0
    assert "8 of 16 moe_experts held" in part.notes[0]
    assert part.targets[0].wanted == "at least 0.5"


def test_a_stronger_skew_finds_more_in_its_places(tmp_path, monkeypatch):
    found = []
    for zipf in (0.0, 3.0):
        monkeypatch.setattr(offload, "ZIPF", zipf)
        part = measure_offload(tmp_path / str(zipf), TINY, 1)
        found.append(next(figure.value for figure in part.figures if figure.what == "found in their places"))
    assert found[0] < found[1]
