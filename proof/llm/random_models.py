"""Models with random weights, as Hugging Face directories, and jobs for them: tokens of random models mean nothing."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from experts.llm.files.config import parse_spec
from experts.llm.files.names import assemblies

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from torch import Tensor

    from experts.llm.files.names import SourceTensor

VOCABULARY, CONTEXT = 2048, 256
GUMBEL = 1.28  # the deviation of Gumbel's distribution: the largest of log shares under such noise is drawn by them
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 95
SHORTEST_OUTPUT, LONGEST_OUTPUT = 2, 53
MEDIAN_OUTPUT, OUTPUT_SPREAD = 14, 0.9  # of the log-normal distribution


@dataclass(frozen=True, slots=True)
class QwenShape:
    """Sizes of a Qwen3-MoE, a family that both CoServe and transformers run; of a Qwen3 with no moe_experts."""

    name: str
    hidden: int
    layers: int
    moe_experts: int
    width: int
    heads: int = 8
    kv_heads: int = 4
    per_token: int = 2
    vocabulary: int = VOCABULARY
    head_size: int | None = None
    context: int = CONTEXT
    dtype: str = "float32"

    @property
    def config(self) -> dict[str, Any]:
        sizes = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "moe_intermediate_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size or self.hidden // self.heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "num_experts": self.moe_experts,
            "num_experts_per_tok": self.per_token,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "dtype": self.dtype,
        }
        dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": self.width}
        return sizes if self.moe_experts else sizes | dense


SMALL = QwenShape("8M", hidden=256, layers=4, moe_experts=16, width=128)
LARGE = QwenShape("105M", hidden=512, layers=8, moe_experts=32, width=256)
TINY = QwenShape("tiny", hidden=64, layers=2, moe_experts=8, width=32, heads=4, kv_heads=2)
DENSE = QwenShape("Qwen3-0.6B", hidden=1024, layers=28, moe_experts=0, width=3072, heads=16, kv_heads=8,
                  vocabulary=151_936, head_size=128, context=4096)  # fmt: skip
OLMOE = QwenShape("OLMoE-1B-7B", hidden=2048, layers=16, moe_experts=64, width=1024, heads=16, kv_heads=16,
                  per_token=8, vocabulary=50_304, dtype="bfloat16")  # fmt: skip
LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["\u0120", "\u010a"]  # a space, the end of a line
PAIRS = [(one, other) for one in LETTERS for other in LETTERS if (one + other).isalpha()]
SHARD_BYTES = 2 << 30


def write_random_model(
    directory: Path, shape: QwenShape, seed: int = 0, own: Collection[str] = (), own_seed: int = 0
) -> Path:
    """A directory of this shape. ``own``: prefixes of the tensors that ``own_seed`` draws; the rest is a backbone.

    Models of one shape and seed that differ in ``own_seed`` share all other tensors bit for bit.
    """
    common, apart = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(own_seed)
    parts = sorted(_parts(shape), key=lambda part: part.name.startswith(tuple(own)))
    tensors = ((one.name, _random(one, apart if one.name.startswith(tuple(own)) else common)) for one in parts)
    return _written(directory, shape, tensors)


def write_skewed_model(directory: Path, shape: QwenShape, zipf: float) -> tuple[Path, dict[tuple[int, int], float]]:
    """A directory whose gates choose by Zipf's law, and each expert's share of a layer, by layer and number.

    The first channel is the same for all tokens, and only gates read it: through it each gate adds the logarithm of
    its experts' shares; the other channels are its noise.
    """
    generator = torch.Generator().manual_seed(0)
    shares = torch.arange(1, shape.moe_experts + 1, dtype=torch.float32).pow(-zipf)
    found: dict[tuple[int, int], float] = {}

    def skewed(part: SourceTensor) -> Tensor:
        drawn = _random(part, generator)
        if part.name.endswith("norm.weight"):
            return drawn
        if part.name.endswith("embed_tokens.weight"):
            drawn *= math.sqrt(shape.hidden)
            drawn[:, 0] = math.sqrt(shape.hidden)
        elif part.name.endswith("mlp.gate.weight"):
            order = torch.randperm(shape.moe_experts, generator=generator)
            drawn *= GUMBEL * math.sqrt(2.0)
            drawn[:, 0] = shares[order].log() * math.sqrt(2.0 / shape.hidden)  # under a norm: half of the squares
            layer = (shares[order] / shares.sum()).tolist()
            gates = len(found) // shape.moe_experts
            found.update({(gates, number): share for number, share in enumerate(layer)})
        elif part.name.endswith(("o_proj.weight", "down_proj.weight")):
            drawn[0] = 0.0
        else:  # or what all tokens have in common would favour the same experts
            drawn[:, 0] = 0.0
        return drawn

    parts = ((part.name, skewed(part)) for part in _parts(shape))
    return _written(directory, shape, parts), found


def _parts(shape: QwenShape) -> list[SourceTensor]:
    return [part for one in assemblies(parse_spec(shape.config, shape.name)) for part in one.forms[0]]


def _random(part: SourceTensor, generator: torch.Generator) -> Tensor:
    if part.name.endswith("norm.weight"):
        return torch.ones(part.shape)
    return torch.randn(part.shape, generator=generator) / math.sqrt(part.shape[-1])


def _written(directory: Path, shape: QwenShape, tensors: Iterable[tuple[str, Tensor]]) -> Path:
    """In shards, as all tensors of a large model are more than the memory has."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config), "utf-8")
    files: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def save() -> None:
        file = f"model-{len(set(files.values()))}.safetensors"
        files.update(dict.fromkeys(shard, file))
        save_file(shard, directory / file, {"format": "pt"})
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.to(getattr(torch, shape.dtype))
        if sum(one.nbytes for one in shard.values()) >= SHARD_BYTES:
            save()
    save()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")
    return directory


def write_random_gguf(path: Path, shape: QwenShape, number_format: str) -> Path:
    """A dense model in a file that llama.cpp and CoServe read alike. Needs the package gguf.

    Embeddings are in Q8_0 in any format, as heads are in int8 beside our int4.
    """
    library: Any = import_module("gguf")
    generator = torch.Generator().manual_seed(0)
    writer = library.GGUFWriter(path, "qwen3")
    _describe(writer, shape)
    names = library.get_tensor_name_map(library.MODEL_ARCH.QWEN3, shape.layers)
    for part in _parts(shape):
        kind = "F32" if len(part.shape) == 1 else "Q8_0" if "embed" in part.name else number_format
        numbers = library.GGMLQuantizationType[kind]
        drawn = library.quants.quantize(_random(part, generator).numpy(), numbers)
        writer.add_tensor(f"{names.get_name(part.name.removesuffix('.weight'))}.weight", drawn, raw_dtype=numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: Any, shape: QwenShape) -> None:  # noqa: ANN401 - untyped
    """With a vocabulary that joins pairs of letters."""
    for key, value in {
        "block_count": shape.layers, "context_length": shape.context, "embedding_length": shape.hidden,
        "feed_forward_length": shape.width, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.config["head_dim"],
        "attention.value_length": shape.config["head_dim"],
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_layer_norm_rms_eps(shape.config["rms_norm_eps"])
    writer.add_rope_freq_base(shape.config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    words = [*LETTERS, *map("".join, PAIRS)]
    writer.add_token_list([*words, *(f"t{number}" for number in range(len(words), shape.vocabulary))])
    writer.add_token_types([1] * shape.vocabulary)
    writer.add_token_merges([" ".join(pair) for pair in PAIRS])
    writer.add_eos_token_id(0)


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
