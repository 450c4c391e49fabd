"""GGUF files of tiny random models against transformers: the models that they were written of, and its own reader."""

import gguf
import numpy as np
import pytest
import torch

from experts.errors import ModelUnsupported, WeightsCorrupt, WeightsMismatch
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import read_spec
from experts.llm.gguf.blocks import numbers_of
from experts.llm.gguf.header import FORMATS
from experts.llm.model import load_model
from tests.experts.llm.conftest import greedy, logits_of
from tests.experts.llm.gguf.writing import LLAMA3, tiny_model, with_tensors_of, write_model

PROMPT = list(range(1, 60))
NEW_TOKENS = 12
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},  # as SmolLM's
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**SHARED, "shared_expert_intermediate_size": 256, "norm_topk_prob": False},
    "qwen3_moe": {**SHARED, "head_dim": 64, "norm_topk_prob": True},
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "num_hidden_layers": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {
        "sliding_window": 16,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "attention_factor": 1.25,
            "short_factor": [1 + n / 8 for n in range(24)],
            "long_factor": [9.0] * 24,
        },
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": 3.0},
}
OTHER_FORMATS = ("F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q5_K", "Q6_K")
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
SLOW = pytest.mark.slow


def require_the_texts_of(oracle, path):
    """The same logits, and the same greedy tokens."""
    ours = load_model(path, "tiny", torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = oracle(ids).logits[0]
    assert (logits_of(ours, PROMPT) - expected).abs().max() <= 1e-5 * expected.abs().max()
    given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    made = oracle.generate(ids, attention_mask=torch.ones_like(ids), **given)
    (tokens,), _ = greedy(ours, [PROMPT], NEW_TOKENS)
    assert tokens == made[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(one, marks=SLOW) for one in FAMILIES if one != "mixtral")]
)
def test_model_of_16_bits_is_the_model_that_it_was_written_of(tmp_path, family):
    model = tiny_model(family, **FAMILIES[family])
    require_the_texts_of(model, write_model(tmp_path / "m.gguf", model, "F16"))


@pytest.mark.parametrize(
    ("family", "number_format"),
    [
        ("llama", "Q4_K"),
        *(pytest.param(one, "F16", marks=SLOW) for one in READ_BY_TRANSFORMERS),
        *(pytest.param(one, "Q8_0", marks=SLOW) for one in READ_BY_TRANSFORMERS),
        *(pytest.param(one, "Q4_K", marks=SLOW) for one in READ_BY_TRANSFORMERS if one != "llama"),
        *(pytest.param("llama", one, marks=SLOW) for one in OTHER_FORMATS),
    ],
)  # fmt: skip
def test_model_is_what_transformers_reads_in_the_same_file(tmp_path, family, number_format):
    model = tiny_model(family, **FAMILIES[family])
    path = write_model(tmp_path / "m.gguf", model, number_format)
    require_the_texts_of(with_tensors_of(path, model), path)


@pytest.mark.parametrize("rope", [LLAMA3, pytest.param(YARN, marks=SLOW), pytest.param(LINEAR, marks=SLOW)])
def test_positions_are_scaled_as_in_the_model_that_the_file_was_written_of(tmp_path, rope):
    model = tiny_model("llama", rope_parameters=rope, attention_bias=True, mlp_bias=True, head_dim=32)
    trained = {".rope.scaling.original_context_length": rope.get("original_max_position_embeddings")}
    require_the_texts_of(model, write_model(tmp_path / "m.gguf", model, keys=trained))


@pytest.mark.parametrize(
    "number_format", [one for one in FORMATS.values() if one.numbers > 1], ids=lambda one: one.name
)
def test_numbers_of_any_block_are_those_of_the_reference(number_format):
    size = (257, number_format.block_bytes * 3)
    blocks = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    with np.errstate(all="ignore"):  # some scales are NaN or infinity
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[number_format.name])
    given = numbers_of(bytearray(blocks.tobytes()), number_format).numpy()
    assert np.array_equal(given, expected.ravel(), equal_nan=True)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({".attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({".attention.sliding_window": 16}, "attention.sliding_window"),
        ({".rope.dimension_count": 16}, "rope.dimension_count"),
        ({".rope.scaling.type": "longrope"}, "rope.scaling.type"),
        ({".a_new_idea": 1}, "a_new_idea"),
        ({".expert_count": 5000}, "expert_count"),
        ({"general.type": "adapter"}, "general.type"),
        ({"split.count": 2}, "split.count"),
    ],
)
def test_key_with_an_effect_that_the_runtime_lacks_is_refused_by_name(tmp_path, llama, keys, named):
    path = write_model(tmp_path / "m.gguf", llama, keys=keys)
    with pytest.raises(ModelUnsupported, match=named):
        load_model(path, "tiny")


def test_window_as_wide_as_the_context_is_served(tmp_path, llama):
    path = write_model(tmp_path / "m.gguf", llama, keys={".attention.sliding_window": 256})
    require_the_texts_of(llama, path)


def test_unserved_architecture_and_number_format_are_refused_by_name(tmp_path, llama, monkeypatch):
    path = write_model(tmp_path / "m.gguf", llama)
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(ModelUnsupported, match="mamba"):
        load_model(path, "tiny")
    path = write_model(tmp_path / "m.gguf", llama, "IQ4_NL")
    with pytest.raises(ModelUnsupported, match="IQ4_NL"):
        load_model(path, "tiny")


def test_frequencies_scaled_in_another_way_are_refused(tmp_path):
    model = tiny_model("llama", rope_parameters=LLAMA3)
    path = write_model(tmp_path / "m.gguf", model)  # from 8192 positions, where nothing is said
    with pytest.raises(ModelUnsupported, match=r"rope_freqs\.weight"):
        load_model(path, "tiny")


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({".block_count": 4_000_000_000}, WeightsCorrupt),
        ({".feed_forward_length": 512}, WeightsMismatch),
        ({".vocab_size": 100}, WeightsCorrupt),
    ],
)
def test_metadata_that_the_tensors_contradict_are_refused(tmp_path, llama, keys, error):
    path = write_model(tmp_path / "m.gguf", llama, keys=keys)
    with pytest.raises(error):
        load_model(path, "tiny")


def test_missing_key_is_named_with_the_file(tmp_path, llama):
    path = write_model(tmp_path / "m.gguf", llama, keys={".attention.layer_norm_rms_epsilon": None})
    with pytest.raises(WeightsMismatch, match=r"m\.gguf: its metadata, as config\.json: rms_norm_eps: is missing"):
        load_model(path, "tiny")


def test_ranks_read_their_rows_of_a_file(tmp_path):
    model = tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    path = write_model(tmp_path / "m.gguf", model, "Q8_0")
    checkpoint = open_checkpoint(path, "tiny", read_spec(path, "tiny"))
    for name in ("layers.1.qkv", "layers.0.experts.up"):
        whole = checkpoint.read(name)
        columns = whole.shape[-1]
        rows = checkpoint.read_rows(name, columns, [(3, 70), (200, 300)], (8, 40))
        matrix = whole.view(-1, columns)
        assert torch.equal(rows, torch.cat([matrix[3:70], matrix[200:300]])[:, 8:40])


def test_tensor_without_a_place_in_the_architecture_is_refused_by_name(tmp_path, llama):
    path = write_model(tmp_path / "m.gguf", llama, tensors={"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(WeightsMismatch, match=r"unexpected: blk\.0\.attn_sinks\.weight"):
        load_model(path, "tiny")
