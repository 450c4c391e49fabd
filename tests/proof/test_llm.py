"""``coserve bench llm``: it runs in its short form, compares only equal answers, and names what it left out."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from experts.errors import CoServeError
from experts.llm.model import load_model
from proof.llm import mixed, offload
from proof.llm.offload import measure_offload
from proof.llm.our_engine import OurEngine
from proof.llm.random_models import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    SHORTEST_OUTPUT,
    SHORTEST_PROMPT,
    TINY,
    mixed_lengths,
    write_random_model,
)
from proof.llm.report import measure_llm


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@given(st.integers(1, 40), st.integers(1, 5000), st.integers(0, 99))
def test_jobs_are_within_their_bounds_and_the_same_for_a_seed(requests, vocabulary, seed):
    jobs = mixed_lengths(requests, vocabulary, seed)
    assert jobs == mixed_lengths(requests, vocabulary, seed)
    assert len(jobs) == requests
    for job in jobs:
        assert SHORTEST_PROMPT <= len(job.prompt) <= LONGEST_PROMPT
        assert SHORTEST_OUTPUT <= job.output <= LONGEST_OUTPUT
        assert all(0 <= token < vocabulary for token in job.prompt)


def test_models_on_a_backbone_share_all_but_their_own_parts(tmp_path):
    own = ("model.layers.1.self_attn.",)
    models = [write_random_model(tmp_path / str(n), TINY, own=own, own_seed=n) for n in (1, 2)]
    one, two = (load_file(directory / "model-0.safetensors") for directory in models)
    differing = {name for name in one if not torch.equal(one[name], two[name])}
    assert differing == {name for name in one if name.startswith(own) and "norm" not in name}


def test_scheduling_changes_no_token_and_static_batches_run_to_their_longest_end(tmp_path):
    model = load_model(write_random_model(tmp_path / "m", TINY), "tiny")
    jobs = mixed_lengths(6, TINY.vocabulary)
    static, continuous = OurEngine(model, slots=3), OurEngine(model, slots=3)
    alone = [OurEngine(model, slots=1).continuous([job])[0] for job in jobs]
    assert static.static(jobs) == continuous.continuous(jobs) == alone
    assert [len(tokens) for tokens in alone] == [job.output for job in jobs]
    longest = [max(job.output for job in jobs[start : start + 3]) for start in (0, 3)]
    assert static.statistics.written_tokens == 3 * sum(longest)
    assert continuous.statistics.written_tokens == sum(job.output for job in jobs)


def test_system_that_writes_other_tokens_is_not_compared(tmp_path, monkeypatch):
    class Wrong:
        def __init__(self, directory, way, threads):
            self.right = OurEngine(load_model(directory, "tiny"), slots=3)

        def write(self, jobs):
            tokens = self.right.continuous(jobs)
            return [*tokens[:-1], [0] * len(tokens[-1])]

        def close(self):
            pass

    monkeypatch.setattr(mixed, "has_transformers", lambda: True)
    monkeypatch.setattr(mixed, "PeerProcess", Wrong)
    with pytest.raises(CoServeError, match=r"transformers, static writes other tokens .* \[3\]"):
        mixed.measure_mixed(tmp_path, TINY, 1, lambda done, total: None, 4)


def test_missing_transformers_marks_its_rows_as_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(mixed, "has_transformers", lambda: False)
    part = mixed.measure_mixed(tmp_path, TINY, 1, lambda done, total: None, 3)
    assert [target.reached for target in part.targets] == [None]
    assert part.notes[-1].startswith("NOT MEASURED: mixed lengths against transformers: transformers is not there")


@pytest.fixture
def short_texts(monkeypatch):
    monkeypatch.setattr(offload, "PROMPT", 8)
    monkeypatch.setattr(offload, "OUTPUT", 4)


def test_half_of_the_moe_experts_in_memory_is_measured_whole(tmp_path, short_texts):
    part = measure_offload(tmp_path, TINY, 2)
    found = {figure.what: figure.value for figure in part.figures}
    assert min(found[way] for way in (offload.ALL, offload.HALF, offload.UNPREDICTED)) > 0
    assert 0 < found["found in their places"] < 100
    assert found["read a run"] > 0
    assert "8 of 16 moe_experts held" in part.notes[0]
    assert part.targets[0].wanted == "at least 0.5"


def test_stronger_skew_finds_more_experts_resident(tmp_path, monkeypatch, short_texts):
    found = []
    for zipf in (0.0, 3.0):
        monkeypatch.setattr(offload, "ZIPF", zipf)
        part = measure_offload(tmp_path / str(zipf), TINY, 1)
        found.append(next(figure.value for figure in part.figures if figure.what == "found in their places"))
    assert found[0] < found[1]


@pytest.mark.slow
def test_short_form_measures_every_part_and_leaves_nothing(tmp_path):
    found = measure_llm(tmp_path, lambda stage, done, total: None, quick=True, threads=1)
    assert not list(tmp_path.iterdir())
    told = json.loads(json.dumps(found.as_json()))
    assert list(dict.fromkeys(row["part"] for row in told["rows"])) == [
        "mixed lengths, tiny", "swapping", "backbone", "offloaded experts",
    ]  # fmt: skip
    assert len(told["targets"]) >= 4  # more where transformers is installed
    assert not any("NOT MEASURED" in note for note in told["notes"])
    assert "1 threads" in found.text()
    assert "these figures say that it runs" in found.text()
