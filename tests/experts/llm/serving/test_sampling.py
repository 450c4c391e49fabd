"""Rows of logits to tokens: against the rules written out, one row at a time, and each row for itself."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from experts.llm.serving.generation import Sampling
from experts.llm.serving.sampling import MORE_CANDIDATES, Sampler, sample

VOCABULARY = 12


def shares_by_the_rules(logits, sampling, prompt=(), written=()):
    """What each token's probability is, step by step over plain numbers."""
    logits = list(logits)
    counts = Counter(written)
    for token in {*prompt, *written}:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        logits[token] -= sampling.presence_penalty * (counts[token] > 0) + sampling.frequency_penalty * counts[token]
    if sampling.is_greedy:
        best = max(range(len(logits)), key=lambda n: logits[n])
        return [float(n == best) for n in range(len(logits))]
    shares = normalised([math.exp((one - max(logits)) / sampling.temperature) for one in logits])
    ordered = sorted(range(len(shares)), key=lambda n: -shares[n])
    kept = ordered[: sampling.top_k or None]
    shares = normalised([one if n in kept else 0.0 for n, one in enumerate(shares)])
    before, nucleus = 0.0, set()
    for n in kept:
        if before < sampling.top_p:
            nucleus.add(n)
        before += shares[n]
    least = sampling.min_p * max(shares)
    return normalised([one if n in nucleus and one >= least else 0.0 for n, one in enumerate(shares)])


def normalised(shares):
    return [one / sum(shares) for one in shares]


def random_logits(rows, vocabulary=VOCABULARY, seed=0):
    return 2 * torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed))


SAMPLINGS = {
    "plain": Sampling(), "hot": Sampling(temperature=2.5), "cold": Sampling(temperature=0.3),
    "top-k": Sampling(top_k=4), "top-p": Sampling(top_p=0.7), "min-p": Sampling(min_p=0.2),
    "all of these": Sampling(temperature=1.3, top_k=7, top_p=0.9, min_p=0.05),
    "repetition": Sampling(repetition_penalty=1.8),
    "presence and frequency": Sampling(presence_penalty=0.9, frequency_penalty=0.4),
    "negative penalties": Sampling(frequency_penalty=-1.0, repetition_penalty=0.7),
}  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_are_distributed_by_the_rules(sampling):
    prompt, written, draws = (1, 2, 2, 5), (5, 5, 7), 4_000
    logits = random_logits(1)
    samplers = [Sampler(replace(sampling, seed=seed), prompt) for seed in range(draws)]
    for sampler in samplers:
        for token in written:
            sampler.wrote(token)
    counts = Counter(sampled.id for sampled in sample(logits.expand(draws, -1), samplers))
    expected = shares_by_the_rules(logits[0].tolist(), sampling, prompt, written)
    for token, share in enumerate(expected):
        spread = 5 * math.sqrt(share * (1 - share) / draws)
        assert abs(counts[token] / draws - share) <= spread, f"token {token}"


@given(
    st.lists(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]), top_k=st.sampled_from([0, 1, 3, 40]),
            top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]), min_p=st.sampled_from([0.0, 0.1, 1.0]),
            repetition_penalty=st.sampled_from([0.5, 1.0, 1.5]), presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
            frequency_penalty=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 5),
            logprobs=st.sampled_from([None, 0, 2, 20]),
        ),
        min_size=1, max_size=6,
    ),
    st.integers(0, 50),
)  # fmt: skip
def test_row_is_drawn_as_it_would_be_alone(samplings, seed):
    logits = random_logits(len(samplings), seed=seed)

    def samplers():
        made = [Sampler(sampling, (1, 2)) for sampling in samplings]
        for sampler in made:
            sampler.wrote(3)
        return made

    together = sample(logits, samplers())
    alone = [sample(logits[n : n + 1], [sampler])[0] for n, sampler in enumerate(samplers())]
    assert [one.id for one in together] == [one.id for one in alone]
    for n, (sampled, sampling) in enumerate(zip(together, samplings, strict=True)):
        assert shares_by_the_rules(logits[n].tolist(), sampling, (1, 2), (3,))[sampled.id] > 0
        logprobs = logits[n].log_softmax(dim=-1)
        expected = 0 if sampling.logprobs is None else float(logprobs[sampled.id])
        assert sampled.logprob == pytest.approx(expected, abs=1e-5)
        assert len(sampled.alternatives) == min(sampling.logprobs or 0, VOCABULARY)
        best = logprobs.sort(descending=True)
        assert [token.id for token in sampled.alternatives] == best.indices[: len(sampled.alternatives)].tolist()


@pytest.mark.parametrize("vocabulary", [600, 4 * MORE_CANDIDATES])
def test_nucleus_wider_than_the_first_candidates_is_found(vocabulary):
    flat = torch.zeros((2, vocabulary))
    flat[:, 0] = 1.0
    tokens = set()
    sampler = Sampler(Sampling(top_p=0.9, seed=1), (1,))
    for _ in range(200):
        for one in sample(flat, [sampler, sampler]):
            tokens.add(one.id)
            sampler.wrote(one.id)
    assert max(tokens) > vocabulary / 2
    assert len(tokens) > 200


@pytest.mark.parametrize(
    ("changed", "value"),
    [("FIRST_CANDIDATES", 10**9), ("_sum_dtype", lambda device: torch.float32)],
    ids=["the whole vocabulary sorted", "sums in fp32"],
)
def test_devices_way_draws_the_tokens_of_the_cpu(monkeypatch, changed, value):
    logits, kinds = random_logits(60, 3 * MORE_CANDIDATES), [one for one in SAMPLINGS.values() if not one.has_penalties]

    def drawn():
        samplers = [Sampler(replace(kinds[n % len(kinds)], seed=n), (1,)) for n in range(len(logits))]
        return [one.id for one in sample(logits, samplers)]

    here = drawn()
    monkeypatch.setattr(f"experts.llm.serving.sampling.{changed}", value)
    assert drawn() == here


def test_draw_is_the_same_until_its_token_is_written():
    logits, sampler = random_logits(1), Sampler(Sampling(seed=4), (1,))
    ahead = sample(logits.expand(3, -1), [sampler] * 3)
    for expected in ahead:
        assert sample(logits, [sampler]) == [expected]
        sampler.wrote(expected.id)


def test_nan_rows_are_reported_and_take_no_draw():
    logits = random_logits(4)
    logits[1, 3] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = float("-inf")
    sampled = sample(logits, [Sampler(Sampling(seed=n), (1,)) for n in range(4)])
    assert [one is None for one in sampled] == [False, True, True, True]
    again = sample(logits[:1], [Sampler(Sampling(seed=0), (1,))])
    assert again[0].id == sampled[0].id


@pytest.mark.parametrize(("logprobs", "sums"), [(None, 0), (0, 1)])
def test_logprobs_are_computed_only_if_asked_for(logprobs, sums):
    called = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            called.append(operation)
            return operation(*arguments, **(options or {}))

    with Watching():
        sample(random_logits(1), [Sampler(Sampling(temperature=0.0, logprobs=logprobs), (1,))])
    assert called.count(torch.ops.aten.logsumexp.default) == sums
