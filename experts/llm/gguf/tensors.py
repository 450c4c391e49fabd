"""Tensors of a GGUF file, under their names in a Hugging Face checkpoint, and in its order of numbers.

Guarantees: numbers are exactly those that the file's blocks stand for, in fp32. A tensor is read when it is asked for,
and never mapped: a file that is cut meanwhile gives an error, and does not end the process.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experts.llm.gguf.blocks import numbers_of
from experts.llm.gguf.header import read_header, stored_bytes
from experts.llm.gguf.metadata import (
    LARGEST_GEMMA,
    LONG_FACTORS,
    MOE_EXPERTS_MAXIMUM,
    ROPE_FACTORS,
    SHORT_FACTORS,
    config_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from experts.llm.gguf.header import Header, PlacedTensor

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
OF_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
OF_GEMMA = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
OF_FAMILY = {
    **dict.fromkeys(LARGEST_GEMMA, OF_GEMMA),
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
OF_EXPERTS = {
    "ffn_gate_exps": ("gate_proj", "w1"),
    "ffn_up_exps": ("up_proj", "w3"),
    "ffn_down_exps": ("down_proj", "w2"),
}
ROW_OF_GATE = "ffn_gate_inp_shexp"  # written without its first dimension, of one row
NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
PERMUTED = {"llama": {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}}
PERMUTED["mixtral"] = PERMUTED["llama"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A Hugging Face tensor within a file's. ``heads``: whose rows llama.cpp's converter permuted, or 0."""

    whole: PlacedTensor
    shape: tuple[int, ...]
    start: int
    heads: int = 0


class GgufTensors:
    """Reads as safetensors' ``safe_open`` does. ``shapes``: by name."""

    def __init__(self, path: Path, expert: str) -> None:
        """Raises as ``read_header`` and ``config_of``."""
        header = read_header(path, expert)
        self._path = path
        self._expert = expert
        config = config_of(header, expert)
        self._parts = dict(_parts(header, config))
        self._is_above_one = config["model_type"] in LARGEST_GEMMA  # norms, which Hugging Face has less one

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: part.shape for name, part in self._parts.items()}

    def get_tensor(self, name: str) -> Tensor:
        """Raises LoadError, WeightsCorrupt."""
        part = self._parts[name]
        count = math.prod(part.shape)
        size_bytes = count // part.whole.format.numbers * part.whole.format.block_bytes
        stored = stored_bytes(self._path, self._expert, part.start, size_bytes, part.whole.name)
        numbers = numbers_of(stored, part.whole.format)
        return _in_order(numbers - 1 if self._is_above_one and name.endswith("norm.weight") else numbers, part)


def _in_order(numbers: Tensor, part: _Part) -> Tensor:
    """Rows as Hugging Face has them: halves of each head; llama.cpp's converter interleaves them."""
    if not part.heads:
        return numbers.view(part.shape)
    pairs = numbers.view(part.heads, part.shape[0] // part.heads // 2, 2, *part.shape[1:])
    return pairs.transpose(1, 2).reshape(part.shape)


def _parts(header: Header, config: Mapping[str, Any]) -> Iterator[tuple[str, _Part]]:
    """Unknown tensors keep their names, so that they are reported as unexpected."""
    family = config["model_type"]
    heads, of_layer = PERMUTED.get(family, {}), OF_LAYER | OF_FAMILY.get(family, {})
    for tensor in header.tensors.values():
        found = NAME.fullmatch(tensor.name)
        if tensor.name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS):
            continue  # in config.json
        if found is None or found[2] not in of_layer.keys() | OF_EXPERTS.keys():
            yield WHOLE.get(tensor.name, tensor.name), _Part(tensor, tensor.shape, tensor.start)
            continue
        layer, kind, suffix = found.groups()
        below = f"model.layers.{layer}"
        if kind in OF_EXPERTS and tensor.shape[0] <= MOE_EXPERTS_MAXIMUM:
            yield from _of_experts(tensor, below, kind, suffix, is_mixtral=family == "mixtral")
            continue
        shape = (1, *tensor.shape) if kind == ROW_OF_GATE and len(tensor.shape) == 1 else tensor.shape
        count = config.get(heads[kind]) if kind in heads else 0
        yield (
            f"{below}.{of_layer.get(kind, kind)}.{suffix}",
            _Part(tensor, shape, tensor.start, count if isinstance(count, int) else 0),
        )


def _of_experts(
    tensor: PlacedTensor, below: str, kind: str, suffix: str, *, is_mixtral: bool
) -> Iterator[tuple[str, _Part]]:
    names, of_mixtral = OF_EXPERTS[kind]
    within = f"block_sparse_moe.experts.{{}}.{of_mixtral}" if is_mixtral else f"mlp.experts.{{}}.{names}"
    count, *shape = tensor.shape
    for number in range(count):
        start = tensor.start + number * (tensor.size_bytes // count)
        yield f"{below}.{within.format(number)}.{suffix}", _Part(tensor, tuple(shape), start)
