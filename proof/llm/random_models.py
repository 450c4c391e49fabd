"""Models with random weights, as the directories that everybody reads: for speed it does not matter what they say."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from experts.llm.config import parse_spec
from experts.llm.names import assemblies

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from torch import Tensor

    from experts.llm.names import Part

VOCABULARY, CONTEXT = 2048, 256


@dataclass(frozen=True, slots=True)
class QwenShape:
    """The sizes of a Qwen3-MoE: its family is one that both CoServe and transformers run."""

    name: str
    hidden: int
    layers: int
    moe_experts: int
    width: int
    heads: int = 8
    kv_heads: int = 4
    per_token: int = 2
    vocabulary: int = VOCABULARY

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "moe_intermediate_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "num_experts": self.moe_experts,
            "num_experts_per_tok": self.per_token,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "dtype": "float32",
        }


SMALL = QwenShape("8M", hidden=256, layers=4, moe_experts=16, width=128)
LARGE = QwenShape("105M", hidden=512, layers=8, moe_experts=32, width=256)
TINY = QwenShape("tiny", hidden=64, layers=2, moe_experts=4, width=32, heads=4, kv_heads=2)


def write_random_model(
    directory: Path, shape: QwenShape, seed: int = 0, own: Collection[str] = (), own_seed: int = 0
) -> Path:
    """A directory of this shape. ``own``: beginnings of names that are drawn by ``own_seed``: the rest is a backbone.

    Models of one shape and seed that differ in ``own_seed`` share all but those tensors bit for bit.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config), "utf-8")
    parts = [part for one in assemblies(parse_spec(shape.config, shape.name)) for part in one.forms[0]]
    common, apart = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(own_seed)
    is_own = {part.name: part.name.startswith(tuple(own)) if own else False for part in parts}
    tensors = {part.name: _random(part, common) for part in parts if not is_own[part.name]}
    tensors |= {part.name: _random(part, apart) for part in parts if is_own[part.name]}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _random(part: Part, generator: torch.Generator) -> Tensor:
    if part.name.endswith("norm.weight"):
        return torch.ones(part.shape)
    return torch.randn(part.shape, generator=generator) / math.sqrt(part.shape[-1])
