"""Transformers, the oracle: tiny random models of each family, made and saved by it, and read by us."""

import math
import warnings

import torch

from experts.llm.model import load_model

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
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8}
SHARED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
MODELS = {
    "llama": ("llama", {}),
    "llama with biases and llama3 positions": (
        "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "rope_parameters": LLAMA3},
    ),
    "llama with linear positions": (
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ),
    "mistral with a window": ("mistral", {"sliding_window": 8, "head_dim": 32}),
    "phi3 with a window": ("phi3", {"sliding_window": 8}),
    "phi3 with longrope over a part of heads": (
        "phi3",
        {"num_attention_heads": 2, "original_max_position_embeddings": 128, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1 + number / 8 for number in range(12)], "long_factor": [9.0] * 12}},
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window of deeper layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}),
    "gemma2 without caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "qwen3 with yarn positions": ("qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral with a window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
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


def reference_attention(queries, keys, values, rows, scope=None):
    """Formula of arXiv 1706.03762, equation 1; ``keys``, ``values``: of whole sequences, row after row."""
    scale = 1 / math.sqrt(queries.shape[-1]) if scope is None else scope.scale
    window, cap = (None, None) if scope is None else (scope.window, scope.cap)
    group = queries.shape[1] // keys.shape[1]
    attended, start, stored_start = [], 0, 0
    for row in rows:
        own = queries[start : start + row.count].float()
        stored = slice(stored_start, stored_start + row.end)
        row_keys = keys[stored].float().repeat_interleave(group, dim=1)
        row_values = values[stored].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", own, row_keys) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        distance = torch.arange(row.first, row.end)[:, None] - torch.arange(row.end)[None, :]
        later = (distance < 0) | (distance >= (window or row.end))
        weights = scores.masked_fill(later.to(scores.device), -math.inf).softmax(dim=-1)
        attended.append(torch.einsum("hqk,khd->qhd", weights, row_values))
        start, stored_start = start + row.count, stored_start + row.end
    return torch.cat(attended).to(queries.dtype)
