"""Language models as experts: packed from directories, held once where they are the same, bound to packed bytes."""

import json
import os
import shutil
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from experts import errors
from experts.backends import backend_for
from experts.expert import Expert, Precision
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.files.program import files_of
from experts.llm.model import load_model
from experts.llm.token_batch import Chunk, TokenBatch
from experts.packed.packing import pack_line
from tests.experts.llm.conftest import FAMILIES, logits_of

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
WORDS = Tokenizer(WordLevel({"word": 0, "other": 1})).to_str()
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (5, 3), (58,))


def llm(name, directory, **more):
    return Expert(name, "llm", directory, (), None, **more)


def pack(store, experts, precision=Precision.FP32):
    return pack_line(experts, lambda expert: {precision}, store)


def packed_in(store, experts, precision=Precision.FP32):
    report = pack(store, experts, precision)
    assert report.failed == {}
    return {name: forms[precision] for name, forms in report.packed.items()}


def assert_says(model, expert, dtype=torch.float32):
    """Up to the last bits: a kernel may go another way over the same numbers where they begin at another address."""
    expected = load_model(expert.weights, expert.id, dtype)
    torch.testing.assert_close(logits_of(model, *PROMPTS), logits_of(expected, *PROMPTS), atol=1e-5, rtol=0)


class TestBoundToPackedBytes:
    @pytest.mark.parametrize("precision", list(DTYPES))
    @pytest.mark.parametrize("family", FAMILIES)
    def test_packed_model_gives_the_logits_of_the_directory(self, model_files, store, make_slot, family, precision):
        expert = llm("llm/a", model_files.write(model_files.config(family)))
        slot = make_slot(expert, packed_in(store, [expert], precision)[expert.id], store)
        model = slot.skeleton.model
        assert model.dtype is DTYPES[precision]
        assert_says(model, expert, DTYPES[precision])

    @pytest.mark.parametrize("precision", [*DTYPES, Precision.INT8, Precision.INT4])
    @pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
    def test_weight_bytes_of_a_model_are_known_before_packing(self, model_files, family, precision):
        widths = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
        expert = llm("llm/a", model_files.write(model_files.config(family, **widths)))
        backend = backend_for("llm")
        packable = backend.pack(expert, precision)
        blocks = {name: packable.tensors[name] for stack in packable.stacks for name in stack}
        found = backend.weight_bytes(expert, precision)
        assert found.total_bytes == sum(tensor.nbytes for tensor in packable.tensors.values())
        assert found.block_bytes * found.blocks == sum(tensor.nbytes for tensor in blocks.values())

    def test_overwriting_the_bytes_makes_it_another_model(self, model_files, store, make_slot):
        values = model_files.config("qwen3_moe")
        first, other = (
            llm(f"llm/{seed}", model_files.write(values, model_files.tensors(values, seed=seed))) for seed in (0, 1)
        )
        packed = packed_in(store, [first, other])
        assert packed["llm/0"].layout == packed["llm/1"].layout
        slot = make_slot(first, packed["llm/0"], store)
        model = slot.skeleton.model
        slot.load(other, packed["llm/1"])
        assert_says(model, other)

    def test_changed_config_is_another_layout(self, model_files, store):
        values, tensors = model_files.stored("llama")
        experts = [
            llm(f"llm/{theta}", model_files.write(values | {"rope_theta": theta}, tensors)) for theta in (1e4, 1e5)
        ]
        packed = packed_in(store, experts)
        assert len({each.layout for each in packed.values()}) == 2

    def test_tied_head_is_packed_once(self, model_files, store, make_slot):
        values, tensors = model_files.stored("qwen2", tie_word_embeddings=True)
        copied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        expert = llm("llm/a", model_files.write(values, copied))
        packed = packed_in(store, [expert])[expert.id]
        assert "head" not in {spec.name for spec in packed.own.tensors}
        slot = make_slot(expert, packed, store)
        assert_says(slot.skeleton.model, expert)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_two_fine_tunes_of_one_backbone_take_little_more_than_one(model_files, store, make_slot, precision):
    values = model_files.config("llama", vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=6)
    backbone, experts = model_files.tensors(values), []
    for seed in (1, 2):
        others = model_files.tensors(values, seed=seed)
        mixed = {name: others[name] if "layers.5.mlp" in name else tensor for name, tensor in backbone.items()}
        experts.append(llm(f"llm/{seed}", model_files.write(values, mixed)))
    packed = packed_in(store, experts, precision)
    stored_bytes = sum(path.stat().st_size for path in (store.directory / "segments").iterdir())
    assert stored_bytes < 1.2 * sum(segment.size_bytes for segment in packed["llm/1"].segments)
    assert (packed["llm/1"].shared, packed["llm/1"].layout) == (packed["llm/2"].shared, packed["llm/2"].layout)
    held = {segment.sha256: segment.slot_bytes for each in packed.values() for segment in each.segments}
    assert sum(held.values()) < 1.2 * sum(segment.slot_bytes for segment in packed["llm/1"].segments)
    for expert in experts:
        assert_says(make_slot(expert, packed[expert.id], store).skeleton.model, expert, DTYPES[precision])


class TestChangedDirectories:
    @pytest.fixture
    def expert(self, model_files):
        values = model_files.config("llama")
        expert = llm("llm/a", model_files.write_shards(values, model_files.tensors(values)))
        (expert.weights / "tokenizer.json").write_text(WORDS)
        return expert

    def sources(self, store, expert):
        return packed_in(store, [expert])[expert.id].source_sha256

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00003.safetensors"])
    def test_touched_files_are_not_packed_again(self, store, expert, name):
        before = self.sources(store, expert)
        segments = {path: path.stat().st_mtime_ns for path in (store.directory / "segments").iterdir()}
        os.utime(expert.weights / name, ns=(1, 1))
        assert self.sources(store, expert) == before
        assert {path: path.stat().st_mtime_ns for path in (store.directory / "segments").iterdir()} == segments

    def test_any_changed_shard_packs_again(self, store, expert):
        before = packed_in(store, [expert])[expert.id]
        shard = expert.weights / "model-00002-of-00003.safetensors"
        status = shard.stat()
        save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
        os.utime(shard, ns=(status.st_mtime_ns - 1, status.st_mtime_ns - 1))  # older than before, and as large
        after = packed_in(store, [expert])[expert.id]
        assert after.source_sha256 != before.source_sha256
        assert after.own.sha256 != before.own.sha256

    @pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
    def test_changed_file_beside_the_weights_changes_the_program_only(self, store, expert, name):
        before = packed_in(store, [expert])[expert.id]
        content = f"{WORDS}\n" if name == "tokenizer.json" else '{"a": 1}'
        (expert.weights / name).write_text(content)
        after = packed_in(store, [expert])[expert.id]
        assert files_of(store.program(after))[name].decode() == content
        assert after.program_sha256 != before.program_sha256
        assert after.own.sha256 == before.own.sha256


def spoiled(directory, name, content):
    (directory / name).write_text(content)


def mamba(directory):
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "mamba"}
    (directory / "config.json").write_text(json.dumps(config))


def with_nan(directory):
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][1, 1] = float("nan")
    save_file(tensors, directory / "model.safetensors")


def a_file(directory):
    shutil.rmtree(directory)
    directory.write_bytes(b"")


class TestRefusals:
    @pytest.mark.parametrize(
        ("damage", "error", "told"),
        [
            (mamba, errors.ModelUnsupported, "model_type: 'mamba' is not served"),
            (with_nan, errors.WeightsCorrupt, "layers.2.mlp.down holds NaN or infinity"),
            (a_file, errors.LoadError, "is a file: name the Hugging Face directory"),
            (shutil.rmtree, errors.WeightsMissing, "is not there: copy it there, or correct `weights`"),
            (lambda directory: (directory / "config.json").unlink(), errors.WeightsMissing, "config.json is not there"),
            (lambda directory: spoiled(directory, "tokenizer.json", '{"model": 1}'), errors.TokenizerUnusable,
             "tokenizer.json: describes no tokenizer of a known kind"),
        ],
    )  # fmt: skip
    def test_faulty_directory_is_reported_with_the_reason(self, model_files, store, damage, error, told):
        directory = model_files.write(model_files.config("llama"))
        damage(directory)
        failed = pack(store, [llm("llm/a", directory)]).failed["llm/a"]
        assert isinstance(failed, error)
        assert failed.expert == "llm/a"
        assert told in str(failed)

    def test_precision_that_cannot_hold_or_run_the_model_is_refused(self, model_files, store):
        values, tensors = model_files.stored("llama")
        tensors["model.norm.weight"][1] = 1e6
        expert = llm("llm/a", model_files.write(values, tensors))
        assert "norm is too large for fp16: choose bf16" in str(pack(store, [expert], Precision.FP16).failed[expert.id])
        assert isinstance(pack(store, [expert], Precision.ONNXRUNTIME).failed[expert.id], errors.WeightsMismatch)

    def test_label_that_the_tokenizer_cannot_spell_is_refused(self, model_files, store):
        directory = model_files.write(model_files.config("llama"))
        (directory / "tokenizer.json").write_text(WORDS)
        sound = Expert("llm/a", "llm", directory, ("word", "other"), None)
        assert pack(store, [sound]).failed == {}
        error = pack(store, [replace(sound, labels=("word", "unknown"))]).failed["llm/a"]
        assert isinstance(error, errors.WeightsMismatch)
        assert "tokenizer.json has no token for the label 'unknown': rename the label" in str(error)


def test_workspace_grows_with_the_rows_and_shrinks_with_the_precision(model_files):
    expert = llm("llm/a", model_files.write(model_files.config("qwen3_moe")))
    one, two = (backend_for("llm").workspace_bytes(expert, Precision.FP32, rows) for rows in (1, 2))
    assert 96 * 4 <= two - one <= 96 * 16 + 128 * 4  # logits of a row, the workspace of sampling, and a mask
    assert backend_for("llm").workspace_bytes(expert, Precision.BF16, 1) < one


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_iteration_behind_a_long_prefix_takes_no_more_than_its_workspace(model_files, precision):
    wide = {"hidden_size": 256, "max_position_embeddings": 8192}
    expert = llm("llm/a", model_files.write(model_files.config("llama") | wide))
    model = load_model(expert.weights, expert.id, DTYPES[precision])
    key_values = ModelKeyValues(model.spec, model.dtype)
    for sequence, length in ((0, 100), (1, 99), (2, 4096)):
        for first in range(0, length, 512):
            model.forward(TokenBatch.of([Chunk(sequence, first, [1] * min(512, length))]), key_values)
    batch = TokenBatch.of([Chunk(2, 4096, [1] * 500), Chunk(0, 100, [1]), Chunk(1, 99, [1])])
    with torch.profiler.profile(profile_memory=True) as profile:
        model.forward(batch, key_values)
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert changes, "the profiler sees allocations"
    assert max(accumulate(changes)) <= backend_for("llm").workspace_bytes(expert, precision, 3)
