"""Passes by one compiled call: the numbers of the calls one by one, and no model that they do not fit."""

import pytest
import torch

from experts.llm import model as models
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.kernels import products
from experts.llm.model import LanguageModel
from experts.llm.plain_layers import plain_layers
from experts.llm.quant import Int4Tensors, Int8Tensors
from experts.llm.token_batch import Chunk, TokenBatch
from tests.experts.llm.conftest import WHOLE_BLOCKS

NEEDS_KERNEL = pytest.mark.skipif(products.kernel() is None, reason="no compiled products for this CPU")
FORMS = {"int8": Int8Tensors, "int4": Int4Tensors}
PLAIN = {
    "norms and no bias": ("llama", {}),
    "biases": ("qwen2", {}),
    "norms of heads": ("qwen3", {}),
    "rotation of long contexts": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
}
OTHERS = {
    "windows and caps": ("gemma2", {}),
    "norms above one": ("gemma3_text", {}),
    "moe_experts": ("qwen2_moe", {}),
    "some layers with moe_experts": ("qwen3_moe", {}),
    "no gate": ("pr_moe", {"norm": "layernorm", "layer_norm_eps": 1e-5, "num_experts": [0, 0, 0]}),
    "rotation of a part of a head": ("phi3", {"partial_rotary_factor": 0.5}),
    "heads that no call reads": ("qwen3", {"head_dim": 8}),
}


def quantised(model_files, family, changes, form="int8", dtype=torch.float32):
    spec, tensors = model_files.read(family, **WHOLE_BLOCKS, **changes)
    return LanguageModel(spec, dict(FORMS[form](tensors, dtype)))


def layers_of(model):
    return plain_layers(model.spec, list(zip(model.parts[1:-1:2], model.parts[2:-1:2], strict=True)))


def written(model):
    """Hidden states and logits of three steps behind prompts of several lengths, and what is stored then."""
    key_values, lengths, found = ModelKeyValues(model.spec, model.dtype), [1, 31, 33], []
    for step in range(4):
        rows = enumerate(lengths)
        chunks = [
            Chunk(n, length + step - 1, (n + step,)) if step else Chunk(n, 0, (5,) * length) for n, length in rows
        ]
        batch = TokenBatch.of(chunks)
        hidden = model.hidden(batch, key_values)
        reserved = key_values.reserve(batch)
        stored = [reserved.prefill(layer, row) for layer in range(len(model.spec.layers)) for row in range(3)]
        found += [hidden, model.logits(hidden), *(part.clone() for one in stored for part in (one.keys, one.values))]
    return found


@NEEDS_KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", PLAIN)
def test_one_call_gives_the_bits_of_calls_one_by_one(kind, form, dtype, model_files, monkeypatch):
    family, changes = PLAIN[kind]
    model = quantised(model_files, family, changes, form, dtype)
    assert layers_of(model) is not None
    found = written(model)
    monkeypatch.setattr(models, "plain_layers", lambda *_: None)
    expected = written(quantised(model_files, family, changes, form, dtype))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@NEEDS_KERNEL
@pytest.mark.parametrize("kind", OTHERS)
def test_model_with_other_layers_is_run_step_by_step(kind, model_files):
    assert layers_of(quantised(model_files, *OTHERS[kind])) is None


@NEEDS_KERNEL
def test_model_that_is_not_quantised_is_run_step_by_step(model_files):
    spec, tensors = model_files.read("llama", **WHOLE_BLOCKS)
    assert layers_of(LanguageModel(spec, tensors)) is None


@NEEDS_KERNEL
def test_one_call_runs_the_weights_that_were_written_over_others(model_files, monkeypatch):
    spec, tensors = model_files.read("llama", **WHOLE_BLOCKS)
    held = dict(Int8Tensors(tensors, torch.float32))
    model = LanguageModel(spec, held)
    before = written(model)
    for tensor in held.values():
        tensor.copy_(tensor.flip(0))
    after = written(model)
    monkeypatch.setattr(models, "plain_layers", lambda *_: None)
    assert not torch.equal(before[1], after[1])
    assert all(torch.equal(*pair) for pair in zip(after, written(LanguageModel(spec, held)), strict=True))
