"""PR-MoE and MoS: against the layers as the paper and DeepSpeed's code describe them, written out token by token."""

import functools
import itertools
import math

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, linear, silu

from experts.llm.model import load_model
from experts.llm.serving.extents import ModelKeyValues
from experts.llm.token_batch import Chunk, TokenBatch

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8


class Reference:
    """The model as formulas over the checkpoint's own tensors: one sequence, one token, one head at a time."""

    def __init__(self, values, tensors):
        self.values = values
        self.tensors = tensors

    def logits(self, token_ids):
        tokens = self.tensors["model.embed_tokens.weight"][token_ids]
        if self.values.get("positions") == "learned":
            tokens = tokens + self.tensors["model.embed_positions.weight"][: len(token_ids)]
        for layer in range(self.values["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            tokens = tokens + self.attention(self.norm(tokens, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
            normed = self.norm(tokens, f"{prefix}.post_attention_layernorm")
            count = self.values["num_experts"][layer]
            moe_or_mlp = functools.partial(self.moe, count=count) if count else self.mlp
            tokens = tokens + torch.stack([moe_or_mlp(one, f"{prefix}.mlp") for one in normed])
        return linear(self.norm(tokens, "model.norm"), self.tensors["lm_head.weight"])

    def norm(self, tokens, name):
        if self.values.get("norm") == "layernorm":
            centred = tokens - tokens.mean(dim=-1, keepdim=True)
            deviation = (centred.pow(2).mean(dim=-1, keepdim=True) + self.values["layer_norm_eps"]).sqrt()
            return centred / deviation * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]
        root = (tokens.pow(2).mean(dim=-1, keepdim=True) + self.values["rms_norm_eps"]).sqrt()
        return tokens / root * self.tensors[f"{name}.weight"]

    def attention(self, tokens, name):
        q, k, v = (self.linear(tokens, f"{name}.{one}_proj") for one in "qkv")
        attended = torch.zeros(len(tokens), HEADS, HEAD_SIZE)
        for head, at in itertools.product(range(HEADS), range(len(tokens))):
            own = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
            kv_head = head // (HEADS // KV_HEADS)
            shared = slice(kv_head * HEAD_SIZE, (kv_head + 1) * HEAD_SIZE)
            query = self.turned(q[at, own], at)
            scores = torch.stack([query @ self.turned(k[other, shared], other) for other in range(at + 1)])
            attended[at, head] = (scores / math.sqrt(HEAD_SIZE)).softmax(dim=0) @ v[: at + 1, shared]
        return self.linear(attended.flatten(1), f"{name}.o_proj")

    def turned(self, head, position):
        if self.values.get("positions") == "learned":
            return head
        turned = head.clone()
        for pair in range(HEAD_SIZE // 2):
            angle = position * self.values["rope_theta"] ** (-2 * pair / HEAD_SIZE)
            a, b = head[pair], head[pair + HEAD_SIZE // 2]
            turned[pair] = a * math.cos(angle) - b * math.sin(angle)
            turned[pair + HEAD_SIZE // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

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
        if self.values["mlp"] == "gelu":
            return self.linear(gelu(raised), f"{name}.down_proj")
        if self.values["mlp"] == "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (raised + 0.044715 * raised**3)
            return self.linear(raised / 2 * (1 + inner.tanh()), f"{name}.down_proj")
        return self.linear(silu(self.linear(token, f"{name}.gate_proj")) * raised, f"{name}.down_proj")

    def linear(self, tokens, name):
        return linear(tokens, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


PROMPTS = ([5, 17, 3, 88, 41, 2, 9], [60, 61], [7])


def assert_same(directory, values):
    reference = Reference(values, load_file(directory / "model.safetensors"))
    model = load_model(directory, "tiny")
    batch = TokenBatch.of([Chunk(n, 0, prompt) for n, prompt in enumerate(PROMPTS)])
    given = model.logits(model.hidden(batch, ModelKeyValues(model.spec, torch.float32)))
    expected = torch.cat([reference.logits(prompt) for prompt in PROMPTS])
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("residual", ["add", "softmax", None])
@pytest.mark.parametrize(("mlp", "mlp_bias"), [("gelu", True), ("swiglu", False), ("swiglu", True)])
def test_a_pyramid_is_what_its_formulas_say(model_files, residual, mlp, mlp_bias):
    values = model_files.config("pr_moe", residual=residual, mlp=mlp, mlp_bias=mlp_bias, attention_bias=mlp_bias)
    assert_same(model_files.write(values), values)


GPT = {
    "norm": "layernorm", "layer_norm_eps": 1e-5, "rms_norm_eps": None, "positions": "learned", "mlp": "gelu_tanh",
    "attention_bias": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        *({"residual": residual, **GPT} for residual in ("add", "softmax", None)),
        *({"num_experts_per_tok": 2, "norm_topk_prob": one, "moe_intermediate_size": 24} for one in (True, False)),
    ],
)
def test_a_backbone_may_be_that_of_gpt_and_a_token_may_have_two_experts(model_files, changes):
    values = model_files.config("pr_moe", **changes)
    assert_same(model_files.write(values), values)


def test_the_coefficient_s_bias_counts(model_files):
    values = model_files.config("pr_moe")
    tensors = model_files.tensors(values)
    for layer in (1, 2):
        tensors[f"model.layers.{layer}.mlp.coefficient.bias"] = torch.tensor([3.0, -3.0])
    directory = model_files.write(values, tensors)
    assert_same(directory, values)


def test_a_mixture_of_students_is_a_model_of_fewer_layers(model_files):
    """DeepSpeed-MoE section 4.2: layers are taken out, and those that stay have as many experts as before."""
    teacher = model_files.config("pr_moe")
    tensors = model_files.tensors(teacher)
    student = {**teacher, "num_hidden_layers": 2, "num_experts": teacher["num_experts"][:2]}
    kept = {name: tensor for name, tensor in tensors.items() if "model.layers.2." not in name}
    assert_same(model_files.write(student, kept), student)
