"""The config.json that a GGUF file's metadata stands for.

Guarantees: each key below the file's architecture is translated, or known to have no effect with its value, or refused
by name (ModelUnsupported): what llama.cpp would compute and this runtime would not is never left out.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from experts.errors import ModelUnsupported, WeightsCorrupt
from experts.llm.gguf.header import stored_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experts.llm.gguf.header import Header, PlacedTensor

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # LongRoPE's
MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3",
}  # fmt: skip
FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "attention.clamp_kqv": "clip_qkv", "vocab_size": "vocab_size",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_norm": "norm_topk_prob",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "rope.freq_base": "rope_theta",
}  # fmt: skip
WINDOW = {"attention.sliding_window": "sliding_window"}
OF_FAMILY: Mapping[str, Mapping[str, str]] = {
    "gemma2": {
        **WINDOW, "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3_text": {
        **WINDOW, "attention.sliding_window_pattern": "sliding_window_pattern",
        "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq",
    },
    "phi3": {**WINDOW, "rope.dimension_count": "rotated", "rope.scaling.attn_factor": "attention_factor"},
}  # fmt: skip
LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}  # its layers: llama.cpp scales its scores by another size
SCALING = {
    "rope.scaling.type": "rope_type", "rope.scaling.factor": "factor", "rope.scale_linear": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor", "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}  # fmt: skip
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {  # with these values
    "attention.causal": (True,), "attention.scale": (0.0,), "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,), "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0), "logit_scale": (0.0, 1.0), "use_parallel_residual": (False,),
    "expert_gating_func": (0, 1), "expert_weights_scale": (0.0, 1.0), "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1), "leading_dense_block_count": (0,), "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1.0,), "rope.scaling.finetuned": (False, True), "pooling_type": (0,),
    "rope.scaling.yarn_ext_factor": (1.0,), "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
}  # fmt: skip
NORMALISED = {"qwen2_moe": False, "qwen3_moe": True, "olmoe": False}  # as llama.cpp computes them
TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OF_BLOCKS = "bfloat16"  # rounds by less than what the blocks' quantisation lost
MOE_EXPERTS_MAXIMUM = 4096
LISTS = {
    "tokenizer.ggml.tokens": str, "tokenizer.ggml.merges": str, "tokenizer.ggml.scores": float,
    "tokenizer.ggml.token_type": int, "tokenizer.ggml.eos_token_ids": int,
}  # fmt: skip
TEXTS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")
LLAMA3_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_POSITIONS = 8192
LLAMA3_TOLERANCE = 1e-4


def config_of(header: Header, expert: str) -> dict[str, Any]:
    """Values of a config.json. Raises ModelUnsupported with the key, WeightsCorrupt."""
    _require_types(header, expert)
    family = _family(header, expert)
    prefix = f"{header.metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    own = {key: _single(value) for key, value in own.items()}
    config: dict[str, Any] = {"model_type": family, "vocab_size": len(header.metadata.get("tokenizer.ggml.tokens", ()))}
    fields = {**FIELDS, **OF_FAMILY.get(family, {})}
    config |= {fields[key]: value for key, value in own.items() if key in fields}
    if family == "llama" and config.get("num_experts"):
        config |= {"model_type": "mixtral", "num_local_experts": config.pop("num_experts")}
    elif family in NORMALISED:
        config.setdefault("norm_topk_prob", NORMALISED[family])
    _require_bounds(header, expert, config)
    config.setdefault("head_dim", _quotient(config.get("hidden_size"), config.get("num_attention_heads")))
    _refuse_effects(header, expert, {key: value for key, value in own.items() if key not in fields}, config)
    config["rope_parameters"] = _rope(header, expert, own, config)
    if family in LARGEST_GEMMA:
        parts = _quotient(config.get("hidden_size"), config.get("num_attention_heads"))
        is_largest = config.get("num_hidden_layers") == LARGEST_GEMMA[family]
        config["query_pre_attn_scalar"] = parts if is_largest else config["head_dim"]
    if family == "gemma3_text":
        config["rope_parameters"] = {"full_attention": config["rope_parameters"]}
    if family == "phi3" and config.get("sliding_window") == 0:
        del config["sliding_window"]
    return config | _of_tensors(header) | _token_ids(header)


def _require_types(header: Header, expert: str) -> None:
    for key, value in header.metadata.items():
        is_list = isinstance(value, tuple) and all(isinstance(item, LISTS.get(key, object)) for item in value)
        if (key in LISTS and not is_list) or (key in TEXTS and not isinstance(value, str)):
            raise WeightsCorrupt(expert, f"{header.path}: {key} has values of another type than it has everywhere")


def _family(header: Header, expert: str) -> str:
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise _refused(
            header, expert, "general.architecture", f"{architecture!r} is not served: {', '.join(MODEL_TYPES)} are"
        )
    if metadata.get("general.type", "model") != "model":
        raise _refused(header, expert, "general.type", f"is {metadata['general.type']!r}: give a whole model")
    if metadata.get("split.count", 1) not in (0, 1):
        raise _refused(header, expert, "split.count", "the file is one of several: join them with llama-gguf-split")
    return MODEL_TYPES[architecture]


def _single(value: Any) -> Any:  # noqa: ANN401  of any type
    """The value of all layers, if they have one and the same."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _quotient(whole: object, count: object) -> int | None:
    return whole // count if isinstance(whole, int) and isinstance(count, int) and count > 0 else None


def _require_bounds(header: Header, expert: str, config: Mapping[str, Any]) -> None:
    """Raises WeightsCorrupt for numbers that its tensors contradict: a spec is built layer by layer."""
    layers, moe_experts = config.get("num_hidden_layers"), config.get("num_local_experts", config.get("num_experts"))
    if isinstance(layers, int) and layers > len(header.tensors):
        raise WeightsCorrupt(expert, f"{header.path} has {len(header.tensors)} tensors, and block_count is {layers}")
    tokens, rows = len(header.metadata.get("tokenizer.ggml.tokens", ())), config["vocab_size"]
    if isinstance(rows, int) and tokens > rows:
        raise WeightsCorrupt(expert, f"{header.path} has {tokens} tokens, and vocab_size is {rows}")
    if isinstance(moe_experts, int) and moe_experts > MOE_EXPERTS_MAXIMUM:
        raise _refused(header, expert, "expert_count", f"is {moe_experts}: at most {MOE_EXPERTS_MAXIMUM} are served")


def _refuse_effects(header: Header, expert: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    head_size = config["head_dim"]
    same = {"rope.dimension_count": (head_size,), "attention.value_length": (head_size,)}
    known = {**WITHOUT_EFFECT, **same}
    for key, value in own.items():
        if key in SCALING or (key in known and value in known[key]):
            continue
        if key == "expert_shared_count" or (key == "attention.sliding_window" and _covers(value, config)):
            continue  # the shared experts' width is what counts; a window as wide as the context hides nothing
        raise _refused(header, expert, key, f"is {value!r}: the runtime has no such computation")


def _covers(window: object, config: Mapping[str, Any]) -> bool:
    context = config.get("max_position_embeddings")
    return isinstance(window, int) and isinstance(context, int) and window >= context


def _rope(header: Header, expert: str, own: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {SCALING[key]: value for key, value in own.items() if key in SCALING}
    theta = config.pop("rope_theta", 10000.0)
    factors, short = header.tensors.get(ROPE_FACTORS), header.tensors.get(SHORT_FACTORS)
    rotated, head_size = config.pop("rotated", None), config["head_dim"]
    share = rotated / head_size if isinstance(rotated, int) and isinstance(head_size, int) and head_size else 1.0
    if short is not None:
        stored = stored_bytes(header.path, expert, short.start, short.size_bytes, SHORT_FACTORS)
        if short.format.name != "F32":
            raise WeightsCorrupt(expert, f"{header.path}: {SHORT_FACTORS} cannot be {short.format.name}")
        found |= {"rope_type": "longrope", "short_factor": struct.unpack(f"<{len(stored) // 4}f", stored)}
        found |= {"attention_factor": config.pop("attention_factor", 1.0), "partial_rotary_factor": share}
        return {**found, "rope_theta": theta}
    kind = found.get("rope_type", "linear" if found.get("factor", 1.0) not in (0.0, 1.0) else "none")
    if factors is not None and kind == "none":
        return {"rope_theta": theta, **_llama3(header, expert, factors, found, config, theta)}
    if factors is not None or kind not in ("none", "linear", "yarn"):
        raise _refused(header, expert, "rope.scaling.type", f"{kind!r} is not served with these tensors")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
    return {**found, "rope_type": kind, "rope_theta": theta}


def _llama3(
    header: Header, expert: str, tensor: PlacedTensor, found: Mapping[str, Any], config: Mapping[str, Any], theta: float
) -> dict[str, Any]:
    """Llama 3's scaling, by the divisors of the frequencies. The file has no other trace of its parameters."""
    head_size, positions = config["head_dim"], found.get("original_max_position_embeddings", LLAMA3_POSITIONS)
    is_whole = isinstance(head_size, int) and tensor.format.name == "F32" and (2 * math.prod(tensor.shape) == head_size)
    if not is_whole or not all(isinstance(each, int | float) and each > 0 for each in (theta, positions)):
        said = f"{tensor.format.name} {tensor.shape}, from {positions} positions and the base {theta}"
        raise WeightsCorrupt(expert, f"{header.path}: {ROPE_FACTORS} cannot be {said}, for heads of {head_size}")
    stored = stored_bytes(header.path, expert, tensor.start, tensor.size_bytes, ROPE_FACTORS)
    divisors = struct.unpack(f"<{len(stored) // 4}f", stored)
    low, high = LLAMA3_TURNS.values()
    for divisor, number in zip(divisors, range(0, head_size, 2), strict=True):
        turns = positions / (2 * math.pi * float(theta) ** (number / head_size))
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        wanted = 1 / ((1 - blend) / divisors[-1] + blend) if divisors[-1] else math.nan
        if not math.isclose(divisor, wanted, rel_tol=LLAMA3_TOLERANCE):
            raise _refused(
                header,
                expert,
                ROPE_FACTORS,
                f"is not Llama 3's scaling from {positions} positions: none other is served",
            )
    return {
        "rope_type": "llama3", "factor": divisors[-1], "original_max_position_embeddings": positions, **LLAMA3_TURNS
    }  # fmt: skip


def _of_tensors(header: Header) -> dict[str, Any]:
    """Fields that tensors alone tell."""
    tensors = header.tensors
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.format.name] = sizes.get(tensor.format.name, 0) + math.prod(tensor.shape)
    most = max(sizes, key=sizes.__getitem__, default="F32")
    return {
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "dtype": DTYPES.get(most, OF_BLOCKS),
    }


def _token_ids(header: Header) -> dict[str, Any]:
    keys = ((f"tokenizer.ggml.{key}", field) for key, field in TOKEN_IDS.items())
    return {field: header.metadata[key] for key, field in keys if key in header.metadata}


def _refused(header: Header, expert: str, key: str, message: str) -> ModelUnsupported:
    return ModelUnsupported(expert, key, message, str(header.path))
