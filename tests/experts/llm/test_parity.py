"""The forward pass against transformers, the oracle: tiny random models of each family, saved by it and read by us."""

import warnings

import pytest
import torch

from experts.llm.key_values import ContiguousKeyValues
from experts.llm.model import load_model
from experts.llm.token_batch import Chunk, TokenBatch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it says of its own imports is not ours
    from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SHARED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
MODELS = {
    "llama": ("llama", {}),
    "llama with biases and llama3 positions": (
        "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "rope_parameters": LLAMA3},
    ),
    "llama with linear positions": (
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3 with yarn positions": ("qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1], "norm_topk_prob": False, **SHARED},
    ),
    "qwen2_moe, normalised": (
        "qwen2_moe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "qkv_bias": False, **SHARED}
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32,
         "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "olmoe": (
        "olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "num_key_value_heads": 4},
    ),
    "olmoe, limited": (
        "olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "clip_qkv": 0.7},
    ),
}  # fmt: skip
LENGTHS = (5, 41, 1, 17, 64, 33)
NEW_TOKENS = (12, 3, 9, 16, 5, 8)


class Pair:
    """One model in both runtimes."""

    def __init__(self, name, directory):
        model_type, changes = MODELS[name]
        torch.manual_seed(sum(map(ord, name)))
        config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
        self.oracle = AutoModelForCausalLM.from_config(config).eval().float()
        with torch.no_grad():  # biases begin as zeros, norms as ones: a swapped one would go unseen
            for parameter in self.oracle.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn(parameter.shape)
        self.oracle.save_pretrained(directory)
        self.ours = load_model(directory, "tiny")

    def prompts(self):
        generator = torch.Generator().manual_seed(7)
        return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]

    def oracle_s_tokens(self, prompt, count):
        ids = torch.tensor([prompt])
        made = self.oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return made[0, len(prompt) :].tolist()


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
