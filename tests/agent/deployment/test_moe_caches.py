"""Lines whose language models exceed their memory: the number of experts that they hold."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent.deployment.line_change import plan_change
from agent.runtime.expert_copy import moe_experts_of
from agent.runtime.texts import TextSource
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.model import load_model
from experts.llm.serving.generation import GREEDY, TextRequest
from experts.llm.token_batch import Chunk, TokenBatch
from tests.agent.line_files import LineFile
from tests.experts.llm.conftest import ModelFiles

MIB = 2**20
MOE = "llm/moe"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 16, "num_experts_per_tok": 2}
BLOCK_BYTES = 3 * 128 * 256 * 4
TEXTS = {"kv": "2MiB", "quantum_s": 0.02, "routes": {"ask": {"rules": [], "otherwise": MOE}}}
PROMPT = (3, 1, 4, 1, 5)
PATIENCE_S = 60.0


class Line(LineFile):
    """One mixture of 48 experts of 384 KiB, 18 MiB together, with 0.8 MiB of dense weights."""

    def __init__(self, folder):
        files = ModelFiles(folder)
        self.weights = files.write(files.config("mixtral", **SIZES))
        self.section = {"architecture": "llm", "weights": str(self.weights)}
        super().__init__(
            folder, experts={MOE: self.section}, texts=TEXTS, device="cpu", executors={"cpu": 2},
            memory={"host": "64MiB", "workspace": "16MiB"},
        )  # fmt: skip

    def held(self, agent):
        (copy,) = agent.copies.values()
        return copy

    def without_an_agent(self):
        """The likeliest tokens, computed from the whole text for each."""
        model, tokens = load_model(self.weights, MOE), list(PROMPT)
        for _ in range(8):
            batch = TokenBatch.of([Chunk(0, 0, tokens)])
            tokens.append(int(model.forward(batch, ModelKeyValues(model.spec, model.dtype))[-1].argmax()))
        return tokens[len(PROMPT) :]

    def greedy(self, agent):
        tokens = []
        agent.start()

        class Reader:
            def write(self, sampled):
                tokens.append(sampled.id)
                return False

        request = TextRequest(PROMPT, 8, GREEDY, Reader())
        agent.loop.submit(TextSource(lambda _: request), expert=MOE)
        assert agent.loop.wait_until_idle(PATIENCE_S)
        return tokens


@pytest.fixture(autouse=True)
def one_thread():
    """More threads only slow a tiny model down on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path)


def test_line_file_sets_the_places_of_a_moe_cache(line):
    line.section["moe_cache"] = "4MiB"
    with line.built() as (agent, *_):
        copy = line.held(agent)
        assert copy.block_bytes == BLOCK_BYTES
        assert copy.moe_places == 4 * MIB // BLOCK_BYTES
        (column,) = agent.setup.matrix.experts.values()
        assert column[MOE].footprint == copy.footprint
    line.section["moe_cache"] = "48MiB"  # room for all
    with line.built() as (agent, *_):
        assert not line.held(agent).is_offloaded


def test_cache_below_one_expert_or_for_a_dense_model_is_refused(line, tmp_path):
    line.section["moe_cache"] = "100KiB"
    assert "moe_cache: 0.1 MiB is too little - one of the experts inside takes 0.4 MiB" in line.refusal()
    files = ModelFiles(tmp_path / "dense")
    (tmp_path / "dense").mkdir()
    line.section |= {"weights": str(files.write(files.config("llama"))), "moe_cache": "1MiB"}
    assert "moe_cache: the model has no experts inside" in line.refusal()


@pytest.mark.parametrize("host_mib", [21, 24, 30])
def test_moe_model_larger_than_memory_holds_what_fits_and_answers_equally(line, host_mib):
    expected = line.without_an_agent()
    line.document["memory"]["host"] = f"{host_mib}MiB"
    with line.built() as (agent, *_):
        copy, (pool,) = line.held(agent), agent.setup.pools
        assert 0 < copy.moe_places < moe_experts_of(copy.packed)
        assert copy.footprint.total_bytes <= pool.expert_bytes < copy.footprint.total_bytes + 2 * BLOCK_BYTES
        assert pool.expert_bytes + pool.workspace_bytes + pool.lease_bytes == host_mib * MIB
        assert line.greedy(agent) == expected
        assert len(expected) == 8
    line.document["memory"]["host"] = "19MiB"  # not even the dense part
    assert f"experts.{MOE}: needs" in line.refusal()


def test_families_form_after_a_reload_as_at_a_start(line, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(line.weights, other)
    path = other / "model.safetensors"
    tensors = load_file(path)
    save_file({name: one if ".experts." in name else one * 1.5 for name, one in tensors.items()}, path)
    with line.built() as (agent, *_):
        (alone,) = agent.setup.matrix.experts["cpu"].values()
        assert alone.family is None
        line.document["experts"]["llm/other"] = {"architecture": "llm", "weights": str(other)}
        change = plan_change(agent, line.config, lambda *_: None)
    after = {name: row.family for name, row in change.event.matrix.experts["cpu"].items()}
    with line.built() as (agent, *_):
        assert after == {name: row.family for name, row in agent.setup.matrix.experts["cpu"].items()}
    assert after[MOE] == after["llm/other"] is not None
