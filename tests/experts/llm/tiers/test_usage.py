"""Usage probabilities of moe_experts: counted as the gates choose, without changing what a model says."""

import pytest
import torch

from experts.llm.key_values import ContiguousKeyValues
from experts.llm.model import load_model
from experts.llm.tiers.moe_experts import MoeExpert
from experts.llm.tiers.usage import count_routing
from experts.llm.token_batch import Chunk, TokenBatch

PROMPTS = [[3, 1, 4, 1, 5], [], list(range(20, 60))]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "pr_moe"])
def test_a_layer_s_shares_are_its_choices(model_files, family):
    model = load_model(model_files.write(model_files.config(family)), "tiny")
    shares = count_routing(model, PROMPTS)
    for number, layer in enumerate(model.spec.layers):
        found = [share for moe_expert, share in shares.items() if moe_expert.layer == number]
        assert len(found) == (0 if layer.moe is None else layer.moe.moe_experts)
        if layer.moe is not None:
            assert sum(found) == pytest.approx(layer.moe.per_token)
            assert all(0 <= share <= 1 for share in found)


def test_it_is_what_the_gate_says(model_files):
    """A gate that all tokens follow alike: the first layer's sees the embeddings, which are made to point one way."""
    values = model_files.config("mixtral", num_hidden_layers=1, num_experts_per_tok=1)
    tensors = model_files.tensors(values)
    tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    tensors["model.embed_tokens.weight"].abs_()
    tensors["model.layers.0.post_attention_layernorm.weight"].fill_(1.0)
    gate = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    gate.zero_()
    gate[2] = 1.0
    model = load_model(model_files.write(values, tensors), "tiny")
    assert count_routing(model, PROMPTS) == {MoeExpert(0, number): float(number == 2) for number in range(4)}


def test_a_model_that_is_counted_says_what_it_says(model_files):
    model = load_model(model_files.write(model_files.config("qwen3_moe")), "tiny")
    batch = TokenBatch.of([Chunk(0, 0, PROMPTS[2])])
    before = model.forward(batch, ContiguousKeyValues(model.spec, model.dtype))
    count_routing(model, PROMPTS)
    assert torch.equal(model.forward(batch, ContiguousKeyValues(model.spec, model.dtype)), before)


def test_nothing_to_count_is_refused(model_files):
    model = load_model(model_files.write(model_files.config("mixtral")), "tiny")
    with pytest.raises(ValueError, match="nothing to count"):
        count_routing(model, [[]])
