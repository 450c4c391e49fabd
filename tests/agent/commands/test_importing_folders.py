"""`coserve experts import` of a folder: arguments that a DeepSpeed checkpoint lacks come from the command line."""

import json

import torch
from typer.testing import CliRunner

from agent.cli.app import app

HIDDEN = 8
TOLD = ("num_attention_heads=2", "layernorm_epsilon=1e-5", "bias_gelu_fusion=true", "checkpoint_version=3")


def dense_checkpoint(folder):
    """One layer without experts, flat, and no arguments beside it."""
    shapes = {
        "word_embeddings.weight": (10, HIDDEN), "position_embeddings.weight": (12, HIDDEN),
        "layers.0.self_attention.query_key_value.weight": (3 * HIDDEN, HIDDEN),
        "layers.0.self_attention.query_key_value.bias": (3 * HIDDEN,),
        "layers.0.self_attention.dense.weight": (HIDDEN, HIDDEN), "layers.0.self_attention.dense.bias": (HIDDEN,),
        "layers.0.mlp.dense_h_to_4h.weight": (16, HIDDEN), "layers.0.mlp.dense_h_to_4h.bias": (16,),
        "layers.0.mlp.dense_4h_to_h.weight": (HIDDEN, 16), "layers.0.mlp.dense_4h_to_h.bias": (HIDDEN,),
    }  # fmt: skip
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "final_layernorm")
    shapes |= {f"{norm}.{kind}": (HIDDEN,) for norm in norms for kind in ("weight", "bias")}
    folder.mkdir()
    torch.save({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "mp_rank_00_model_states.pt")
    return folder


def run(*words):
    return CliRunner().invoke(app, ["experts", "import", *map(str, words)])


def test_what_is_not_told_is_asked_for_and_can_be_given(tmp_path):
    source = dense_checkpoint(tmp_path / "ds")
    asked = run(source, tmp_path / "out")
    assert asked.exit_code == 1
    assert "give --arg num_attention_heads=" in asked.stderr
    given = run(source, tmp_path / "out", "--json", *(word for one in TOLD for word in ("--arg", one)))
    assert given.exit_code == 0, given.stderr
    assert json.loads(given.stdout)["moe_experts"] == [0]
    assert (tmp_path / "out" / "config.json").is_file()


def test_options_of_folders_are_refused_for_files(tmp_path):
    refused = run(tmp_path / "x.safetensors", tmp_path / "y.safetensors", "--arg", "topk=1")
    assert refused.exit_code == 2
    assert "leave out --arg" in refused.stderr
    assert run(tmp_path, tmp_path / "y", "--arg", "topk").exit_code == 2
