"""config.json: what each family says, and what is refused by name."""

import math

import pytest

from experts.errors import ModelUnsupported, WeightsCorrupt, WeightsMissing
from experts.llm.files.config import ABSENT, RopeKind, RopeSpec, context_tokens, parse_spec, read_spec
from tests.experts.llm.conftest import FAMILIES


def refusal(values):
    with pytest.raises(ModelUnsupported) as caught:
        parse_spec(values, "coder")
    assert "expert coder" in str(caught.value)
    return caught.value


def test_one_number_of_experts_counts_for_all_layers(model_files):
    spec = parse_spec(model_files.config("pr_moe", num_experts=5), "x")
    assert [layer.moe.moe_experts for layer in spec.layers] == [5, 5, 5]


class TestRotaryPositions:
    LLAMA3 = {  # noqa: RUF012
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip

    def test_old_and_new_spelling_of_rotary_positions_are_equal(self, model_files):
        old = model_files.config("llama", rope_theta=5e5, rope_scaling=self.LLAMA3)
        new = model_files.config("llama", rope_theta=None, rope_parameters={**self.LLAMA3, "rope_theta": 5e5})
        older = model_files.config("llama", rope_theta=5e5, rope_scaling={**self.LLAMA3, "type": "llama3"})
        del older["rope_scaling"]["rope_type"]
        expected = RopeSpec(5e5, RopeKind.LLAMA3, 8.0, 32, 1.0, 4.0)
        assert [parse_spec(values, "x").rope for values in (old, new, older)] == [expected] * 3

    @pytest.mark.parametrize(("family", "theta"), [("llama", 1e4), ("mixtral", 1e6)])
    def test_unstated_rotary_base_is_the_familys(self, model_files, family, theta):
        assert parse_spec(model_files.config(family, rope_theta=None), "x").rope == RopeSpec(theta)

    @pytest.mark.parametrize(
        ("given", "magnitude"),
        [
            ({}, 0.1 * math.log(4) + 1),
            ({"attention_factor": 1.5}, 1.5),
            ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ],
    )
    def test_magnitude_of_yarn_scaling_is_computed(self, model_files, given, magnitude):
        scaling = {"rope_type": "yarn", "factor": 4.0, **given}
        rope = parse_spec(model_files.config("qwen3", rope_scaling=scaling), "x").rope
        assert rope == RopeSpec(1e4, RopeKind.YARN, 4.0, 128, 1.0, 32.0, True, pytest.approx(magnitude))


class TestRefusals:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(
        "field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"]
    )
    def test_missing_or_non_numeric_field_is_refused(self, model_files, family, field):
        if field not in ABSENT.get(family, {}):
            assert refusal(model_files.config(family, **{field: None})).field == field
        for value in ("many", 0, -1, True, [3], math.nan):
            assert refusal(model_files.config(family, **{field: value})).field == field

    def test_unsupported_architecture_is_refused_with_the_supported_ones(self, model_files):
        refused = refusal({**model_files.config("llama"), "model_type": "gpt2"})
        assert refused.field == "model_type"
        assert all(family in str(refused) for family in FAMILIES)

    @pytest.mark.parametrize(
        ("family", "field", "value"),
        [
            ("llama", "model_type", None), ("llama", "model_type", 3), ("llama", "hidden_act", "gelu"),
            ("llama", "quantization_config", "4 bits"), ("llama", "partial_rotary_factor", 0.5),
            ("llama", "head_dim", 7), ("llama", "num_key_value_heads", 3), ("llama", "rope_scaling", "linear"),
            ("llama", "rope_scaling.rope_type", "dynamic"), ("llama", "rope_scaling.factor", None),
            ("qwen2", "use_sliding_window", 1), ("qwen2_moe", "use_sliding_window", True),
            ("qwen2", "layer_types", ["full_attention"]), ("qwen2", "layer_types", ["chunked_attention"] * 3),
            ("phi3", "attention_bias", True), ("gemma2", "hidden_activation", "gelu"),
            ("gemma2", "use_bidirectional_attention", True), ("gemma3_text", "attn_logit_softcapping", 50.0),
            ("mixtral", "layer_types", ["sliding_attention"] * 3), ("llama", "layer_types", ["sliding_attention"] * 3),
            ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
            ("mixtral", "sliding_window", "all"), ("mixtral", "num_experts_per_tok", 5),
            ("qwen3_moe", "norm_topk_prob", None), ("qwen2_moe", "norm_topk_prob", "yes"),
            ("olmoe", "norm_topk_prob", None), ("qwen2_moe", "mlp_only_layers", ["0"]),
            ("qwen2_moe", "shared_expert_intermediate_size", None), ("pr_moe", "num_experts", [0, 4]),
            ("pr_moe", "num_experts", [0, 4, "six"]), ("pr_moe", "num_experts_per_tok", 5),
            ("pr_moe", "residual", "mean"), ("pr_moe", "mlp", "relu"), ("pr_moe", "mlp", None),
        ],
    )  # fmt: skip
    def test_setting_that_would_run_as_something_else_is_refused(self, model_files, family, field, value):
        name, _, below = field.partition(".")
        changed = {"rope_type": "linear", "factor": 2.0, below: value} if below else value
        assert refusal(model_files.config(family, **{name: changed})).field == field

    def test_residual_of_a_pyramid_is_never_guessed(self, model_files):
        values = model_files.config("pr_moe")
        del values["residual"]
        assert refusal(values).field == "residual"

    @pytest.mark.parametrize("window", [None, 128, 4096])
    def test_window_that_holds_the_whole_context_is_ignored(self, model_files, window):
        assert parse_spec(model_files.config("mixtral", sliding_window=window), "x").is_attention_plain


def test_published_config_of_gemma_3_leaves_out_what_transformers_fills_in():
    named = {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 12}
    text = {**named, "sliding_window": 512, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 16}}
    spec = parse_spec(text, "x")
    assert parse_spec(whole, "x") == spec
    assert context_tokens(whole, "x") == spec.max_positions == 131072
    assert (spec.vocab_size, spec.heads, spec.kv_heads, spec.head_size, spec.is_tied) == (262208, 8, 4, 256, True)
    assert (spec.rope, spec.local_rope) == (RopeSpec(1e6, RopeKind.LINEAR, 8.0), RopeSpec(1e4))
    assert [layer.window for layer in spec.layers] == [*[512] * 5, None] * 2


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b"3"])
def test_config_that_is_absent_or_no_json_object_is_refused(tmp_path, content):
    with pytest.raises(WeightsMissing, match=r"config\.json is not there"):
        read_spec(tmp_path, "x")
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WeightsCorrupt, match=r"config\.json"):
        read_spec(tmp_path, "x")
