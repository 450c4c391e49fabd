"""Checkpoints: read whole, from one file or several, and refused by the name of what does not fit."""

import json

import pytest
import torch
from safetensors.torch import save_file

from experts.errors import WeightsCorrupt, WeightsMismatch, WeightsMissing, WeightsRefused
from experts.llm.files.checkpoint import open_checkpoint, unused_adapter
from experts.llm.files.config import parse_spec
from experts.llm.model import load_model
from tests.experts.llm.conftest import FAMILIES


def opened(directory):
    values = json.loads((directory / "config.json").read_text("utf-8"))
    return open_checkpoint(directory, "coder", parse_spec(values, "coder"))


def refusal(directory, kind=WeightsMismatch):
    with pytest.raises(kind) as caught:
        load_model(directory, "coder")
    assert caught.value.expert == "coder"
    return str(caught.value)


class TestReading:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_shards_hold_the_same_model(self, model_files, family):
        values, tensors = model_files.stored(family)
        whole = opened(model_files.write(values, tensors)).read_all()
        sharded = opened(model_files.write_shards(values, tensors)).read_all()
        assert whole.keys() == sharded.keys()
        assert all(torch.equal(whole[name], sharded[name]) for name in whole)

    @pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "pr_moe"])
    def test_experts_stored_as_one_block_are_read(self, model_files, family):
        values = model_files.config(family)
        each = opened(model_files.write(values, model_files.tensors(values)))
        blocks = model_files.tensors(values, form=1)
        for name in ("up", "down"):
            (block,) = [one for one in blocks if one.endswith(f"layers.2.mlp.experts.{name}_proj")] or [
                "model.layers.2.mlp.experts.gate_up_proj"
            ]
            blocks[block] = each.read(f"layers.2.experts.{name}").clone()
        together = opened(model_files.write(values, blocks))
        assert torch.equal(together.read("layers.2.experts.up"), each.read("layers.2.experts.up"))
        assert torch.equal(together.read("layers.2.experts.down"), each.read("layers.2.experts.down"))

    def test_tensor_that_needs_no_joining_is_not_copied(self, model_files):
        checkpoint = opened(model_files.write(model_files.config("llama")))
        first, again = checkpoint.read("embedding"), checkpoint.read("embedding")
        assert first.data_ptr() == again.data_ptr()  # both are the file's map

    def test_stored_rotary_frequencies_are_ignored(self, model_files):
        values = model_files.config("llama")
        stored = model_files.tensors(values) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        load_model(model_files.write(values, stored), "x")


class TestRefusals:
    def test_tied_head_that_differs_is_refused(self, model_files):
        values, tensors = model_files.stored("qwen2", tie_word_embeddings=True)
        other = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
        text = refusal(model_files.write(values, other))
        assert "lm_head.weight differs from model.embed_tokens.weight" in text
        assert "tie_word_embeddings" in text

    @pytest.mark.parametrize("family", FAMILIES)
    def test_missing_or_misshaped_tensor_is_named(self, model_files, family):
        values, tensors = model_files.stored(family)
        for name in sorted(tensors)[::5]:
            less = {other: tensor for other, tensor in tensors.items() if other != name}
            assert f"missing: {name}" in refusal(model_files.write(values, less))
        for name in sorted(tensors)[::7]:
            shape = tuple(tensors[name].shape)
            longer = tensors | {name: torch.zeros((shape[0] + 1, *shape[1:]))}
            text = refusal(model_files.write(values, longer))
            assert f"of another shape: {name} {(shape[0] + 1, *shape[1:])} instead of {shape}" in text

    def test_all_faults_of_a_checkpoint_are_reported_at_once_and_shortened(self, model_files):
        values, tensors = model_files.stored("llama")
        less = {name: one for name, one in tensors.items() if "layers.1." not in name}
        wrong = {"more": torch.zeros(1), "model.norm.weight": torch.zeros(32, dtype=torch.int8)}
        text = refusal(model_files.write(values, less | wrong))
        told = ("missing: model.layers.1.input_layernorm.weight", "and 5 more", "unexpected: more",
                "not served: model.norm.weight I8")  # fmt: skip
        assert [each for each in told if each not in text] == []

    def test_adapter_is_said_beside_a_model_and_refused_alone(self, model_files):
        directory = model_files.write(*model_files.stored("llama"))
        assert unused_adapter(directory) is None
        (directory / "adapter_config.json").write_text("{}")
        assert opened(directory).names
        assert "this adapter is not applied: name its folder as `adapter`" in unused_adapter(directory)
        assert unused_adapter(directory, directory) is None
        (directory / "model.safetensors").unlink()
        assert "an adapter alone: name its model as `weights`" in refusal(directory)

    def test_directory_without_weights_or_with_a_pickle_is_refused(self, model_files):
        directory = model_files.write(model_files.config("llama"), name="other.safetensors")
        assert "holds neither model.safetensors nor model.safetensors.index.json" in refusal(directory, WeightsMissing)
        (directory / "pytorch_model.bin").write_bytes(b"")
        assert "pickle" in refusal(directory, WeightsRefused)

    @pytest.mark.parametrize("content", [b"", b"no tensors at all", b"\x08" + bytes(7) + b"{}      "])
    def test_file_without_tensors_is_refused(self, model_files, content):
        directory = model_files.write(model_files.config("llama"))
        (directory / "model.safetensors").write_bytes(content)
        assert "model" in refusal(directory, (WeightsCorrupt, WeightsMismatch))


class TestIndex:
    @pytest.fixture
    def sharded(self, model_files):
        values = model_files.config("llama")
        return model_files.write_shards(values, model_files.tensors(values))

    def test_missing_shard_is_named(self, sharded):
        (sharded / "model-00002-of-00003.safetensors").unlink()
        assert "model-00002-of-00003.safetensors is not there" in refusal(sharded, WeightsMissing)

    @pytest.mark.parametrize(
        ("tensor", "file", "told"),
        [
            ("model.norm.weight", "model-00001-of-00003.safetensors", "model.norm.weight is not in"),
            ("nowhere", "model-00001-of-00003.safetensors", "nowhere is not in"),
            ("model.norm.weight", "../model.safetensors", "names '../model.safetensors'"),
            ("model.norm.weight", "/etc/passwd", "names '/etc/passwd'"),
            ("model.norm.weight", "weights.bin", "names 'weights.bin'"),
        ],
    )
    def test_tensor_absent_from_its_shard_or_outside_the_folder_is_refused(self, sharded, tensor, file, told):
        path = sharded / "model.safetensors.index.json"
        index = json.loads(path.read_text("utf-8"))
        index["weight_map"][tensor] = file
        path.write_text(json.dumps(index), "utf-8")
        assert told in refusal(sharded, WeightsCorrupt)

    def test_tensor_in_two_files_is_refused(self, sharded):
        files = sorted(sharded.glob("*.safetensors"))
        save_file({"model.norm.weight": torch.zeros(32)}, files[0])
        save_file({"model.norm.weight": torch.zeros(32)}, files[1])
        assert "model.norm.weight is in" in refusal(sharded, WeightsCorrupt)

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
    def test_index_without_a_map_is_refused(self, sharded, content):
        (sharded / "model.safetensors.index.json").write_text(content, "utf-8")
        assert "model.safetensors.index.json" in refusal(sharded, WeightsCorrupt)
