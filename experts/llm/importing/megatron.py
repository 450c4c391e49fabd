"""A GPT of Megatron-DeepSpeed, tensor by tensor, as a ``pr_moe`` directory (``experts.llm.files.config``).

Guarantees: facts that the tensors show (layers, widths, moe_experts of each layer, residual or not) are taken from
them, others from the trainer's arguments; an argument that these lack is requested by name. Nothing is guessed: an
unknown tensor, or an argument that would change the numbers, is refused by name.

Layout of the fused queries, keys and values by ``checkpoint_version``: Megatron-LM's own (0: by kind, then head; 1: by
head, then place in it, then kind; 2 and later: by head, then kind). Experts are DeepSpeed's
(``deepspeed_moe.experts.deepspeed_experts``), also behind ``mlp.moe``, where its inference looks for them; a residual
layer has an MLP beside them, and a coefficient with a bias.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from experts.errors import TrainingUnsupported, WeightsCorrupt, WeightsMismatch
from experts.llm.files.checkpoint import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

RANK_FILE = re.compile(r"mp_rank_(?P<rank>\d+)_model_states\.pt")
EXPERT_FILE = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(?P<rank>\d+)_model_states\.pt")
LAYER, KIND = r"layers\.(?P<layer>\d+)\.", r"(?P<kind>weight|bias)"
MOE = r"mlp\.(?:moe\.)?deepspeed_moe\."
MLPS = (  # dense, beside moe_experts, and a moe_expert
    ("mlp", "mlp"), (r"mlp\.(?:moe\.)?mlp", "mlp.residual"),
    (MOE + r"experts\.deepspeed_experts\.(?P<moe_expert>\d+)", "mlp.experts.{moe_expert}"),
)  # fmt: skip
TENSORS = [  # pattern, name in the directory, dimension that ranks split it along (tensor parallelism)
    (re.compile(pattern), name.replace("LAYER", "model.layers.{layer}"), joined)
    for pattern, name, joined in (
        (LAYER + r"input_layernorm\." + KIND, "LAYER.input_layernorm.{kind}", None),
        (LAYER + r"post_attention_layernorm\." + KIND, "LAYER.post_attention_layernorm.{kind}", None),
        (LAYER + r"(?:self_)?attention\.query_key_value\." + KIND, "LAYER.self_attn.qkv.{kind}", 0),
        (LAYER + r"(?:self_)?attention\.dense\.weight", "LAYER.self_attn.o_proj.weight", 1),
        (LAYER + r"(?:self_)?attention\.dense\.bias", "LAYER.self_attn.o_proj.bias", None),
        *((LAYER + mlp + r"\.dense_h_to_4h\." + KIND, f"LAYER.{name}.up_proj.{{kind}}", 0) for mlp, name in MLPS),
        *((LAYER + mlp + r"\.dense_4h_to_h\.weight", f"LAYER.{name}.down_proj.weight", 1) for mlp, name in MLPS),
        *((LAYER + mlp + r"\.dense_4h_to_h\.bias", f"LAYER.{name}.down_proj.bias", None) for mlp, name in MLPS),
        (LAYER + MOE + r"gate\.wg\.weight", "LAYER.mlp.gate.weight", None),
        (LAYER + r"mlp\.(?:moe\.)?coefficient\." + KIND, "LAYER.mlp.coefficient.{kind}", None),
        (r"final_layernorm\." + KIND, "model.norm.{kind}", None),
        (r"position_embeddings\.weight", "model.embed_positions.weight", None),
        (r"(?:embedding\.)?word_embeddings\.weight", "model.embed_tokens.weight", 0),
        (r"output_layer\.weight", "lm_head.weight", 0),
    )
]
NEEDLESS = re.compile(r"word_embeddings_for_head\.weight")  # the embedding again, where pipeline stages shared it
KNOWN_PREFIX = re.compile(r"(?:module\.)*(?:language_model\.)?(?:(?:encoder|transformer|embedding)\.)?")
REFUSED_ARGUMENTS = {
    "swiglu": "gated experts are not what its names say here",
    "squared_relu": "squared ReLU is not served",
    "apply_layernorm_1p": "norms stored less one are not imported",
    "apply_residual_connection_post_layernorm": "residuals behind the norm are not served",
    "use_rotary_position_embeddings": "rotary positions of Megatron are not imported",
}


class StateFiles:
    """Tensors of a checkpoint by model-parallel rank, one safetensors file per pickle. ``facts``: the trainer's."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        """Raises WeightsCorrupt for a tensor in two files."""
        self.facts: dict[str, Any] = {}
        held: dict[int, dict[str, Any]] = {}
        for file in files:
            opened: Any = safe_open(folder / f"{file.name}.safetensors", framework="pt")
            match = RANK_FILE.fullmatch(file.name)
            if match is not None:
                self.facts = json.loads((opened.metadata() or {})["args"]) | self.facts
            else:
                match = EXPERT_FILE.fullmatch(file.name)
            assert match is not None, "only such files are read"
            own = held.setdefault(int(match["rank"]), {})
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                if name in own:
                    raise WeightsCorrupt(str(file), f"{name} is in another file, too: remove one")
                own[name] = opened
        self._ranks = [held[rank] for rank in sorted(held)]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all ranks, each once."""
        return tuple(dict.fromkeys(name for rank in self._ranks for name in rank))

    def read(self, name: str) -> list[Tensor]:
        """The parts of a tensor: one for each rank that has it."""
        return [rank[name].get_tensor(name) for rank in self._ranks if name in rank]

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        return [tuple(rank[name].get_slice(name).get_shape()) for rank in self._ranks if name in rank]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The trainer's arguments. ``given`` at the import take precedence over ``stored``."""

    source: str
    stored: Mapping[str, Any]
    given: Mapping[str, Any]

    def get(self, name: str) -> Any:  # noqa: ANN401  JSON
        return self.given.get(name, self.stored.get(name))

    def need(self, name: str, what: str, example: object) -> Any:  # noqa: ANN401  JSON
        value = self.get(name)
        if value is None:
            raise TrainingUnsupported(
                self.source, name, f"is not in the checkpoint: {what} - give --arg {name}={example}"
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

    @property
    def is_of_expert(self) -> bool:
        return ".mlp.experts." in self.name or ".mlp.residual." in self.name


class GptCheckpoint:
    def __init__(self, source: str, states: StateFiles, arguments: Arguments) -> None:
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
        """Tensors of a layer by their names in the directory; with None, the tensors outside the layers."""
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
        places = {name: _place(name) for name in self._states.names if not NEEDLESS.search(name)}
        unknown = [name for name, place in places.items() if place is None]
        if unknown:
            raise WeightsMismatch(self._source, f"no tensors of a GPT by Megatron-DeepSpeed are {shown(unknown)}")
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
        parts = [] if first is None else self._states.read(first.stored)
        return any(not torch.equal(parts[0], part) for part in parts[1:])

    def _shape(self, name: str) -> tuple[int, ...]:
        for one in self._found:
            if one.name == name:
                shapes = self._states.shapes(one.stored)
                return (len(shapes) * shapes[0][0], *shapes[0][1:]) if one.joined == 0 else shapes[0]
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
            # the share of a single choice stays unchanged, shares of several sum to 1 (deepspeed/moe/sharded_moe.py)
            values |= {"num_experts_per_tok": per_token, "norm_topk_prob": per_token > 1}
        return values

    def _experts_of(self, layer: int) -> int:
        """Count of moe_experts that the layer's gate chooses from, all of them present. 0: no gate."""
        gate = f"model.layers.{layer}.mlp.gate.weight"
        names = [one.name.partition(".mlp.experts.")[2] for one in self._found if one.layer == layer]
        numbers = {int(name.partition(".")[0]) for name in names if name}
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
                shapes = self._states.shapes(one.stored)
                is_split = self._experts_are_split or not one.is_of_expert
                return shapes[0][0] * (len(shapes) if is_split else 1)
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
        parts = self._states.read(one.stored)
        if ".self_attn.qkv." in one.name:
            yield from self._queries_keys_values(one, parts)
        elif one.joined is None or len(parts) == 1 or (one.is_of_expert and not self._experts_are_split):
            yield one.name, parts[0]
        else:
            yield one.name, torch.cat(parts, dim=one.joined)

    def _queries_keys_values(self, one: _PlacedTensor, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        version = self._arguments.number(
            "checkpoint_version", "the order of queries, keys and values; Megatron's is 3 today", 3
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
    for pattern, template, joined in TENSORS:
        if (match := pattern.fullmatch(name)) is not None:
            found = match.groupdict()
            layer = int(found["layer"]) if "layer" in found else None
            return _PlacedTensor(stored, template.format(**found), layer, joined)
    return None
