"""`coserve experts import` of a folder: arguments that a DeepSpeed checkpoint lacks come from the command line."""

import json

from tests.commands import coserve
from tests.experts.llm.importing.test_deepspeed import EXPERTS, HEADS, Gpt, write

TOLD = (
    f"num_attention_heads={HEADS}",
    "layernorm_epsilon=1e-5",
    "bias_gelu_fusion=true",
    "topk=1",
    "checkpoint_version=3",
)


def run(*words):
    return coserve("experts", "import", *words)


def test_facts_missing_in_a_folder_are_asked_for_and_can_be_given(tmp_path):
    source = write(tmp_path / "ds", Gpt().tensors(), args=None, version=None)
    asked = run(source, tmp_path / "out")
    assert asked.exit_code == 1
    assert "give --arg num_attention_heads=" in asked.stderr
    given = run(source, tmp_path / "out", "--json", *(word for one in TOLD for word in ("--arg", one)))
    assert given.exit_code == 0, given.stderr
    assert json.loads(given.stdout)["moe_experts"] == list(EXPERTS)
    assert (tmp_path / "out" / "config.json").is_file()


def test_options_of_folders_are_refused_for_files(tmp_path):
    refused = run(tmp_path / "x.safetensors", tmp_path / "y.safetensors", "--arg", "topk=1")
    assert refused.exit_code == 2
    assert "leave out --arg" in refused.stderr
    assert run(tmp_path, tmp_path / "y", "--arg", "topk").exit_code == 2
