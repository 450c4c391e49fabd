"""Architecture of a language model, read from the config.json of a Hugging Face directory.

Guarantees: every field that changes a model's numbers is either read or refused by name (ModelUnsupported), so a model
is never run as a similar one. Differences among families are resolved here: the forward pass reads an ArchSpec,
independent of the family. Families: Llama, Mistral, Phi-3, Qwen2, Qwen3, Gemma 2 and 3 (texts), Mixtral, Qwen2-MoE,
Qwen3-MoE, OLMoE, and ``pr_moe``: a Llama-like backbone with the pyramid-residual layers of DeepSpeed-MoE (section 4.1),
whose keys are

    num_experts           experts of each layer, as a list, 0 = dense (pyramid); or one number for all layers
    num_experts_per_tok   number of them for each token
    norm_topk_prob        whether the weights of those sum to 1
    residual              "add": MLP and experts are summed, as in the paper; "softmax": weighed by a learned
                          coefficient, as in DeepSpeed's code; null: no residual MLP
    mlp                   "swiglu", or "gelu": two matrices, as in the paper; "gelu_tanh": GELU by its approximation
                          with tanh, as Megatron fuses it
    mlp_bias              whether MLPs and experts have biases; true unless said otherwise
    moe_intermediate_size the experts' width; intermediate_size unless said otherwise
    norm                  "rmsnorm" with rms_norm_eps, as Llama; or "layernorm", with biases and layer_norm_eps, as GPT
    positions             "rotary", as Llama; or "learned", an embedding of its own, as GPT
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from experts.errors import ExpertError, ModelUnsupported, WeightsCorrupt, WeightsMismatch, WeightsMissing
from experts.llm.gguf.header import is_gguf
from experts.llm.gguf.program import gguf_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

CONFIG_NAME = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja",
)  # fmt: skip
FULL_ATTENTION, WINDOWED_ATTENTION = "full_attention", "sliding_attention"
MODULES, POOLING = "modules.json", "1_Pooling/config.json"  # of sentence-transformers

Word = TypeVar("Word", bound=StrEnum)


class ConfigFamily(StrEnum):
    """``model_type`` of a directory: it decides names of tensors and defaults."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    PHI3 = "phi3"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3_text"
    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2_moe"
    QWEN3_MOE = "qwen3_moe"
    OLMOE = "olmoe"
    PR_MOE = "pr_moe"


class Mlp(StrEnum):
    """A feed-forward network's form: gated with SiLU or GELU, or two matrices around GELU, exact or approximated."""

    SWIGLU = "swiglu"
    GEGLU_TANH = "geglu_tanh"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"

    @property
    def is_gated(self) -> bool:
        return self in (Mlp.SWIGLU, Mlp.GEGLU_TANH)


class Norm(StrEnum):
    """Normalisation of tokens: by root mean square (Llama), or by mean and deviation, with a bias (GPT).

    ``RMS_ABOVE_ONE``: by root mean square, with weights stored less one, in fp32 (Gemma).
    """

    RMS = "rmsnorm"
    RMS_ABOVE_ONE = "rmsnorm_above_one"
    LAYER = "layernorm"


class Positions(StrEnum):
    """Encoding of positions: queries and keys are rotated (Llama), or an embedding is added (GPT)."""

    ROTARY = "rotary"
    LEARNED = "learned"


class QkNorm(StrEnum):
    """Scope in which queries and keys are normalised: each head (Qwen3), or all heads together (OLMoE)."""

    HEAD = "head"
    WHOLE = "whole"


class Residual(StrEnum):
    """Combination of MLP and moe_experts in a residual layer: DeepSpeed-MoE section 4.1.1, or DeepSpeed's code."""

    ADD = "add"
    SOFTMAX = "softmax"


class RopeKind(StrEnum):
    """Scaling of rotary frequencies for contexts longer than those of training."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


HAS_MLP_BIAS = {ConfigFamily.PR_MOE: True, ConfigFamily.LLAMA: False}  # defaults of config.json
QK_NORMS = {
    ConfigFamily.QWEN3: QkNorm.HEAD, ConfigFamily.QWEN3_MOE: QkNorm.HEAD, ConfigFamily.GEMMA3: QkNorm.HEAD,
    ConfigFamily.OLMOE: QkNorm.WHOLE,
}  # fmt: skip
GEMMA = {ConfigFamily.GEMMA2, ConfigFamily.GEMMA3}
DENSE = {ConfigFamily.LLAMA, ConfigFamily.MISTRAL, ConfigFamily.PHI3, ConfigFamily.QWEN2, ConfigFamily.QWEN3, *GEMMA}
WINDOWED_THROUGHOUT = {
    ConfigFamily.MISTRAL,
    ConfigFamily.PHI3,
    ConfigFamily.MIXTRAL,
}  # where ``sliding_window`` is a number
WITHOUT_OUTPUT_BIAS = {ConfigFamily.QWEN2, ConfigFamily.QWEN2_MOE, *WINDOWED_THROUGHOUT}
WINDOWED_FROM_A_LAYER = {ConfigFamily.QWEN2, ConfigFamily.QWEN3}  # ``max_window_layers``, if ``use_sliding_window``
IMAGES_TOO = "gemma3"  # a model of texts and images
ABSENT: Mapping[str, Mapping[str, Any]] = {  # fields that published files leave out, as transformers has them
    ConfigFamily.GEMMA2: {
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    },
    ConfigFamily.GEMMA3: {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    },
}  # fmt: skip


class Quantiser(StrEnum):
    """``quant_method`` of a directory whose matrices have four bits."""

    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions; fields other than ``factor`` are read by some kinds only."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0  # stretches the ``trained_positions``
    trained_positions: int = 0
    slow_turns: float = 1.0  # within the trained positions, of frequencies that are stretched
    fast_turns: float = 1.0  # and of unchanged ones; blended in between
    is_ramp_rounded: bool = True
    magnitude: float = 1.0  # scales cosine and sine
    divisors: tuple[float, ...] = ()  # of the frequencies, one for each (LongRoPE)
    head_share: float = 1.0  # first part of each head, which is rotated


@dataclass(frozen=True, slots=True)
class MoeSpec:
    moe_experts: int
    per_token: int
    size: int
    is_normalised: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Feed-forward part of one layer, and what of attention differs between layers."""

    mlp_size: int  # with ``moe``, of the MLP beside it, behind a sigmoid gate or joined as ``residual`` says; 0: none
    moe: MoeSpec | None = None
    residual: Residual | None = None
    window: int | None = None  # last positions that a token attends to, its own included; None: all
    has_local_rope: bool = False

    @property
    def moe_experts(self) -> int:
        """0 for a dense layer."""
        return 0 if self.moe is None else self.moe.moe_experts

    @property
    def attention_kind(self) -> str:
        """As ``layer_types`` name it."""
        return FULL_ATTENTION if self.window is None and not self.has_local_rope else WINDOWED_ATTENTION

    @property
    def has_shared_expert(self) -> bool:
        return self.moe is not None and self.mlp_size > 0 and self.residual is None  # Qwen2-MoE's


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """Decides which tensors a model has and what is computed from them. Sizes in elements."""

    family: ConfigFamily
    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    max_positions: int
    norm_epsilon: float
    rope: RopeSpec | None  # None: positions are learned, one vector for each of ``max_positions``
    layers: tuple[LayerSpec, ...]
    local_rope: RopeSpec | None = None  # of layers that say so
    mlp: Mlp = Mlp.SWIGLU
    norm: Norm = Norm.RMS
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    qkv_limit: float | None = None
    is_tied: bool = False
    has_output_norms: bool = False  # behind attention, and behind the feed-forward part
    embedding_scale: float | None = None
    score_scale: float | None = None  # of attention; None: the root of the head size divides scores
    score_cap: float | None = None  # attention scores and logits stay below theirs, by tanh
    logit_cap: float | None = None

    @property
    def is_attention_plain(self) -> bool:
        """Every token attends to all positions before it, by scores that the root of the head size divides."""
        has_window = any(layer.window is not None for layer in self.layers)
        return self.score_scale is None and self.score_cap is None and not has_window

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * len(self.layers) * self.kv_size * itemsize


def read_spec(directory: Path, expert: str) -> ArchSpec:
    """The spec of a Hugging Face directory, or of a GGUF file.

    Raises WeightsMissing, WeightsCorrupt if config.json is no JSON object, ModelUnsupported with the field or key,
    WeightsMismatch for a GGUF file without a key that it needs.
    """
    if is_gguf(directory):
        content = gguf_config(directory, expert)
        try:
            return parse_config(content, expert, str(directory))
        except ModelUnsupported as error:
            raise WeightsMismatch(expert, f"{directory}: its metadata, as {error.message}") from error
    path = directory / CONFIG_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise WeightsMissing(expert, f"{path} is not there: name a Hugging Face model directory") from error
    except OSError as error:
        raise WeightsCorrupt(expert, f"{path} cannot be read as JSON: {error}") from error
    return parse_config(content, expert, str(path))


def stored_dtype(directory: Path) -> str | None:
    """Torch's name of the dtype in a directory's config.json, or of a GGUF file; None where it has none."""
    try:
        content = gguf_config(directory, "") if is_gguf(directory) else (directory / CONFIG_NAME).read_bytes()
        values = json.loads(content)
    except (OSError, ValueError, ExpertError):  # packing reports the reason
        return None
    named = (values.get("dtype") or values.get("torch_dtype")) if isinstance(values, dict) else None
    return named if isinstance(named, str) else None


def parse_config(content: bytes, expert: str, origin: str) -> ArchSpec:
    """Read the spec from the bytes of a config.json; ``origin``: its name in errors."""
    try:
        values = json.loads(content)
    except ValueError as error:
        raise WeightsCorrupt(expert, f"{origin} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise WeightsCorrupt(expert, f"{origin} holds no JSON object: name a Hugging Face model directory")
    return parse_spec(values, expert)


def text_values(values: Mapping[str, Any], expert: str) -> Mapping[str, Any]:
    """Values for the language model, which Gemma 3 may have beside one for images, with fields that files leave out.

    Raises ModelUnsupported.
    """
    if values.get("model_type") == IMAGES_TOO:
        own = _Fields(values, expert).below("text_config").values
        values = {**values, **own, "model_type": ConfigFamily.GEMMA3.value}
    return {**ABSENT.get(str(values.get("model_type")), {}), **values}


def parse_spec(values: Mapping[str, Any], expert: str) -> ArchSpec:
    """Read the spec from a config.json's values. Raises ModelUnsupported naming the field."""
    fields = _Fields(text_values(values, expert), expert)
    family = fields.choice("model_type", ConfigFamily)
    _refuse_unserved(fields, family)
    hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_size = fields.integer("head_dim", 128 if family is ConfigFamily.QWEN3 else hidden_size // heads)
    norm, mlp, positions = Norm.RMS, Mlp.SWIGLU, Positions.ROTARY
    if family is ConfigFamily.PR_MOE:
        norm, mlp = fields.choice("norm", Norm, norm), fields.choice("mlp", Mlp)
        positions = fields.choice("positions", Positions, positions)
    rope, local_rope = (None, None) if positions is Positions.LEARNED else _ropes(fields, family)
    spec = ArchSpec(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_size=head_size,
        max_positions=context_tokens(fields.values, expert),
        norm_epsilon=fields.number("rms_norm_eps" if norm is Norm.RMS else "layer_norm_eps"),
        rope=rope,
        local_rope=local_rope,
        layers=_with_windows(_layers(fields, family), fields, family),
        mlp=mlp,
        norm=norm,
        has_qkv_bias=_has_qkv_bias(fields, family),
        has_output_bias=family not in WITHOUT_OUTPUT_BIAS and fields.flag("attention_bias", False),
        has_mlp_bias=family in HAS_MLP_BIAS and fields.flag("mlp_bias", HAS_MLP_BIAS[family]),
        qk_norm=QK_NORMS.get(family),
        qkv_limit=fields.optional_number("clip_qkv") if family is ConfigFamily.OLMOE else None,
        is_tied=fields.flag("tie_word_embeddings", False),
    )
    if spec.heads % spec.kv_heads:
        raise fields.refused("num_key_value_heads", f"{heads} heads are no multiple of it")
    if spec.rope is not None:
        _require_pairs(fields, spec.rope, head_size)
    return _as_gemma(spec, fields) if family in GEMMA else spec


def _require_pairs(fields: _Fields, rope: RopeSpec, head_size: int) -> None:
    size = int(head_size * rope.head_share)
    if size % 2 or not 0 < size <= head_size:
        raise fields.refused("head_dim", f"is {head_size}, {size} of it rotated: an even number is needed")
    if rope.divisors and len(rope.divisors) != size // 2:
        raise _scaling(fields).refused("short_factor", f"has {len(rope.divisors)} numbers for {size // 2} frequencies")


def _as_gemma(spec: ArchSpec, fields: _Fields) -> ArchSpec:
    score_cap = fields.optional_number("attn_logit_softcapping")
    if score_cap is not None and spec.family is ConfigFamily.GEMMA3:
        raise fields.refused("attn_logit_softcapping", f"is {score_cap}: Gemma 3 has none")
    return replace(
        spec,
        mlp=Mlp.GEGLU_TANH,
        norm=Norm.RMS_ABOVE_ONE,
        has_output_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        score_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        score_cap=score_cap,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def _refuse_unserved(fields: _Fields, family: ConfigFamily) -> None:
    if family in GEMMA:
        fields.expect("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        fields.expect("use_bidirectional_attention", (False,), False)
    elif family is not ConfigFamily.PR_MOE:
        fields.expect("hidden_act", ("silu", "swish"), "silu")
        fields.expect("attention_bias", (False,) if family is ConfigFamily.PHI3 else (False, True), False)
    _quantiser(fields)
    if family is not ConfigFamily.PHI3:
        fields.expect("partial_rotary_factor", (1.0,), 1.0)
        _scaling(fields).expect("partial_rotary_factor", (1.0,), 1.0)


def stored_quantiser(directory: Path, expert: str) -> tuple[Quantiser, int] | None:
    """Who made a directory's matrices of four bits, and what is added to stored zero points; None: nobody."""
    return _quantiser(_Fields(json.loads((directory / CONFIG_NAME).read_bytes()), expert))


def _quantiser(fields: _Fields) -> tuple[Quantiser, int] | None:
    if fields.get("quantization_config") is None:
        return None
    below = fields.below("quantization_config")
    quantiser = below.choice("quant_method", Quantiser)
    if below.integer("bits") != 4:
        raise below.refused("bits", f"is {below.integer('bits')}: 4 is served")
    if quantiser is Quantiser.AWQ:
        below.expect("version", ("gemm", "GEMM"), "gemm")
        below.expect("format", ("gemm",), "gemm")
        below.expect("zero_point", (True,), True)
        return quantiser, 0
    below.expect("dynamic", ({},), {})
    name = "checkpoint_format" if below.get("format") is None else "format"
    below.expect(name, ("gptq", "gptq_v2"), "gptq")
    return quantiser, 0 if below.get(name) == "gptq_v2" else 1


def _with_windows(layers: tuple[LayerSpec, ...], fields: _Fields, family: ConfigFamily) -> tuple[LayerSpec, ...]:
    """The layers with their windows; a window as wide as the context is none."""
    are_windowed = _are_windowed(fields, family, len(layers))
    if not any(are_windowed):
        return layers
    given, context = fields.integer("sliding_window"), context_tokens(fields.values, fields.expert)
    window, is_local = given if given < context else None, family is ConfigFamily.GEMMA3
    pairs = zip(layers, are_windowed, strict=True)
    return tuple(
        replace(layer, window=window, has_local_rope=is_local) if is_windowed else layer for layer, is_windowed in pairs
    )


def _are_windowed(fields: _Fields, family: ConfigFamily, count: int) -> tuple[bool, ...]:
    """By layer, whether attention is within ``sliding_window``: where transformers reads it for this family."""
    if family in WINDOWED_THROUGHOUT:
        are_windowed = (fields.get("sliding_window") is not None,) * count
    elif family in GEMMA:
        step = 2 if family is ConfigFamily.GEMMA2 else fields.integer("sliding_window_pattern", 6)
        are_windowed = tuple((number + 1) % step > 0 for number in range(count))
    elif fields.flag("use_sliding_window", False):
        if family not in WINDOWED_FROM_A_LAYER:
            raise fields.refused("use_sliding_window", "which layers have a window differs between libraries")
        first = 0 if fields.get("max_window_layers") == 0 else fields.integer("max_window_layers", 28)
        are_windowed = tuple(number >= first for number in range(count))
    else:
        are_windowed = (False,) * count
    named = fields.get("layer_types")
    if named is None:
        return are_windowed
    kinds = {FULL_ATTENTION: False, WINDOWED_ATTENTION: True}
    if not isinstance(named, list) or len(named) != count or not {str(kind) for kind in named} <= kinds.keys():
        raise fields.refused("layer_types", f"{named!r} is not served: {' or '.join(kinds)} for each of {count} layers")
    are_named = tuple(kinds[kind] for kind in named)
    is_free = family in GEMMA or (family in WINDOWED_FROM_A_LAYER and fields.flag("use_sliding_window", False))
    if are_named != are_windowed and not is_free:
        raise fields.refused("layer_types", "contradicts sliding_window and use_sliding_window: correct the wrong one")
    return are_named


def _has_qkv_bias(fields: _Fields, family: ConfigFamily) -> bool:
    if family is ConfigFamily.QWEN2:
        return True
    if family is ConfigFamily.QWEN2_MOE:
        return fields.flag("qkv_bias", True)
    return family not in WINDOWED_THROUGHOUT and fields.flag("attention_bias", False)


def _layers(fields: _Fields, family: ConfigFamily) -> tuple[LayerSpec, ...]:
    count = fields.integer("num_hidden_layers")
    if family in DENSE:
        return (LayerSpec(fields.integer("intermediate_size")),) * count
    if family in {ConfigFamily.MIXTRAL, ConfigFamily.OLMOE}:
        is_normalised = family is ConfigFamily.MIXTRAL or fields.flag("norm_topk_prob")
        return (LayerSpec(0, _moe(fields, "intermediate_size", is_normalised)),) * count
    if family is ConfigFamily.PR_MOE:
        return _pyramid(fields, count)
    return _every_nth(fields, family, count)


def _moe(fields: _Fields, size_field: str, is_normalised: bool) -> MoeSpec:
    name = "num_local_experts" if fields.get("num_local_experts") is not None else "num_experts"
    spec = MoeSpec(
        fields.integer(name), fields.integer("num_experts_per_tok"), fields.integer(size_field), is_normalised
    )
    if spec.per_token > spec.moe_experts:
        raise fields.refused("num_experts_per_tok", f"is {spec.per_token}, of {spec.moe_experts} experts")
    return spec


def _every_nth(fields: _Fields, family: ConfigFamily, count: int) -> tuple[LayerSpec, ...]:
    """Qwen's MoE families: every nth layer has moe_experts, unless its number is listed; the others are dense."""
    step = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.integers("mlp_only_layers", ())
    shared_size = fields.integer("shared_expert_intermediate_size") if family is ConfigFamily.QWEN2_MOE else 0
    dense = LayerSpec(fields.integer("intermediate_size"))
    sparse = LayerSpec(shared_size, _moe(fields, "moe_intermediate_size", fields.flag("norm_topk_prob")))
    return tuple(dense if (n + 1) % step or n in dense_layers else sparse for n in range(count))


def _pyramid(fields: _Fields, count: int) -> tuple[LayerSpec, ...]:
    """DeepSpeed-MoE section 4.1.2: deeper layers have more experts; residual ones have an MLP beside them."""
    size = fields.integer("intermediate_size")
    expert_size = fields.integer("moe_intermediate_size", size)
    is_pyramid = isinstance(fields.get("num_experts"), list)
    experts = fields.integers("num_experts") if is_pyramid else (fields.integer("num_experts", 0),) * count
    if len(experts) != count:
        raise fields.refused("num_experts", f"names {len(experts)} layers, num_hidden_layers {count}")
    if "residual" not in fields.values:
        raise fields.refused("residual", 'is missing: say "add", "softmax" or null, as the model was trained')
    residual = None if fields.get("residual") is None else fields.choice("residual", Residual)
    if not any(experts):
        return (LayerSpec(size),) * count
    per_token, is_normalised = fields.integer("num_experts_per_tok"), fields.flag("norm_topk_prob")
    few = min(number for number in experts if number)
    if per_token > few:
        raise fields.refused("num_experts_per_tok", f"is {per_token}, and a layer has {few} experts")
    beside = size if residual else 0
    return tuple(
        LayerSpec(beside, MoeSpec(number, per_token, expert_size, is_normalised), residual)
        if number
        else LayerSpec(size)
        for number in experts
    )


def _ropes(fields: _Fields, family: ConfigFamily) -> tuple[RopeSpec, RopeSpec | None]:
    """Of all layers, or of the global and the local ones.

    Transformers 5 stores base and scaling in ``rope_parameters``; older ones the base beside ``rope_scaling``.
    """
    scaling, usual_theta = _scaling(fields), 1e6 if family is ConfigFamily.MIXTRAL else 1e4
    theta = fields.number("rope_theta", usual_theta)
    if family is not ConfigFamily.GEMMA3:
        return _rope(fields, scaling, theta), None
    local = scaling.below(WINDOWED_ATTENTION)
    if fields.get("rope_parameters") is not None:
        scaling = scaling.below(FULL_ATTENTION)
    return _rope(fields, scaling, theta), _rope(fields, local, fields.number("rope_local_base_freq", 1e4))


def _rope(fields: _Fields, scaling: _Fields, usual_theta: float) -> RopeSpec:
    share = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    theta = scaling.number("rope_theta", usual_theta)
    kind = RopeKind.DEFAULT if scaling.get("rope_type") is None else scaling.choice("rope_type", RopeKind)
    if kind is RopeKind.DEFAULT:
        return RopeSpec(theta, head_share=share)
    if kind is RopeKind.LONGROPE:
        return _longrope(fields, scaling, theta, share)
    factor = scaling.number("factor")
    if kind is RopeKind.LINEAR:
        return RopeSpec(theta, kind, factor)
    trained = scaling.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
    if kind is RopeKind.LLAMA3:
        slow, fast = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        return RopeSpec(theta, kind, factor, trained, slow, fast)
    slow, fast = scaling.number("beta_slow", 1.0), scaling.number("beta_fast", 32.0)
    is_rounded = scaling.flag("truncate", True)
    return RopeSpec(theta, kind, factor, trained, slow, fast, is_rounded, _yarn_magnitude(scaling, factor))


def _longrope(fields: _Fields, scaling: _Fields, theta: float, share: float) -> RopeSpec:
    """LongRoPE (arXiv 2402.13753) within the trained positions. Beyond them all keys would be rotated anew."""
    divisors = scaling.get("short_factor")
    if not isinstance(divisors, list | tuple) or not all(_is_number(one) and one > 0 for one in divisors):
        raise scaling.refused("short_factor", f"is {divisors!r}: a list of numbers above 0 is needed")
    trained, most = _trained_positions(fields, scaling), fields.integer("max_position_embeddings")
    factor = scaling.number("factor", most / trained)
    usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    magnitude = scaling.number("attention_factor", usual)
    return RopeSpec(theta, RopeKind.LONGROPE, magnitude=magnitude, divisors=tuple(divisors), head_share=share)


def _trained_positions(fields: _Fields, scaling: _Fields) -> int:
    name = "original_max_position_embeddings"
    return scaling.integer(name, fields.integer(name, fields.integer("max_position_embeddings")))


def _scaling(fields: _Fields) -> _Fields:
    key = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    scaling = fields.below(key)
    kind = scaling.get("type") if scaling.get("rope_type") is None else scaling.get("rope_type")
    if fields.get("model_type") == ConfigFamily.PHI3 and kind in ("su", "yarn"):
        kind = RopeKind.LONGROPE.value  # its names in older files
    return _Fields({**scaling.values, "rope_type": kind}, fields.expert, scaling.prefix)


def context_tokens(values: Mapping[str, Any], expert: str) -> int:
    """Context of a config.json. Some leave max_position_embeddings as trained, and extend it by YaRN's factor.

    LongRoPE's is the trained one: a longer text would have other frequencies from its first token on.

    Raises ModelUnsupported.
    """
    fields = _Fields(text_values(values, expert), expert)
    scaling, most = _scaling(fields), fields.integer("max_position_embeddings")
    if scaling.get("rope_type") == RopeKind.LONGROPE:
        return min(most, _trained_positions(fields, scaling))
    if scaling.get("rope_type") != RopeKind.YARN:
        return most
    return max(most, round(scaling.number("factor") * scaling.integer("original_max_position_embeddings", most)))


def _yarn_magnitude(scaling: _Fields, factor: float) -> float:
    """YaRN (arXiv 2309.00071), equation 22, in the form that DeepSeek's checkpoints generalised it to."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.optional_number("attention_factor")
    one, all_dimensions = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
    if given is not None:
        return given
    return magnitude(one) / magnitude(all_dimensions) if one and all_dimensions else magnitude(1.0)


@dataclass(frozen=True, slots=True)
class _Fields:
    """JSON object with typed reads. A missing field, or one of another type, is refused by name."""

    values: Mapping[str, Any]
    expert: str
    prefix: str = ""

    def refused(self, name: str, message: str) -> ModelUnsupported:
        return ModelUnsupported(self.expert, f"{self.prefix}{name}", message)

    def get(self, name: str) -> Any:  # noqa: ANN401  JSON
        return self.values.get(name)

    def below(self, name: str) -> _Fields:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refused(name, f"is {value!r}: an object is needed")
        return _Fields(value or {}, self.expert, f"{self.prefix}{name}.")

    def integer(self, name: str, default: int | None = None) -> int:
        least = 0 if default == 0 else 1
        return int(self._take(name, default, "a whole number", lambda value: _is_integer(value) and value >= least))

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self._take(
            name, default, "a list of whole numbers",
            lambda value: isinstance(value, list | tuple) and all(_is_integer(one) and one >= 0 for one in value),
        )  # fmt: skip
        return tuple(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._take(name, default, "a number above 0", lambda value: _is_number(value) and value > 0)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        return bool(self._take(name, default, "true or false", lambda value: isinstance(value, bool)))

    def choice(self, name: str, kind: type[Word], default: Word | None = None) -> Word:
        value = self._take(name, default, "a word", lambda value: isinstance(value, str))
        if value not in list(kind):
            raise self.refused(name, f"{value!r} is not served: one of {', '.join(kind)} is needed")
        return kind(value)

    def expect(self, name: str, served: tuple[Any, ...], default: object) -> None:
        value = self.values.get(name, default)
        if value is not None and value not in served:
            raise self.refused(name, f"{value!r} is not served: {served[0]!r} is needed")

    def _take(self, name: str, default: Any, wanted: str, fits: Callable[[Any], bool]) -> Any:  # noqa: ANN401  JSON
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None or not fits(value):
            raise self.refused(name, f"is {value!r}: {wanted} is needed" if value is not None else "is missing")
        return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_integer(value)
