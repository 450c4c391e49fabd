"""Models as GGUF files, by the gguf package and the conventions of llama.cpp's converter."""

import re

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

SIZES = {  # in blocks of the K formats
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.08,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "phi3": "phi3",
}  # fmt: skip
STACKED = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\w+)")
PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
AT_RANDOM = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL")


def tiny_model(family, **changes):
    """A random model in fp32, of numbers that fp16 has. Biases and norms differ, so that a swapped one is seen."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**SIZES, "sliding_window": None, **changes})
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = 0.2 * torch.randn(parameter.shape) if parameter.dim() == 1 else 0
            parameter.copy_((parameter + drawn).half().float())
    return model


def with_tensors_of(path, model):
    """The model with what transformers' own reader of GGUF files finds in one."""
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def write_model(path, model, number_format="F16", *, tokenizer=None, keys=None, tensors=None):
    """A model of transformers as a GGUF file. ``keys``: further metadata, None takes a key out; below the architecture
    where they begin with a dot. ``tensors``: further ones."""
    config, writer = model.config, gguf.GGUFWriter(path, ARCHITECTURES[model.config.model_type])
    metadata = {f".{key}": value for key, value in _metadata(config).items()} | (tokenizer or no_words(config))
    for key, value in (metadata | (keys or {})).items():
        if value is not None:
            _add(writer, f"{writer.arch}{key}" if key.startswith(".") else key, value)
    stored = dict(_tensors(model, writer.arch)) | _rope_factors(config)
    for name, tensor in {**stored, **(tensors or {})}.items():
        one = number_format if tensor.ndim > 1 and "ffn_gate_inp" not in name else "F32"
        kind = gguf.GGMLQuantizationType[one]
        writer.add_tensor(name, quantized(tensor.numpy(), one), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(numbers, number_format):
    """Formats that the package does not write: random blocks of about the same spread."""
    kind = gguf.GGMLQuantizationType[number_format]
    if number_format not in AT_RANDOM:
        return gguf.quants.quantize(numbers, kind)
    block, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = numbers.reshape(-1, numbers.shape[-1])
    count = rows.size // block
    blocks = np.random.default_rng(count).integers(0, 256, (count, size_bytes), dtype=np.uint8)
    scale = np.float16(numbers.std() / (16 * 16 if number_format == "Q4_K" else 16 * 32))
    halves = slice(208, 210) if number_format == "Q6_K" else slice(0, 4)
    lowest = (1, 8) if number_format == "Q4_K" else (1, 16)  # the least number is as far from zero as the greatest
    scales = np.array([scale] if number_format == "Q6_K" else [scale * lowest[0], scale * lowest[1]], np.float16)
    blocks[:, halves] = np.tile(scales.view(np.uint8), (count, 1))
    return blocks.reshape(*numbers.shape[:-1], -1)


def no_words(config):
    """As a converter writes a vocabulary of tokens that no text has."""
    tokens = [f"[PAD{number}]" for number in range(config.vocab_size)]
    return {"tokenizer.ggml.model": "none", "tokenizer.ggml.tokens": tokens}


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _metadata(config):
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": head_size, "attention.value_length": head_size,
    }  # fmt: skip
    if config.model_type in ("llama", "mixtral", "mistral"):
        values |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_size}
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.model_type in ("gemma2", "gemma3_text"):
        values["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    if config.model_type == "phi3":
        values |= {
            "rope.dimension_count": int(head_size * rope["partial_rotary_factor"]),
            "attention.sliding_window": config.sliding_window or 0,
            "rope.scaling.original_context_length": config.original_max_position_embeddings,
            "rope.scaling.attn_factor": float(rope.get("attention_factor", 1.0)),
        }
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if count:
        values |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    for field, key in (
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ("clip_qkv", "attention.clamp_kqv"),
    ):
        if getattr(config, field, None):
            values[key] = getattr(config, field)
    return values


def _tensors(model, architecture):
    """Tensors by llama.cpp's names, with its order of the rows of queries and keys in Llama's family."""
    config = model.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if found := STACKED.match(name):
            layer, kind = found.groups()
            halves = {"gate": tensor.chunk(2, 1)[0], "up": tensor.chunk(2, 1)[1]} if kind == "gate_up_proj" else {}
            for end, part in (halves or {"down": tensor}).items():
                yield f"blk.{layer}.ffn_{end}_exps.weight", part.contiguous()
            continue
        stem, _, suffix = name.rpartition(".")
        heads = next((getattr(config, PERMUTED[end]) for end in PERMUTED if stem.endswith(end)), None)
        if architecture == "llama" and heads:
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if "shared_expert_gate" in name:
            tensor = tensor.squeeze(0)
        if architecture in ("gemma2", "gemma3") and stem.endswith("norm"):
            tensor = tensor + 1
        yield f"{names.get_name(stem)}.{suffix}", tensor.contiguous()


def _rope_factors(config):
    """Llama 3's scaling, as divisors of the frequencies."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{one}.weight": torch.tensor(rope[f"{one}_factor"]) for one in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return {"rope_freqs.weight": plain / scaled}
