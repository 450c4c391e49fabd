"""Models with random weights, as Hugging Face directories, and jobs for them: tokens of random models mean nothing."""

from __future__ import annotations

import json
import math
import random
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

    from experts.llm.names import SourceTensor

VOCABULARY, CONTEXT = 2048, 256
GUMBEL = 1.28  # the deviation of Gumbel's distribution: the largest of log shares under such noise is drawn by them
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 95
SHORTEST_OUTPUT, LONGEST_OUTPUT = 2, 53
MEDIAN_OUTPUT, OUTPUT_SPREAD = 14, 0.9  # of the log-normal distribution


@dataclass(frozen=True, slots=True)
class QwenShape:
    """Sizes of a Qwen3-MoE, a family that both CoServe and transformers run."""

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
TINY = QwenShape("tiny", hidden=64, layers=2, moe_experts=8, width=32, heads=4, kv_heads=2)


def write_random_model(
    directory: Path, shape: QwenShape, seed: int = 0, own: Collection[str] = (), own_seed: int = 0
) -> Path:
    """A directory of this shape. ``own``: prefixes of the tensors that ``own_seed`` draws; the rest is a backbone.

    Models of one shape and seed that differ in ``own_seed`` share all other tensors bit for bit.
    """
    common, apart = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(own_seed)
    parts = sorted(_parts(shape), key=lambda part: bool(own) and part.name.startswith(tuple(own)))
    tensors = {
        part.name: _random(part, apart if own and part.name.startswith(tuple(own)) else common) for part in parts
    }
    return _written(directory, shape, tensors)


def write_skewed_model(directory: Path, shape: QwenShape, zipf: float) -> tuple[Path, dict[tuple[int, int], float]]:
    """A directory whose gates choose by Zipf's law, and each expert's share of a layer, by layer and number.

    The first channel is the same for all tokens, and only gates read it: through it each gate adds the logarithm of
    its experts' shares; the other channels are its noise.
    """
    generator = torch.Generator().manual_seed(0)
    shares = torch.arange(1, shape.moe_experts + 1, dtype=torch.float32).pow(-zipf)
    tensors: dict[str, Tensor] = {}
    found: dict[tuple[int, int], float] = {}
    gates = 0
    for part in _parts(shape):
        drawn = tensors[part.name] = _random(part, generator)
        if part.name.endswith("norm.weight"):
            continue
        if part.name.endswith("embed_tokens.weight"):
            drawn *= math.sqrt(shape.hidden)
            drawn[:, 0] = math.sqrt(shape.hidden)
        elif part.name.endswith("mlp.gate.weight"):
            order = torch.randperm(shape.moe_experts, generator=generator)
            drawn *= GUMBEL * math.sqrt(2.0)
            drawn[:, 0] = shares[order].log() * math.sqrt(2.0 / shape.hidden)  # under a norm: half of the squares
            layer = (shares[order] / shares.sum()).tolist()
            found |= {(gates, number): share for number, share in enumerate(layer)}
            gates += 1
        elif part.name.endswith(("o_proj.weight", "down_proj.weight")):
            drawn[0] = 0.0
        else:  # or what all tokens have in common would favour the same experts
            drawn[:, 0] = 0.0
    return _written(directory, shape, tensors), found


def _parts(shape: QwenShape) -> list[SourceTensor]:
    return [part for one in assemblies(parse_spec(shape.config, shape.name)) for part in one.forms[0]]


def _random(part: SourceTensor, generator: torch.Generator) -> Tensor:
    if part.name.endswith("norm.weight"):
        return torch.ones(part.shape)
    return torch.randn(part.shape, generator=generator) / math.sqrt(part.shape[-1])


def _written(directory: Path, shape: QwenShape, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config), "utf-8")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@dataclass(frozen=True, slots=True)
class TextJob:
    """A prompt, and how many tokens follow it: random models have no stop token."""

    prompt: tuple[int, ...]
    output: int


def mixed_lengths(requests: int, vocabulary: int, seed: int = 0) -> tuple[TextJob, ...]:
    """Prompts of any length within bounds, and outputs of which most are short and a few are long."""
    chance = random.Random(seed)
    jobs = []
    for _ in range(requests):
        length = chance.randint(SHORTEST_PROMPT, LONGEST_PROMPT)
        drawn = round(math.exp(chance.gauss(math.log(MEDIAN_OUTPUT), OUTPUT_SPREAD)))
        prompt = tuple(chance.randrange(vocabulary) for _ in range(length))
        jobs.append(TextJob(prompt, min(max(drawn, SHORTEST_OUTPUT), LONGEST_OUTPUT)))
    return tuple(jobs)
