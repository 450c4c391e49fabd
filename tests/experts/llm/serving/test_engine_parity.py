"""Greedy tokens are transformers', however texts come to run: alone, batched, in chunks, preempted, shared."""

from dataclasses import replace

import pytest

from experts.llm.serving.extents import ExtentArena
from experts.llm.serving.iteration import IterationLimits
from tests.experts.llm.oracle import NEW_TOKENS, Pair
from tests.experts.llm.serving.conftest import Desk

FAMILIES = (
    "qwen3 with yarn positions", "qwen2_moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mixtral", "qwen3_moe", "olmoe")),
)  # fmt: skip


class Oracle(Pair):
    def __init__(self, name, directory):
        super().__init__(name, directory)
        self.texts = self.prompts()
        asked = zip(self.texts, NEW_TOKENS, strict=True)
        self.expected = {request: self.oracle_s_tokens(*each) for request, each in enumerate(asked)}

    def desk(self, **limits):
        desk = Desk(self.ours, ExtentArena(16 * 2**20), IterationLimits(**limits))
        for request, (prompt, count) in enumerate(zip(self.texts, NEW_TOKENS, strict=True)):
            desk.ask(request, prompt, count, weights="w")
        return desk


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request, tmp_path_factory):
    return Oracle(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
def test_batched_and_in_chunks(oracle, chunk):
    assert oracle.desk(tokens=chunk).finish() == oracle.expected
    assert oracle.desk(rows=4, tokens=chunk).finish(quantum_s=0) == oracle.expected


@pytest.mark.parametrize("weights", [None, "w"])
def test_preempted_and_resumed(oracle, weights):
    desk = oracle.desk(tokens=16)
    for request in desk.turns:
        desk.turns[request] = replace(desk.turns[request], weights=weights)
    preempted = set()
    while desk.turns:
        desk.quantum(0)
        for moment in {(request, len(desk.notes[request].tokens)) for request in desk.turns} - preempted:
            preempted.add(moment)  # once for each count of tokens, also before the first
            desk.engine.preempt(moment[0])
    assert len(preempted) > sum(NEW_TOKENS) / 2
    assert (desk.finish(), desk.arena.promised_bytes) == (oracle.expected, 0)


def test_with_a_prefix_that_was_read_before(oracle):
    desk = oracle.desk()
    assert desk.finish() == oracle.expected
    for request, (prompt, count) in enumerate(zip(oracle.texts, NEW_TOKENS, strict=True)):
        desk.ask(request, prompt, count, weights="w")
    read = desk.engine.statistics().read_tokens
    assert desk.finish() == oracle.expected
    assert desk.engine.statistics().read_tokens < 1.5 * read
