"""Leases: a text holds no more than it may for now, goes on once it may hold more, and writes what it would have."""

import pytest
import torch

from experts.errors import MemoryExceeded
from experts.llm.config import parse_spec
from experts.llm.model import LanguageModel
from experts.llm.names import assemblies
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.extents import ExtentArena, KvLayout
from experts.llm.serving.generation import GREEDY, Generation, TextRequest
from experts.llm.serving.texts import Turn
from tests.experts.llm.conftest import greedy, tiny_config
from tests.experts.llm.serving.conftest import Notes

SPEC = parse_spec(tiny_config("llama", max_position_embeddings=256), "tiny")
LAYOUT = KvLayout.of(SPEC, torch.float32)
BUDGET_BYTES = 512 * LAYOUT.token_bytes  # tokens are counted by 128
PROMPT = tuple(range(3, 23))


@pytest.fixture
def arena():
    return ExtentArena(BUDGET_BYTES)


@pytest.fixture(scope="module")
def model():
    generator = torch.Generator().manual_seed(1)
    return LanguageModel(
        SPEC, {one.name: torch.randn(one.shape, generator=generator) * 0.3 for one in assemblies(SPEC)}
    )


def test_nothing_grows_over_what_others_were_promised(arena):
    arena.begin(1, LAYOUT, 64)
    arena.begin(2, LAYOUT, 256)
    arena.begin(3, LAYOUT, 128)
    with pytest.raises(MemoryExceeded):
        arena.grow(1, 192)
    arena.grow(1, 128)
    assert arena.promised_bytes == BUDGET_BYTES


def test_a_lower_budget_is_kept_by_whoever_comes_and_takes_nothing_that_was_promised(arena):
    arena.begin(1, LAYOUT, 256)
    arena.set_budget(BUDGET_BYTES // 4)
    assert arena.promised_bytes == BUDGET_BYTES // 2
    with pytest.raises(MemoryExceeded):
        arena.begin(2, LAYOUT, 64)
    arena.release(1)
    with pytest.raises(MemoryExceeded):
        arena.begin(2, LAYOUT, 256)
    arena.begin(2, LAYOUT, 128)
    arena.set_budget(2 * BUDGET_BYTES)
    assert arena.budget_bytes == BUDGET_BYTES


@pytest.mark.parametrize("leases", [(8, 20, 21, 30, 60), (64,), (1, 60), (25, 26, 60)])
def test_a_text_goes_as_far_as_its_lease_and_writes_the_same(arena, model, leases):
    engine, writer = LlmEngine(arena), Notes()
    text = TextRequest(Generation(PROMPT, 30, GREEDY), writer)
    for lease in leases[:-1]:
        ((_, left),) = engine.run([Turn(1, "a", model, text, lease=lease)], 60.0).unfinished
        assert (left.held, len(writer.tokens)) == (lease, max(lease - len(PROMPT) + 1, 0))
    ((_, prediction),) = engine.run([Turn(1, "a", model, text, lease=leases[-1])], 60.0).finished
    assert (prediction.label, writer.tokens) == ("length", greedy(model, [PROMPT], 30)[0][0])
    assert arena.promised_bytes == 0


def test_a_full_lease_holds_nobody_else_up(arena, model):
    engine, full, other = LlmEngine(arena), Notes(), Notes()
    texts = [TextRequest(Generation(PROMPT, 30, GREEDY), writer) for writer in (full, other)]
    quantum = engine.run([Turn(1, "a", model, texts[0], lease=22), Turn(2, "a", model, texts[1])], 60.0)
    assert [request for request, _ in quantum.finished] == [2]
    assert ([request for request, _ in quantum.unfinished], len(full.tokens), len(other.tokens)) == ([1], 3, 30)
