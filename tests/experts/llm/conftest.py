"""Tiny language models with random weights, as the directories that they are read from."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import parse_spec, read_spec
from experts.llm.files.names import assemblies
from experts.llm.tiers.offload import BlockForm, BlockTensor
from experts.llm.token_batch import Chunk, TokenBatch

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 24, "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16,
        "decoder_sparse_step": 2,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "pr_moe": {
        "num_experts": [0, 4, 6], "num_experts_per_tok": 1, "norm_topk_prob": False, "residual": "softmax",
        "mlp": "gelu",
    },
}  # fmt: skip

WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}  # of int4's kernels

MOE_FAMILIES = [family for family, changes in FAMILIES.items() if "num_experts_per_tok" in changes]


def tiny_config(family, **changes):
    """The values of a config.json; a change to None takes the field out."""
    values = {"model_type": family, **SIZES, **FAMILIES[family], **changes}
    return {name: value for name, value in values.items() if value is not None or name == "residual"}


def block_form(stacks):
    """The block of one moe_expert of these stacked tensors, as a packed file has it."""
    first, _, _ = next(iter(stacks)).partition("experts.")
    offset, parts = 0, []
    for name in (name for name in stacks if name.startswith(first)):
        one = stacks[name][0]
        parts.append(BlockTensor(name.partition("experts.")[2], one.dtype, tuple(one.shape), offset))
        offset += -(-one.nbytes // 64) * 64
    return BlockForm(-(-offset // 4096) * 4096, tuple(parts))


def logits_of(model, *prompts):
    """(tokens of all prompts, vocabulary)."""
    batch = TokenBatch.of([Chunk(number, 0, prompt) for number, prompt in enumerate(prompts)])
    return model.logits(model.hidden(batch, ModelKeyValues(model.spec, model.dtype)))


def greedy(model, prompts, count):
    """The prompts together, then one token of each at a time: the next tokens, and the logits of every step."""
    key_values = ModelKeyValues(model.spec, model.dtype)
    chunks = [Chunk(number, 0, prompt) for number, prompt in enumerate(prompts)]
    tokens, steps = [[] for _ in prompts], []
    for _ in range(count):
        steps.append(model.forward(TokenBatch.of(chunks), key_values))
        best = steps[-1].argmax(dim=-1).tolist()
        for number, token in enumerate(best):
            tokens[number].append(token)
        chunks = [Chunk(one.sequence, one.first + len(one.tokens), [best[one.sequence]]) for one in chunks]
    return tokens, torch.stack(steps)


class ModelFiles:
    def __init__(self, folder):
        self._folder = folder
        self._count = 0

    def config(self, family, **changes):
        return tiny_config(family, **changes)

    def stored(self, family, **changes):
        values = tiny_config(family, **changes)
        return values, self.tensors(values)

    def tensors(self, values, form=0, seed=0):
        """Random tensors, as a checkpoint of this config.json has them in its first or another form."""
        generator = torch.Generator().manual_seed(seed)
        wanted = assemblies(parse_spec(values, "tiny"))
        parts = [part for one in wanted for part in one.forms[min(form, len(one.forms) - 1)]]
        return {part.name: self._random(part, generator) for part in parts}

    def _random(self, part, generator):
        drawn = torch.randn(part.shape, generator=generator)
        if "norm" in part.name:
            return 1 + 0.1 * drawn
        return drawn / math.sqrt(part.shape[-1]) if len(part.shape) > 1 else 0.1 * drawn

    def write(self, values, tensors=None, name="model.safetensors"):
        """A directory of its own with this config.json and these tensors; random ones unless given."""
        directory = self._directory(values)
        save_file(self.tensors(values) if tensors is None else tensors, directory / name)
        return directory

    def read(self, family, **changes):
        directory = self.write(self.config(family, **changes))
        spec = read_spec(directory, "tiny")
        return spec, open_checkpoint(directory, "tiny", spec).read_all()

    def _directory(self, values):
        self._count += 1
        directory = self._folder / str(self._count)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(values), "utf-8")
        return directory

    def write_shards(self, values, tensors, count=3):
        names = sorted(tensors)
        shards = {f"model-{n + 1:05}-of-{count:05}.safetensors": names[n::count] for n in range(count)}
        directory = self._directory(values)
        for file, held in shards.items():
            save_file({name: tensors[name] for name in held}, directory / file)
        index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
        return directory


@pytest.fixture
def model_files(tmp_path):
    return ModelFiles(tmp_path)
