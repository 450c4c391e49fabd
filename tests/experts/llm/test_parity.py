"""The forward pass against transformers, the oracle: tiny random models of each family, saved by it and read by us."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from experts.llm.model import load_model
from tests.experts.llm.conftest import logits_of
from tests.experts.llm.oracle import LENGTHS, MODELS, SIZES, Pair

PROMPT = list(range(3, 43))


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("model"))


def test_logits_equal_the_oracles_for_every_token_of_a_prompt(pair):
    (prompt,) = (prompt for prompt in pair.prompts() if len(prompt) == max(LENGTHS))
    with torch.no_grad():
        expected = pair.oracle(torch.tensor([prompt])).logits[0]
    assert (logits_of(pair.ours, prompt) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("shard_bytes", [10**9, 10**5])
def test_texts_of_a_model_of_images_too_are_the_oracles(tmp_path, shard_bytes):
    text = {**SIZES, **MODELS["gemma3"][1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    oracle = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=127)
    ).eval()
    oracle.save_pretrained(tmp_path, max_shard_size=shard_bytes)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(load_model(tmp_path, "tiny"), PROMPT) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama"])
def test_bf16_agrees_if_the_oracle_is_sure(name, tmp_path):
    pair = Pair(name, tmp_path)
    halved, oracle = load_model(tmp_path, "tiny", torch.bfloat16), pair.oracle
    (prompt,) = (prompt for prompt in pair.prompts() if len(prompt) == max(LENGTHS))
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
    given = logits_of(halved, prompt).float()
    best = expected.topk(2, dim=-1)
    is_sure = best.values[:, 0] - best.values[:, 1] > 0.1 * expected.std()
    assert is_sure.sum() > len(prompt) / 4
    assert ((given.argmax(dim=-1) == best.indices[:, 0]) & is_sure).sum() >= 0.9 * is_sure.sum()
