"""A GPT of Megatron-DeepSpeed, tensor by tensor, as the ``pr_moe`` directory that ``experts.llm.config`` describes.

Guarantees: what the tensors tell (layers, widths, experts of each layer, residual or not) is taken from them; what they
do not tell is taken from the trainer's arguments, and asked for where those lack it. Nothing is guessed: a tensor that
has no place here, or an argument that would change the numbers, is refused by name.

Layout of the fused queries, keys and values by ``checkpoint_version``: Megatron-LM's own (0: by kind, then head; 1: by
head, then place in it, then kind; 2 and later: by head, then kind). Experts are DeepSpeed's
(``deepspeed_moe.experts.deepspeed_experts``), also behind ``mlp.moe``, where its inference looks for them; a residual
layer has an MLP beside them, and a coefficient with a bias.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from experts.errors import TrainingUnsupported, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

NAMES_SHOWN = 4
LAYER = r"layers\.(?P<layer>\d+)\."
OF_MLP = r"\.(?:(?P<up>dense_h_to_4h)|dense_4h_to_h)\.(?P<kind>weight|bias)"
MOE = r"mlp\.(?:moe\.)?deepspeed_moe\."
QKV = re.compile(LAYER + r"(?:self_)?attention\.query_key_value\.(?P<kind>weight|bias)")
EXPERT = re.compile(LAYER + MOE + r"experts\.deepspeed_experts\.(?P<moe_expert>\d+)" + OF_MLP)
RESIDUAL = re.compile(LAYER + r"mlp\.(?:moe\.)?mlp" + OF_MLP)
DENSE = re.compile(LAYER + "mlp" + OF_MLP)
PLAIN = {
    re.compile(LAYER + r"input_layernorm\.(?P<kind>weight|bias)"): "model.layers.{layer}.input_layernorm.{kind}",
    re.compile(LAYER + r"post_attention_layernorm\.(?P<kind>weight|bias)"):
        "model.layers.{layer}.post_attention_layernorm.{kind}",
    re.compile(LAYER + r"(?:self_)?attention\.dense\.(?P<kind>bias)"): "model.layers.{layer}.self_attn.o_proj.{kind}",
    re.compile(LAYER + MOE + r"gate\.wg\.weight"): "model.layers.{layer}.mlp.gate.weight",
    re.compile(LAYER + r"mlp\.(?:moe\.)?coefficient\.(?P<kind>weight|bias)"):
        "model.layers.{layer}.mlp.coefficient.{kind}",
    re.compile(r"final_layernorm\.(?P<kind>weight|bias)"): "model.norm.{kind}",
    re.compile(r"position_embeddings\.weight"): "model.embed_positions.weight",
}  # fmt: skip
SPLIT = {  # and by which dimension, where several ranks share one (tensor parallelism)
    re.compile(LAYER + r"(?:self_)?attention\.dense\.weight"): ("model.layers.{layer}.self_attn.o_proj.weight", 1),
    re.compile(r"(?:embedding\.)?word_embeddings\.weight"): ("model.embed_tokens.weight", 0),
    re.compile(r"output_layer\.weight"): ("lm_head.weight", 0),
}
NEEDLESS = re.compile(r"word_embeddings_for_head\.weight")  # the embedding again, where pipeline stages shared it
KNOWN_PREFIX = re.compile(r"(?:module\.)*(?:language_model\.)?(?:(?:encoder|transformer|embedding)\.)?")
REFUSED_ARGUMENTS = {
    "swiglu": "gated experts are not what its names say here",
    "squared_relu": "squared ReLU is not served",
    "apply_layernorm_1p": "norms stored less one are not imported",
    "apply_residual_connection_post_layernorm": "residuals behind the norm are not served",
    "use_rotary_position_embeddings": "rotary positions of Megatron are not imported",
}


class States(Protocol):
    """The tensors of a checkpoint, by model-parallel rank."""

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Names of all tensors, by rank."""

    def read(self, rank: int, name: str) -> Tensor: ...

    def shape(self, rank: int, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Arguments:
    """The trainer's arguments. ``given`` at the import go before ``stored``."""

    source: str
    stored: Mapping[str, Any]
    given: Mapping[str, Any]

    def get(self, name: str) -> Any:  # noqa: ANN401  JSON
        return self.given.get(name, self.stored.get(name))

    def need(self, name: str, what: str, example: object) -> Any:  # noqa: ANN401  JSON
        value = self.get(name)
        if value is None:
            raise TrainingUnsupported(
                self.source, name, f"is not told by the checkpoint: {what} - give --arg {name}={example}"
            )
        return value

    def number(self, name: str, what: str, example: float) -> float:
        value = self.need(name, what, example)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise TrainingUnsupported(self.source, name, f"is {value!r}: {what} - give --arg {name}={example}")
        return float(value)

    def count(self, name: str, what: str, example: int) -> int:
        value = self.number(name, what, example)
        if value < 1 or value != int(value):
            raise TrainingUnsupported(self.source, name, f"is {value:g}: {what} - give --arg {name}={example}")
        return int(value)


@dataclass(frozen=True, slots=True)
class _PlacedTensor:
    """Tensor of the checkpoint with its name in the directory. ``joined``: the dimension that ranks share."""

    stored: str
    name: str
    layer: int | None
    joined: int | None
    is_of_expert: bool = False
    is_qkv: bool = False


class GptCheckpoint:
    def __init__(self, source: str, states: States, arguments: Arguments) -> None:
        self._source = source
        self._states = states
        self._arguments = arguments
        self._refuse_arguments()
        self._found = self._places()
        self._heads = arguments.count("num_attention_heads", "how many heads a layer's attention has", 16)
        self._experts_are_split = self._are_split()

    @property
    def layers(self) -> int:
        return 1 + max((one.layer for one in self._found if one.layer is not None), default=-1)

    def config(self) -> dict[str, Any]:
        """The values of a config.json."""
        embedding, positions = self._shape("model.embed_tokens.weight"), self._shape("model.embed_positions.weight")
        hidden = embedding[1]
        if hidden % self._heads:
            what = f"is {self._heads}, and the width {hidden} is no multiple of it"
            raise TrainingUnsupported(self._source, "num_attention_heads", what)
        values: dict[str, Any] = {
            "model_type": "pr_moe",
            "vocab_size": embedding[0],
            "hidden_size": hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._heads,
            "max_position_embeddings": positions[0],
            "attention_bias": True,
            "norm": "layernorm",
            "layer_norm_eps": self._arguments.number("layernorm_epsilon", "what LayerNorm adds to a variance", 1e-5),
            "positions": "learned",
            "mlp": self._mlp(),
            "mlp_bias": True,
            "tie_word_embeddings": all(one.name != "lm_head.weight" for one in self._found),
        }
        return values | self._moe(hidden)

    def tensors(self, layer: int | None) -> Iterator[tuple[str, Tensor]]:
        """A layer's, or with None those of no layer, by their names in the directory."""
        for one in self._found:
            if one.layer == layer:
                yield from self._converted(one)

    def _refuse_arguments(self) -> None:
        for name, why in REFUSED_ARGUMENTS.items():
            if self._arguments.get(name):
                raise TrainingUnsupported(self._source, name, why)
        key_value_heads = self._arguments.get("num_key_value_heads")
        if key_value_heads not in (None, self._arguments.get("num_attention_heads")):
            raise TrainingUnsupported(self._source, "num_key_value_heads", "heads that share keys are not imported")

    def _places(self) -> tuple[_PlacedTensor, ...]:
        names = dict.fromkeys(name for rank in self._states.names for name in rank)
        places = {name: _place(name) for name in names if not NEEDLESS.search(name)}
        unknown = [name for name, place in places.items() if place is None]
        if unknown:
            more = f" and {len(unknown) - NAMES_SHOWN} more" if len(unknown) > NAMES_SHOWN else ""
            shown = ", ".join(unknown[:NAMES_SHOWN]) + more
            raise WeightsMismatch(self._source, f"no tensors of a GPT by Megatron-DeepSpeed are {shown}")
        found = tuple(place for place in places.values() if place is not None)
        of_names: dict[str, str] = {}
        for one in found:
            if one.name in of_names:
                raise WeightsMismatch(self._source, f"{of_names[one.name]} and {one.stored} are the same tensor")
            of_names[one.name] = one.stored
        return found

    def _are_split(self) -> bool:
        """True where ranks split each moe_expert; else every rank holds whole, equal moe_experts."""
        first = next((one for one in self._found if one.is_of_expert and one.joined == 0), None)
        parts = [] if first is None else self._parts(first.stored)
        return any(not torch.equal(parts[0], part) for part in parts[1:])

    def _parts(self, stored: str) -> list[Tensor]:
        ranks = [rank for rank, names in enumerate(self._states.names) if stored in names]
        return [self._states.read(rank, stored) for rank in ranks]

    def _shape(self, name: str) -> tuple[int, ...]:
        for one in self._found:
            if one.name == name:
                ranks = [rank for rank, names in enumerate(self._states.names) if one.stored in names]
                first = self._states.shape(ranks[0], one.stored)
                return (len(ranks) * first[0], *first[1:]) if one.joined == 0 else first
        raise WeightsMismatch(
            self._source, f"a GPT's {name} is missing: only those with learned positions are imported"
        )

    def _mlp(self) -> str:
        if self._arguments.get("openai_gelu"):
            return "gelu_tanh"
        what = "whether GELU is approximated by tanh (true), as Megatron's fused one is"
        return "gelu_tanh" if self._arguments.need("bias_gelu_fusion", what, "true") else "gelu"

    def _moe(self, hidden: int) -> dict[str, Any]:
        experts = [self._experts_of(layer) for layer in range(self.layers)]
        width = self._arguments.get("ffn_hidden_size") or self._width() or 4 * hidden
        values: dict[str, Any] = {"num_experts": experts, "residual": self._residual(), "intermediate_size": width}
        if any(experts):
            per_token = self._arguments.count("topk", "how many experts a token goes to", 1)
            # the shares of a first choice stay as they are, those of several sum to 1 (deepspeed/moe/sharded_moe.py)
            values |= {"num_experts_per_tok": per_token, "norm_topk_prob": per_token > 1}
        return values

    def _experts_of(self, layer: int) -> int:
        """Count of moe_experts that the layer's gate chooses from, all of them present. 0: no gate."""
        gate = f"model.layers.{layer}.mlp.gate.weight"
        matches = [EXPERT.search(one.stored) for one in self._found if one.layer == layer and one.is_of_expert]
        numbers = {int(match["moe_expert"]) for match in matches if match is not None}
        if not numbers and all(one.name != gate for one in self._found):
            return 0
        count: int = self._shape(gate)[0]
        if numbers != set(range(count)):
            wrong = sorted(numbers ^ set(range(count)))[0]
            what = f"lacks expert {wrong}: copy its file too" if wrong < count else f"has no expert {wrong}"
            raise WeightsMismatch(self._source, f"layer {layer}, whose gate knows {count} experts, {what}")
        return count

    def _width(self) -> int | None:
        for one in self._found:
            if one.joined == 0 and one.name.endswith("up_proj.bias"):
                ranks = sum(one.stored in names for names in self._states.names)
                is_split = self._experts_are_split or not ("experts" in one.name or "residual" in one.name)
                return self._states.shape(0, one.stored)[0] * (ranks if is_split else 1)
        return None

    def _residual(self) -> str | None:
        if not any(".residual." in one.name for one in self._found):
            return None
        if any(".coefficient." in one.name for one in self._found):
            return "softmax"
        what = "residual layers without a coefficient are those that sum, as in the paper"
        if self._arguments.need("residual", what, "add") != "add":
            raise TrainingUnsupported(self._source, "residual", "only `add` has no coefficient")
        return "add"

    def _converted(self, one: _PlacedTensor) -> Iterator[tuple[str, Tensor]]:
        parts = self._parts(one.stored)
        if one.is_qkv:
            yield from self._queries_keys_values(one, parts)
        elif one.joined is None or len(parts) == 1 or (one.is_of_expert and not self._experts_are_split):
            yield one.name, parts[0]
        else:
            yield one.name, torch.cat(parts, dim=one.joined)

    def _queries_keys_values(self, one: _PlacedTensor, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        version = self._arguments.number(
            "checkpoint_version", "in which order queries, keys and values lie; Megatron's is 3 today", 3
        )
        heads, left = divmod(self._heads, len(parts))
        if left or len(parts[0]) % (3 * heads):
            what = f"does not fit {one.stored}, of {len(parts)} x {len(parts[0])} rows"
            raise TrainingUnsupported(self._source, "num_attention_heads", what)
        split = [_by_kind(part, heads, version) for part in parts]
        for kind, name in enumerate("qkv"):
            yield one.name.replace("qkv", f"{name}_proj"), torch.cat([part[kind] for part in split])


def _by_kind(fused: Tensor, heads: int, version: float) -> Tensor:
    """(3, rows, ...): one rank's queries, keys and values, each head by head."""
    size, rest = len(fused) // (3 * heads), fused.shape[1:]
    if version < 1:
        by_kind = fused.view(3, heads, size, *rest)
    elif version < 2:
        by_kind = fused.view(heads, size, 3, *rest).movedim(2, 0)
    else:
        by_kind = fused.view(heads, 3, size, *rest).movedim(1, 0)
    return by_kind.reshape(3, heads * size, *rest)


def _place(stored: str) -> _PlacedTensor | None:
    """Name of a tensor in the directory; None where it is not known."""
    name = KNOWN_PREFIX.sub("", stored, count=1)
    for pattern, template in PLAIN.items():
        if (match := pattern.fullmatch(name)) is not None:
            return _PlacedTensor(stored, template.format(**match.groupdict()), _layer(match), None)
    for pattern, (template, dimension) in SPLIT.items():
        if (match := pattern.fullmatch(name)) is not None:
            return _PlacedTensor(stored, template.format(**match.groupdict()), _layer(match), dimension)
    if (match := QKV.fullmatch(name)) is not None:
        return _PlacedTensor(
            stored, f"model.layers.{match['layer']}.self_attn.qkv.{match['kind']}", _layer(match), 0, False, True
        )
    for pattern, within in ((DENSE, "mlp"), (RESIDUAL, "mlp.residual"), (EXPERT, "mlp.experts.{moe_expert}")):
        if (match := pattern.fullmatch(name)) is not None:
            return _of_mlp(stored, match, within.format(**match.groupdict()), is_of_expert=pattern is not DENSE)
    return None


def _of_mlp(stored: str, match: re.Match[str], within: str, *, is_of_expert: bool) -> _PlacedTensor:
    matrix = "up_proj" if match["up"] else "down_proj"
    joined = 0 if match["up"] else 1 if match["kind"] == "weight" else None
    name = f"model.layers.{match['layer']}.{within}.{matrix}.{match['kind']}"
    return _PlacedTensor(stored, name, _layer(match), joined, is_of_expert)


def _layer(match: re.Match[str]) -> int | None:
    number = match.groupdict().get("layer")
    return None if number is None else int(number)
