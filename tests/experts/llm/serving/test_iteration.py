"""Iterations over numbers alone: which texts run, how long one takes, how long texts become, and what a lease is."""

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import MemoryExceeded
from experts.llm.arenas.extents import ExtentArena
from experts.llm.arenas.key_values import KvLayout
from experts.llm.files.config import parse_spec
from experts.llm.files.names import assemblies
from experts.llm.model import LanguageModel
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.generation import GREEDY, TextRequest
from experts.llm.serving.iteration import (
    GROWTH,
    LEAST_CHUNK_TOKENS,
    REMEMBERED,
    IterationTimes,
    OutputLengths,
    plan,
)
from experts.llm.serving.texts import RunningText
from tests.experts.llm.conftest import greedy, tiny_config
from tests.experts.llm.serving.conftest import Notes

Candidate = namedtuple("Candidate", "request next_tokens arrival ran is_whole", defaults=[False])  # of a running text
ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9), st.booleans()), min_size=1, max_size=12)
CANDIDATES = ROWS.map(lambda rows: [Candidate(n, unread, n, ran, whole) for n, (unread, ran, whole) in enumerate(rows)])
SPEC = parse_spec(tiny_config("llama", max_position_embeddings=256), "tiny")
LAYOUT = KvLayout.of(SPEC, torch.float32)
BUDGET_BYTES = 512 * LAYOUT.token_bytes  # tokens are counted by 128
PROMPT = tuple(range(3, 23))


@given(CANDIDATES, st.integers(1, 8), st.integers(0, 64))
def test_iteration_keeps_its_limits_and_always_runs_some_text(candidates, rows, prompt_tokens):
    picks = plan(candidates, rows, prompt_tokens)
    of = {one.request: one for one in candidates}
    assert 1 <= len(picks) <= rows
    assert all(1 <= tokens <= of[one].next_tokens for one, tokens in picks.items())
    assert all(tokens == of[one].next_tokens for one, tokens in picks.items() if of[one].is_whole)
    read = sum(tokens for one, tokens in picks.items() if of[one].next_tokens > 1 and not of[one].is_whole)
    assert read <= max(prompt_tokens, 1)


@given(CANDIDATES, st.integers(1, 8), st.integers(1, 64))
def test_longest_waiting_prompt_is_always_in_the_next_iteration(candidates, rows, prompt_tokens):
    picked = plan(candidates, rows, prompt_tokens)
    reading = sorted((one for one in candidates if one.next_tokens > 1), key=lambda one: (one.ran, one.arrival))
    assert not reading or reading[0].request in picked


@given(st.integers(2, 100), st.lists(st.integers(200, 9000), min_size=1, max_size=40), st.integers(16, 512))
def test_prompt_is_read_within_its_share_despite_long_earlier_ones(short, others, tokens):
    unread = {0: short, **dict(enumerate(others, 1))}
    ran = dict.fromkeys(unread, 0)
    bound = -(-short // LEAST_CHUNK_TOKENS) * -(-len(unread) // (tokens // LEAST_CHUNK_TOKENS))
    for iteration in range(1, bound + 1):
        candidates = [Candidate(n, left, len(others) - n, ran[n]) for n, left in unread.items() if left > 1]
        for request, picked in plan(candidates, 64, tokens).items():
            unread[request] -= picked
            ran[request] = iteration
    assert unread[0] <= 1  # its last token is written, not read


def candidates_of(*unread):
    return [Candidate(n, tokens, n, 0) for n, tokens in enumerate(unread, 1)]


def test_prompts_share_the_tokens_of_an_iteration():
    assert plan(candidates_of(1, 20, 20, 20), 8, 30) == {1: 1, 2: 20, 3: 10}
    assert plan(candidates_of(400, 20, 300), 8, 220) == {1: 100, 2: 20, 3: 100}


class TestTimes:
    @given(st.floats(0, 0.1), st.floats(1e-5, 1e-2), st.lists(st.integers(1, 500), min_size=2, unique=True))
    def test_iteration_time_is_fitted_by_a_line(self, base_s, token_s, sizes):
        times = IterationTimes()
        for tokens in sizes:
            times.ran(tokens, base_s + token_s * tokens)
        if max(sizes[-2:]) > 1.5 * min(sizes[-2:]):
            assert times.seconds(0) == pytest.approx(base_s, rel=1e-3, abs=1e-4)
            assert times.seconds(1) - times.seconds(0) == pytest.approx(token_s, rel=1e-3, abs=1e-9)
        within = times.tokens_within(base_s + token_s * 50)
        assert within <= GROWTH * max(*sizes, LEAST_CHUNK_TOKENS)

    def test_iteration_time_follows_a_machine_that_slows_down(self):
        times = IterationTimes()
        for n in range(200):
            slow = 1 if n < 100 else 5
            times.ran(10 + n % 30, slow * (0.002 + 0.001 * (10 + n % 30)))
        assert times.seconds(20) == pytest.approx(5 * 0.022, rel=0.02)

    def test_slow_iteration_reads_as_many_tokens_as_its_time_is_worth(self):
        times = IterationTimes()
        times.ran(10, 0.11)
        times.ran(60, 0.16)
        assert (times.least_tokens(0.2), times.least_tokens(0.05)) == (LEAST_CHUNK_TOKENS, 100)


def lengths_of(*ended):
    lengths = OutputLengths()
    for tokens in ended:
        lengths.ended("poet", tokens)
    return lengths


def test_expected_length_is_the_median_of_longer_texts_of_the_expert():
    lengths = lengths_of(3, 50, 10, 400, 12)
    assert (lengths.left("poet", 0, 1000), lengths.left("poet", 12, 1000)) == (12, 400 - 12)
    assert (lengths.left("poet", 20, 45), lengths.left("poet", 500, 10_000)) == (25, 500)
    assert lengths.left("other", 0, 400) == 100


def test_lengths_of_long_ago_are_forgotten():
    assert lengths_of(*[900] * REMEMBERED, *[7] * REMEMBERED).left("poet", 7, 1000) == 7


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(0, 200), st.integers(1, 300))
def test_expected_length_is_between_one_and_the_limit(ended, written, most):
    left = lengths_of(*ended).left("poet", written, most)
    assert 1 <= left <= max(most - written, 1)


@pytest.fixture
def arena():
    return ExtentArena(BUDGET_BYTES)


@pytest.fixture(scope="module")
def model():
    generator = torch.Generator().manual_seed(1)
    return LanguageModel(
        SPEC, {one.name: torch.randn(one.shape, generator=generator) * 0.3 for one in assemblies(SPEC)}
    )


def test_leases_never_grow_over_promised_memory(arena):
    arena.begin(1, LAYOUT, 64)
    arena.begin(2, LAYOUT, 256)
    arena.begin(3, LAYOUT, 128)
    with pytest.raises(MemoryExceeded):
        arena.grow(1, 192)
    arena.grow(1, 128)
    assert arena.promised_bytes == BUDGET_BYTES


def test_lowered_budget_binds_new_texts_and_takes_nothing_promised(arena):
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
def test_text_reaches_its_lease_and_writes_the_same(arena, model, leases):
    engine, writer = LlmEngine(arena), Notes()
    text = RunningText(1, "a", TextRequest(PROMPT, 30, GREEDY, writer))
    for text.lease in leases[:-1]:
        engine.run([text], [model], 60.0)
        assert (text.result, text.held, len(writer.tokens)) == (None, text.lease, max(text.lease - len(PROMPT) + 1, 0))
    text.lease = leases[-1]
    engine.run([text], [model], 60.0)
    assert (text.result.label, writer.tokens) == ("length", greedy(model, [PROMPT], 30)[0][0])
    assert arena.promised_bytes == 0


def test_full_lease_blocks_no_other_text(arena, model):
    engine, full, other = LlmEngine(arena), Notes(), Notes()
    asked = [TextRequest(PROMPT, 30, GREEDY, writer) for writer in (full, other)]
    texts = [RunningText(1, "a", asked[0], lease=22), RunningText(2, "a", asked[1])]
    engine.run(texts, [model, model], 60.0)
    assert [text.result is None for text in texts] == [True, False]
    assert (len(full.tokens), len(other.tokens)) == (3, 30)


def test_text_with_a_full_lease_waits_no_longer_than_a_quantum_for_a_larger_one(arena, model):
    engine, full, other = LlmEngine(arena), Notes(), Notes()
    asked = [TextRequest(PROMPT, 30, GREEDY, writer) for writer in (full, other)]
    texts = [RunningText(1, "a", asked[0], lease=22), RunningText(2, "a", asked[1])]
    engine.run(texts, [model, model], 0.0, 60.0)
    assert (len(full.tokens), len(other.tokens)) == (3, 3)
