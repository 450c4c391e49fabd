"""LoRA adapters: what the merged model writes, one base held once, one pass for all; and refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.texts import weights_name
from experts import errors
from experts.backends import backend_for
from experts.expert import Expert, Precision
from experts.llm.adapter import open_adapter
from experts.llm.files.config import read_spec
from experts.llm.model import load_model
from experts.packed.packing import pack_line
from tests.experts.conftest import bound
from tests.experts.llm.adapters import write_adapter
from tests.experts.llm.conftest import FAMILIES, greedy, logits_of
from tests.experts.llm.gguf.writing import tiny_model, with_tensors_of, write_model
from tests.experts.llm.oracle import Pair
from tests.experts.llm.serving.test_family import Counting, texts_of

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [58])
PATTERNS = {
    "use_rslora": True, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"model.layers.1.self_attn.q_proj": 9},
}  # fmt: skip


def adapted(directory, adapter, name="llm/a"):
    return Expert(name, "llm", directory, (), None, adapter=adapter)


def model_of(expert, precision=Precision.FP32):
    return bound(expert, precision).model


@pytest.mark.parametrize("name", ["llama with biases and llama3 positions", "qwen2, tied", "qwen2_moe"])
def test_adapter_writes_what_the_merged_model_writes_in_transformers(name, tmp_path):
    pair = Pair(name, tmp_path)
    base = load_file(tmp_path / "model.safetensors")
    served = {one: tensor for one, tensor in base.items() if ".experts." not in one}
    folder, merged = write_adapter(tmp_path / "adapter", served, **PATTERNS)
    assert merged.keys() == served.keys()
    pair.oracle.load_state_dict(merged, strict=False)
    prompt = pair.prompts()[1]
    ours = model_of(adapted(tmp_path, folder))
    with torch.no_grad():
        expected = pair.oracle(torch.tensor([prompt])).logits[0]
    assert (logits_of(ours, prompt) - expected).abs().max() <= 1e-4
    assert (logits_of(pair.ours, prompt) - expected).abs().max() > 1, "the adapter changes the model"
    assert greedy(ours, [prompt], 9)[0] == [pair.oracle_s_tokens(prompt, 9)]


@pytest.mark.parametrize("family", FAMILIES)
def test_base_and_adapters_in_one_batch_write_what_they_write_alone(model_files, tmp_path, family):
    values, stored = model_files.stored(family)
    directory = model_files.write(values, stored)
    spec, tensors = read_spec(directory, "x"), load_model(directory, "x")
    base = dict(backend_for("llm").pack(adapted(directory, None), Precision.FP32).tensors)
    models = [Counting(tensors.spec, base)]
    served = {name: tensor for name, tensor in stored.items() if "experts." not in name}
    for seed, modules in enumerate((("q_proj", "o_proj", "up_proj", "down_proj"), ("v_proj", "gate_proj"))):
        adapter = open_adapter(write_adapter(tmp_path / f"{seed}", served, modules, seed=seed)[0], "x", spec)
        models.append(Counting(spec, base | {name: adapter.read(name) for name in adapter.names}))
    alone = {}
    for number, model in enumerate(models):
        desk = texts_of(models)
        desk.texts = {request: text for request, text in desk.texts.items() if desk.models[request] is model}
        alone |= {request: tokens for request, tokens in desk.finish().items() if request % 3 == number}
    for model in models:
        model.fed.clear()
    together = texts_of(models)
    assert together.finish() == alone
    iterations = together.engine.statistics().iterations
    assert sum(len(model.fed) for model in models) == iterations * len(spec.layers), "shared steps ran once"


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8, Precision.INT4])
def test_adapter_over_a_smaller_form_is_as_near_as_the_form(model_files, tmp_path, precision):
    values, stored = model_files.stored("llama", hidden_size=64, intermediate_size=128)
    base = model_files.write(values, stored)
    folder, merged = write_adapter(tmp_path / "adapter", stored)

    def error(expert, exact):
        return (logits_of(model_of(expert, precision), *PROMPTS).float() - logits_of(exact, *PROMPTS)).abs().mean()

    own = error(adapted(base, None), load_model(base, "x"))
    assert error(adapted(base, folder), load_model(model_files.write(values, merged), "x")) < 2.5 * own + 0.02


def test_adapter_over_a_gguf_file_has_its_order_of_heads(tmp_path):
    model = tiny_model("llama")
    path = write_model(tmp_path / "m.gguf", model, "Q8_0")
    read = with_tensors_of(path, model)
    folder, merged = write_adapter(tmp_path / "adapter", read.state_dict())
    read.load_state_dict(merged)
    ours = logits_of(model_of(adapted(path, folder)), PROMPTS[0])
    with torch.no_grad():
        assert (ours - read(torch.tensor([PROMPTS[0]])).logits[0]).abs().max() <= 1e-4


class TestPacked:
    @pytest.fixture(params=[1536])
    def experts(self, model_files, tmp_path, request):
        """Two adapters, then their base."""
        values, stored = model_files.stored("qwen3_moe", vocab_size=request.param, hidden_size=128)
        directory = model_files.write(values, stored)
        served = {name: tensor for name, tensor in stored.items() if "experts." not in name}
        folders = [write_adapter(tmp_path / f"a{seed}", served, seed=seed, r=seed + 2)[0] for seed in range(2)]
        return [adapted(directory, folder, f"llm/{n}") for n, folder in enumerate([*folders, None])]

    def packed(self, store, experts):
        report = pack_line(experts, lambda expert: {Precision.FP32}, store)
        assert report.failed == {}
        return {name: forms[Precision.FP32] for name, forms in report.packed.items()}

    @pytest.mark.parametrize("has_base", [True, False])
    def test_base_is_held_once_and_prefixes_are_not_shared(self, store, experts, has_base):
        experts = experts if has_base else experts[:2]
        packed = self.packed(store, experts)
        assert len({each.shared for each in packed.values()}) == 1
        for expert in experts[:2]:
            stored = load_file(expert.adapter / "adapter_model.safetensors")
            assert {spec.name.count("lora") for spec in packed[expert.id].own.tensors} == {1}
            assert packed[expert.id].own.size_bytes < 1.1 * sum(one.nbytes for one in stored.values()) + 4096
        copies = [ExpertCopy(each.id, each, packed[each.id]) for each in experts]
        assert len({weights_name(copy) for copy in copies}) == len(experts)

    @pytest.mark.parametrize("experts", [96, 1536], indirect=True, ids=["base too small to share", "shared base"])
    def test_packed_adapter_answers_as_its_files_do(self, store, make_slot, experts):
        packed = self.packed(store, experts)
        for expert in experts:
            served = make_slot(expert, packed[expert.id], store).skeleton.model
            torch.testing.assert_close(logits_of(served, *PROMPTS), logits_of(model_of(expert), *PROMPTS))

    def test_further_adapter_leaves_the_packed_base_alone(self, store, experts):
        before = self.packed(store, experts[2:])["llm/2"]
        kept = {path: path.stat().st_ino for path in (store.directory / "segments").iterdir()}
        after = self.packed(store, experts)
        assert {segment.sha256 for segment in after["llm/0"].shared} == {one.sha256 for one in before.segments}
        assert kept.items() <= {path: path.stat().st_ino for path in (store.directory / "segments").iterdir()}.items()

    def test_changed_adapter_packs_its_own_tensors_again(self, store, experts, tmp_path):
        before = self.packed(store, experts)
        config = tmp_path / "a0" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1}))
        after = self.packed(store, experts)
        assert [after[name].own.sha256 == before[name].own.sha256 for name in before] == [True, False, True]
        assert after["llm/0"].shared == before["llm/0"].shared


def without(half):
    return lambda tensors: {name: one for name, one in tensors.items() if half not in name}


def with_tensor(name, shape):
    return lambda tensors: tensors | {f"base_model.model.{name}": torch.zeros(shape)}


@pytest.mark.parametrize(
    ("config", "changes", "told"),
    [
        ({"use_dora": True}, None, "adapter_config.json: use_dora: True is not served: merge it"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save: ['lm_head'] is not served"),
        ({"a_later_field": 1}, None, "a_later_field: 1 is not served"),
        ({"bias": "all"}, None, "bias: 'all' is not served"),
        ({"peft_type": "IA3"}, None, "peft_type: 'IA3' is not served"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights: 'pissa' is not served"),
        ({"rank_pattern": {"(": 1}}, None, "rank and alpha of model.layers.0.mlp.down_proj cannot be computed"),
        ({}, with_tensor("lm_head.lora_A.weight", (4, 32)), "lm_head.lora_A.weight is not served"),
        ({}, with_tensor("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", (4, 32)), "is not served"),
        ({}, with_tensor("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 48)), "(4, 48) instead of (4, 32)"),
        ({}, without("layers.1.self_attn.q_proj.lora_B"), "layers.1.self_attn.q_proj.lora_A.weight lacks its other"),
        ({}, lambda tensors: {}, "holds no tensor of an adapter"),
    ],
)  # fmt: skip
def test_adapter_that_cannot_be_served_is_refused_by_name(model_files, tmp_path, config, changes, told):
    values, stored = model_files.stored("llama")
    folder, _ = write_adapter(tmp_path / "adapter", stored, changes=changes or (lambda tensors: tensors), **config)
    with pytest.raises(errors.WeightsError) as caught:
        backend_for("llm").check(adapted(model_files.write(values, stored), folder))
    assert told in str(caught.value)
    assert caught.value.key == "adapter"
