"""A small PR-MoE that can be trained: the layers of DeepSpeed-MoE (arXiv 2201.05596, section 4.1), plainly.

What is trained here is what ``experts.llm`` serves: the same pyramid, the same residual branch with its coefficient,
rotary positions, RMSNorm, and a tied head. Parameters have the names of the checkpoint, with a layer's experts as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import embedding, gelu, linear, one_hot, rms_norm, scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

EPSILON, THETA = 1e-6, 1e4
FIRST_DEVIATION = 0.7  # of a matrix's numbers, times the root of its width


@dataclass(frozen=True, slots=True)
class Shape:
    """A network's sizes. ``moe_experts``: of each layer, 0 = dense; MLPs and experts are as wide as each other."""

    vocabulary: int
    hidden: int
    heads: int
    width: int
    moe_experts: tuple[int, ...]
    context: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "pr_moe",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_hidden_layers": len(self.moe_experts),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "num_experts": list(self.moe_experts),
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "residual": "softmax",
            "mlp": "gelu",
            "tie_word_embeddings": True,
        }


class PrMoe(nn.Module):  # type: ignore[misc]  # torch is untyped
    """Texts of one length in, what may follow each of their tokens out."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.tensors = nn.ParameterDict()  # keys with dots are not allowed: they stand as slashes
        for name, sizes in _sizes(shape).items():
            self.tensors[name.replace(".", "/")] = nn.Parameter(_first(name, sizes, generator))
        pairs = torch.arange(0, shape.head_size, 2) / shape.head_size
        angles = torch.arange(shape.context)[:, None] * THETA**-pairs
        angles = torch.cat((angles, angles), dim=-1)
        self._cosine, self._sine = angles.cos(), angles.sin()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.tensors[name.replace(".", "/")]
        return tensor

    @property
    def own_names(self) -> tuple[str, ...]:
        """Tensors that an expert may own: the last layer without its moe_experts, and the last norm."""
        last = f"model.layers.{len(self.shape.moe_experts) - 1}."
        names = [key.replace("/", ".") for key in self.tensors]
        return tuple(name for name in names if name.startswith((last, "model.norm")) and ".experts." not in name)

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(texts, tokens) to logits (texts, tokens, vocabulary), and how unevenly experts were chosen (1: evenly)."""
        tokens, uneven = self.trunk(token_ids)
        logits, last_uneven = self.answer(tokens)
        return logits, (uneven + last_uneven) / sum(count > 0 for count in self.shape.moe_experts)

    def trunk(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """All layers but the last: (texts, tokens, hidden), and the sum of how unevenly each layer chose."""
        tokens = embedding(token_ids, self["model.embed_tokens.weight"])
        uneven = tokens.new_zeros(())
        for layer in range(len(self.shape.moe_experts) - 1):
            tokens, one = self._layer(tokens, layer)
            uneven = uneven + one
        return tokens, uneven

    def answer(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        tokens, uneven = self._layer(tokens, len(self.shape.moe_experts) - 1)
        return linear(self._norm(tokens, "model.norm"), self["model.embed_tokens.weight"]), uneven

    def _layer(self, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        own, experts = f"model.layers.{layer}", self.shape.moe_experts[layer]
        tokens = tokens + self._attend(self._norm(tokens, f"{own}.input_layernorm"), f"{own}.self_attn")
        normed = self._norm(tokens, f"{own}.post_attention_layernorm").flatten(0, 1)
        if experts:
            mixed, uneven = self._moe(normed, f"{own}.mlp", experts)
        else:
            mixed, uneven = self._mlp(normed, f"{own}.mlp"), tokens.new_zeros(())
        return tokens + mixed.view_as(tokens), uneven

    def checkpoint(self) -> dict[str, Tensor]:
        """All tensors by the checkpoint's names, those of each expert apart."""
        written: dict[str, Tensor] = {}
        for key, tensor in self.tensors.items():
            name = key.replace("/", ".")
            before, together, after = name.partition(".experts.")
            if together:
                written |= {f"{before}.experts.{n}.{after}": one.detach() for n, one in enumerate(tensor)}
            else:
                written[name] = tensor.detach()
        return written

    def _norm(self, tokens: Tensor, own: str) -> Tensor:
        weight = self[f"{own}.weight"]
        return rms_norm(tokens, weight.shape, weight, EPSILON)

    def _attend(self, tokens: Tensor, own: str) -> Tensor:
        texts, count, _ = tokens.shape
        split = (texts, count, self.shape.heads, self.shape.head_size)
        queries, keys, values = (
            linear(tokens, self[f"{own}.{one}_proj.weight"]).view(split).transpose(1, 2) for one in "qkv"
        )
        attended = scaled_dot_product_attention(self._turned(queries), self._turned(keys), values, is_causal=True)
        return linear(attended.transpose(1, 2).flatten(2), self[f"{own}.o_proj.weight"])

    def _turned(self, heads: Tensor) -> Tensor:
        count = heads.shape[-2]
        first, second = heads.chunk(2, dim=-1)
        return heads * self._cosine[:count] + torch.cat((-second, first), dim=-1) * self._sine[:count]

    def _mlp(self, tokens: Tensor, own: str) -> Tensor:
        raised = gelu(linear(tokens, self[f"{own}.up_proj.weight"], self[f"{own}.up_proj.bias"]))
        return linear(raised, self[f"{own}.down_proj.weight"], self[f"{own}.down_proj.bias"])

    def _moe(self, tokens: Tensor, own: str, experts: int) -> tuple[Tensor, Tensor]:
        """The best expert of each token, weighed by its share; beside it the MLP, weighed by the coefficient."""
        shares = linear(tokens, self[f"{own}.gate.weight"]).float().softmax(dim=-1)
        share, chosen = shares.max(dim=-1)
        mixed = self._chosen(tokens, chosen, f"{own}.experts", experts) * share[:, None].to(tokens.dtype)
        weights = linear(tokens, self[f"{own}.coefficient.weight"], self[f"{own}.coefficient.bias"]).softmax(dim=-1)
        both = mixed * weights[:, :1] + self._mlp(tokens, f"{own}.residual") * weights[:, 1:]
        taken = one_hot(chosen, experts).float().mean(dim=0)
        return both, experts * (taken * shares.mean(dim=0)).sum()  # Switch Transformer (arXiv 2101.03961), equation 4

    def _chosen(self, tokens: Tensor, chosen: Tensor, own: str, experts: int) -> Tensor:
        up, up_bias = self[f"{own}.up_proj.weight"], self[f"{own}.up_proj.bias"]
        down, down_bias = self[f"{own}.down_proj.weight"], self[f"{own}.down_proj.bias"]
        order = chosen.argsort(stable=True)
        parts = tokens[order].split(torch.bincount(chosen, minlength=experts).tolist())
        computed = [
            linear(gelu(linear(part, up[n], up_bias[n])), down[n], down_bias[n]) for n, part in enumerate(parts)
        ]
        return torch.cat(computed)[order.argsort()]


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden = shape.hidden
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer, experts in enumerate(shape.moe_experts):
        own = f"model.layers.{layer}"
        sizes |= {f"{own}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        sizes |= {f"{own}.self_attn.{one}_proj.weight": (hidden, hidden) for one in "qkvo"}
        if not experts:
            sizes |= _mlp_sizes(shape, f"{own}.mlp")
            continue
        sizes[f"{own}.mlp.gate.weight"] = (experts, hidden)
        sizes |= _mlp_sizes(shape, f"{own}.mlp.experts", experts) | _mlp_sizes(shape, f"{own}.mlp.residual")
        sizes |= {f"{own}.mlp.coefficient.weight": (2, hidden), f"{own}.mlp.coefficient.bias": (2,)}
    return sizes | {"model.norm.weight": (hidden,)}


def _mlp_sizes(shape: Shape, own: str, *experts: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{own}.up_proj.weight": (*experts, shape.width, shape.hidden),
        f"{own}.up_proj.bias": (*experts, shape.width),
        f"{own}.down_proj.weight": (*experts, shape.hidden, shape.width),
        f"{own}.down_proj.bias": (*experts, shape.hidden),
    }


def _first(name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Before anything is learned."""
    if name.endswith("norm.weight"):
        return torch.ones(sizes)
    if name.endswith("bias"):
        return torch.zeros(sizes)
    return torch.randn(sizes, generator=generator) * FIRST_DEVIATION / math.sqrt(sizes[-1])
