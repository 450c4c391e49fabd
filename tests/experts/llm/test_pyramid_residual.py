"""PR-MoE and MoS: against the layers as the paper and DeepSpeed's code describe them, written out token by token."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

from experts.llm.model import load_model
from tests.experts.llm.conftest import logits_of

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8


class Reference:
    """The model as formulas over the checkpoint's own tensors, for one sequence; its experts token by token."""

    def __init__(self, values, tensors):
        self.values = values
        self.tensors = tensors
        self.is_gpt = values.get("norm") == "layernorm"

    def logits(self, token_ids):
        tokens = self.tensors["model.embed_tokens.weight"][token_ids]
        if self.is_gpt:
            tokens = tokens + self.tensors["model.embed_positions.weight"][: len(token_ids)]
        for layer, count in enumerate(self.values["num_experts"]):
            prefix = f"model.layers.{layer}"
            tokens = tokens + self.attention(self.norm(tokens, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
            normed = self.norm(tokens, f"{prefix}.post_attention_layernorm")
            fed = [self.moe(one, f"{prefix}.mlp", count) if count else self.mlp(one, f"{prefix}.mlp") for one in normed]
            tokens = tokens + torch.stack(fed)
        return linear(self.norm(tokens, "model.norm"), self.tensors["lm_head.weight"])

    def norm(self, tokens, name):
        weight, shape = self.tensors[f"{name}.weight"], tokens.shape[-1:]
        if self.is_gpt:
            return layer_norm(tokens, shape, weight, self.tensors[f"{name}.bias"], self.values["layer_norm_eps"])
        return rms_norm(tokens, shape, weight, self.values["rms_norm_eps"])

    def attention(self, tokens, name):
        q, k, v = (
            self.linear(tokens, f"{name}.{one}_proj").unflatten(1, (-1, HEAD_SIZE)).transpose(0, 1) for one in "qkv"
        )
        if not self.is_gpt:
            q, k = self.turned(q), self.turned(k)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=0) for one in (k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear(attended.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def turned(self, heads):
        frequencies = self.values["rope_theta"] ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        angles = torch.arange(heads.shape[1])[:, None] * frequencies
        a, b = heads.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    def moe(self, token, name, count):
        """DeepSpeed-MoE section 4.1.1, and deepspeed/moe/layer.py for how a coefficient weighs the branches."""
        shares = self.linear(token, f"{name}.gate").softmax(dim=-1)
        chosen = sorted(range(count), key=lambda one: -shares[one].item())[: self.values["num_experts_per_tok"]]
        total = sum(shares[one] for one in chosen) if self.values["norm_topk_prob"] else 1
        mixed = sum(shares[one] / total * self.mlp(token, f"{name}.experts.{one}") for one in chosen)
        if self.values["residual"] is None:
            return mixed
        beside = self.mlp(token, f"{name}.residual")
        if self.values["residual"] == "add":
            return mixed + beside
        coefficient = self.linear(token, f"{name}.coefficient").softmax(dim=-1)
        return mixed * coefficient[0] + beside * coefficient[1]

    def mlp(self, token, name):
        raised = self.linear(token, f"{name}.up_proj")
        if self.values["mlp"] == "swiglu":
            raised = silu(self.linear(token, f"{name}.gate_proj")) * raised
        else:
            raised = gelu(raised, approximate="tanh" if self.values["mlp"] == "gelu_tanh" else "none")
        return self.linear(raised, f"{name}.down_proj")

    def linear(self, tokens, name):
        return linear(tokens, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


PROMPTS = ([5, 17, 3, 88, 41, 2, 9], [60, 61], [7])
GPT = {
    "norm": "layernorm", "layer_norm_eps": 1e-5, "rms_norm_eps": None, "positions": "learned", "mlp": "gelu_tanh",
    "attention_bias": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("residual", "bias"), [("add", None), ("softmax", None), ("softmax", [3.0, -3.0]), (None, None)]
)
@pytest.mark.parametrize(
    "changes",
    [
        {"mlp": "gelu", "mlp_bias": True, "attention_bias": True}, {"mlp": "swiglu", "mlp_bias": False},
        {"mlp": "swiglu", "mlp_bias": True, "attention_bias": True}, GPT,
        {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 24},
        {"num_experts_per_tok": 2, "norm_topk_prob": False, "moe_intermediate_size": 24},
    ],
)  # fmt: skip
def test_pyramid_equals_its_formulas(model_files, residual, changes, bias):
    values, tensors = model_files.stored("pr_moe", residual=residual, **changes)
    if bias:
        tensors |= {f"model.layers.{layer}.mlp.coefficient.bias": torch.tensor(bias) for layer in (1, 2)}
    directory = model_files.write(values, tensors)
    reference = Reference(values, load_file(directory / "model.safetensors"))
    expected = torch.cat([reference.logits(prompt) for prompt in PROMPTS])
    torch.testing.assert_close(logits_of(load_model(directory, "tiny"), *PROMPTS), expected, atol=1e-5, rtol=0)
