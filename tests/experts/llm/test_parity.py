"""The forward pass against transformers, the oracle: tiny random models of each family, saved by it and read by us."""

import pytest
import torch

from experts.llm.key_values import ContiguousKeyValues
from experts.llm.model import load_model
from experts.llm.token_batch import Chunk, TokenBatch
from tests.experts.llm.oracle import LENGTHS, MODELS, NEW_TOKENS, Pair


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("model"))


def continued(model, prompts, counts, chunk):
    """Greedy tokens of all prompts, batched: who still reads its prompt goes on by a chunk, the others by a token."""
    key_values = ContiguousKeyValues(model.spec, model.dtype)
    texts = [list(prompt) for prompt in prompts]
    wanted = [len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]
    while going := [n for n, text in enumerate(texts) if len(text) < wanted[n]]:
        held = [key_values.sequences.get(n, 0) for n in range(len(texts))]
        chunks = [Chunk(n, held[n], texts[n][held[n] : held[n] + chunk]) for n in going]
        batch = TokenBatch.of(sorted(chunks, key=lambda one: len(one.tokens) == 1))
        best = model.forward(batch, key_values).argmax(dim=-1).tolist()
        for row, token in zip(batch.rows, best, strict=True):
            if row.end == len(texts[row.sequence]):
                texts[row.sequence].append(token)
            if len(texts[row.sequence]) == wanted[row.sequence]:
                key_values.release(row.sequence)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def test_logits_are_the_oracle_s_for_every_token_of_a_prompt(pair):
    (prompt,) = (prompt for prompt in pair.prompts() if len(prompt) == max(LENGTHS))
    with torch.no_grad():
        expected = pair.oracle(torch.tensor([prompt])).logits[0]
    hidden = pair.ours.hidden(TokenBatch.of([Chunk(0, 0, prompt)]), ContiguousKeyValues(pair.ours.spec, torch.float32))
    assert (pair.ours.logits(hidden) - expected).abs().max() <= 1e-5


def test_greedy_tokens_are_the_oracle_s_however_they_are_batched(pair):
    prompts = pair.prompts()
    expected = [pair.oracle_s_tokens(prompt, count) for prompt, count in zip(prompts, NEW_TOKENS, strict=True)]
    alone = [
        continued(pair.ours, [prompt], [count], chunk=1000)[0]
        for prompt, count in zip(prompts, NEW_TOKENS, strict=True)
    ]
    assert alone == expected
    for chunk in (1, 7, 32, 1000):
        assert continued(pair.ours, prompts, NEW_TOKENS, chunk) == expected, f"in chunks of {chunk}"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama"])
def test_bf16_agrees_where_the_oracle_is_sure(name, tmp_path):
    pair = Pair(name, tmp_path)
    halved, oracle = load_model(tmp_path, "tiny", torch.bfloat16), pair.oracle
    (prompt,) = (prompt for prompt in pair.prompts() if len(prompt) == max(LENGTHS))
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
    hidden = halved.hidden(TokenBatch.of([Chunk(0, 0, prompt)]), ContiguousKeyValues(halved.spec, torch.bfloat16))
    given = halved.logits(hidden).float()
    best = expected.topk(2, dim=-1)
    is_sure = best.values[:, 0] - best.values[:, 1] > 0.1 * expected.std()
    assert is_sure.sum() > len(prompt) / 4
    assert ((given.argmax(dim=-1) == best.indices[:, 0]) & is_sure).sum() >= 0.9 * is_sure.sum()
