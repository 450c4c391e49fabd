"""DeepSpeed's checkpoints, written here in its layout, against their own tensors' formulas."""

import argparse
import enum
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm, linear

from experts.checkpoints.reading_process import convert_state
from experts.errors import TrainingUnsupported, WeightsMismatch, WeightsMissing, WeightsRefused
from experts.llm.importing import deepspeed
from experts.llm.importing.deepspeed import import_deepspeed as import_apart
from experts.llm.model import load_model
from experts.llm.serving.extents import ModelKeyValues
from experts.llm.token_batch import Chunk, TokenBatch

HIDDEN, HEADS, WIDTH, VOCABULARY, CONTEXT = 16, 4, 24, 40, 32
EXPERTS = (0, 2, 0, 3)  # a pyramid over every second layer
PROMPT = [5, 17, 3, 38, 31, 2, 9]


def import_deepspeed(*arguments, **named):
    """In this process: what is read here was written here, and a process of its own takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            deepspeed, "convert_states", lambda _, files, folder: [convert_state(one, folder) for one in files]
        )
        return import_apart(*arguments, **named)


class ModelType(enum.Enum):
    """What a trainer keeps in its arguments, and nobody else has."""

    ENCODER = 1


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def arguments(**changes):
    """As Megatron keeps them."""
    values = {
        "num_layers": len(EXPERTS), "hidden_size": HIDDEN, "num_attention_heads": HEADS, "topk": 1,
        "layernorm_epsilon": 1e-5, "bias_gelu_fusion": True, "params_dtype": torch.float32,
        "model_type": ModelType.ENCODER, "num_experts": [2, 3],
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def gpt_tensors(residual="coefficient", attention="self_attention", moe="mlp.deepspeed_moe"):
    """A whole model by Megatron's names below language_model, as one rank has them."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        drawn = torch.randn(shape, generator=generator)
        return drawn / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * drawn

    def mlp(name):
        return {
            f"{name}.dense_h_to_4h.weight": random(WIDTH, HIDDEN), f"{name}.dense_h_to_4h.bias": random(WIDTH),
            f"{name}.dense_4h_to_h.weight": random(HIDDEN, WIDTH), f"{name}.dense_4h_to_h.bias": random(HIDDEN),
        }  # fmt: skip

    tensors = {
        "embedding.word_embeddings.weight": random(VOCABULARY, HIDDEN),
        "embedding.position_embeddings.weight": random(CONTEXT, HIDDEN),
    }
    for layer, experts in enumerate(EXPERTS):
        own = f"encoder.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= {f"{own}.{norm}.weight": 1 + random(HIDDEN), f"{own}.{norm}.bias": random(HIDDEN)}
        tensors |= {
            f"{own}.{attention}.query_key_value.weight": random(3 * HIDDEN, HIDDEN),
            f"{own}.{attention}.query_key_value.bias": random(3 * HIDDEN),
            f"{own}.{attention}.dense.weight": random(HIDDEN, HIDDEN),
            f"{own}.{attention}.dense.bias": random(HIDDEN),
        }
        if not experts:
            tensors |= mlp(f"{own}.mlp")
            continue
        tensors[f"{own}.{moe}.gate.wg.weight"] = random(experts, HIDDEN)
        for number in range(experts):
            tensors |= mlp(f"{own}.{moe}.experts.deepspeed_experts.{number}")
        if residual:
            tensors |= mlp(f"{own}.mlp.mlp")
        if residual == "coefficient":
            tensors |= {f"{own}.mlp.coefficient.weight": random(2, HIDDEN), f"{own}.mlp.coefficient.bias": random(2)}
    return tensors | {
        "encoder.final_layernorm.weight": 1 + random(HIDDEN),
        "encoder.final_layernorm.bias": random(HIDDEN),
    }


class Reference:
    """The model as Megatron-DeepSpeed computes it, over its own tensors, for one text."""

    def __init__(self, tensors, version=3.0, topk=1, is_tanh=True):
        self.tensors = tensors
        self.version = version
        self.topk = topk
        self.approximate = "tanh" if is_tanh else "none"

    def logits(self, token_ids):
        embedding = self.tensors["embedding.word_embeddings.weight"]
        tokens = embedding[token_ids] + self.tensors["embedding.position_embeddings.weight"][: len(token_ids)]
        for layer, experts in enumerate(EXPERTS):
            own = f"encoder.layers.{layer}"
            tokens = tokens + self.attention(self.norm(tokens, f"{own}.input_layernorm"), own)
            normed = self.norm(tokens, f"{own}.post_attention_layernorm")
            tokens = tokens + (self.moe(normed, own, experts) if experts else self.mlp(normed, f"{own}.mlp"))
        return linear(self.norm(tokens, "encoder.final_layernorm"), embedding)

    def of(self, ending):
        (name,) = (name for name in self.tensors if name.endswith(ending))
        return name

    def linear(self, tokens, name):
        return linear(tokens, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, tokens, name):
        return layer_norm(tokens, (HIDDEN,), self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], 1e-5)

    def attention(self, tokens, own):
        where = "attention" if f"{own}.attention.dense.weight" in self.tensors else "self_attention"
        fused = self.linear(tokens, f"{own}.{where}.query_key_value")
        size = HIDDEN // HEADS
        attended = []
        for head in range(HEADS):
            rows = {
                0: [range(kind * HIDDEN + head * size, kind * HIDDEN + head * size + size) for kind in range(3)],
                1: [range(3 * head * size + kind, 3 * (head + 1) * size, 3) for kind in range(3)],
                3: [range((3 * head + kind) * size, (3 * head + kind + 1) * size) for kind in range(3)],
            }[int(self.version)]
            query, key, value = (fused[:, list(one)] for one in rows)
            scores = query @ key.T / math.sqrt(size)
            future = torch.ones_like(scores).triu(1).bool()
            attended.append(scores.masked_fill(future, -math.inf).softmax(dim=-1) @ value)
        return self.linear(torch.cat(attended, dim=-1), f"{own}.{where}.dense")

    def moe(self, tokens, own, experts):
        """deepspeed/moe: shares of several choices are made to sum to 1; the coefficient weighs the branches."""
        gate = self.of(f"layers.{own.rpartition('.')[2]}.mlp.deepspeed_moe.gate.wg.weight").removesuffix(".weight")
        moe = gate.removesuffix(".gate.wg")
        shares, chosen = self.linear(tokens, gate).softmax(dim=-1).topk(self.topk, dim=-1)
        if self.topk > 1:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        all_of_them = torch.stack([self.mlp(tokens, f"{moe}.experts.deepspeed_experts.{n}") for n in range(experts)])
        mixed = sum(shares[:, n, None] * all_of_them[chosen[:, n], torch.arange(len(tokens))] for n in range(self.topk))
        if f"{own}.mlp.mlp.dense_h_to_4h.weight" not in self.tensors:
            return mixed
        beside = self.mlp(tokens, f"{own}.mlp.mlp")
        if f"{own}.mlp.coefficient.weight" not in self.tensors:
            return mixed + beside
        weights = self.linear(tokens, f"{own}.mlp.coefficient").softmax(dim=-1)
        return mixed * weights[:, :1] + beside * weights[:, 1:]

    def mlp(self, tokens, name):
        raised = gelu(self.linear(tokens, f"{name}.dense_h_to_4h"), approximate=self.approximate)
        return self.linear(raised, f"{name}.dense_4h_to_h")


def nested(tensors):
    """As Megatron saves them: dictionaries below language_model, dotted within."""
    below = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        below.setdefault(part, {})[rest] = tensor
    embedding = {name.partition(".")[0]: {"weight": tensor} for name, tensor in below.pop("embedding").items()}
    return {"language_model": {"embedding": embedding, **below}}


def write(folder, tensors, args, version=3.0, ranks=1, is_old=False, module=nested):
    """A checkpoint of ranks that share what tensor parallelism lets them share; experts are each rank's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        mine = {name: part_of(name, tensor, rank, ranks, version) for name, tensor in tensors.items()}
        experts = {name: tensor for name, tensor in mine.items() if "deepspeed_experts" in name}
        rest = {name: tensor for name, tensor in mine.items() if name not in experts}
        document = {"module": module(rest), "args": args, "iteration": 7, "optimizer": None}
        if version is not None:
            document["checkpoint_version"] = version
        torch.save(document, folder / f"mp_rank_{rank:02}_model_states.pt")
        for file, held in by_file(experts, rank, is_old).items():
            torch.save({f"language_model.{name}": tensor for name, tensor in held.items()}, folder / file)
    return folder


def by_file(experts, rank, is_old):
    layers = sorted({name.split(".")[2] for name in experts}, key=int)
    files = {}
    for name, tensor in experts.items():
        number = name.partition("deepspeed_experts.")[2].partition(".")[0]
        layer = "" if is_old else f"layer_{layers.index(name.split('.')[2])}_"  # moe layers are counted, not layers
        files.setdefault(f"{layer}expert_{number}_mp_rank_{rank:02}_model_states.pt", {})[name] = tensor
    return files


def part_of(name, tensor, rank, ranks, version):
    if ranks == 1 or "deepspeed_" in name or ".mlp.mlp." in name:
        return tensor
    if "query_key_value" in name and version == 0:
        return torch.cat([kind.chunk(ranks)[rank] for kind in tensor.chunk(3)])
    if "dense_h_to_4h" in name or "query_key_value" in name or "word_embeddings" in name:
        return tensor.chunk(ranks)[rank].clone()
    if name.endswith(("dense_4h_to_h.weight", "attention.dense.weight")):
        return tensor.chunk(ranks, dim=1)[rank].clone()
    return tensor


def logits(directory):
    model = load_model(directory, "imported")
    batch = TokenBatch.of([Chunk(0, 0, PROMPT)])
    return model.logits(model.hidden(batch, ModelKeyValues(model.spec, torch.float32)))


def assert_same(directory, reference):
    assert (logits(directory) - reference.logits(PROMPT)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("made", "args", "written", "expected"),
    [
        ({}, {}, {}, {}),
        ({"residual": None, "attention": "attention"}, {}, {}, {}),
        ({}, {"topk": 2, "bias_gelu_fusion": False}, {}, {"topk": 2, "is_tanh": False}),
        ({}, {}, {"is_old": True}, {}),  # all layers of an expert in one file
        *(
            ({}, {}, {"version": version, "ranks": ranks}, {"version": 3 if version == 2 else version})
            for version in (0, 1.0, 2.0, 3.0)
            for ranks in (1, 2)
        ),
    ],
)
def test_a_gpt_says_what_it_said(tmp_path, made, args, written, expected):
    tensors = gpt_tensors(**made)
    imported = import_deepspeed(write(tmp_path / "ds", tensors, arguments(**args), **written), tmp_path / "out")
    assert imported.moe_experts == EXPERTS
    assert_same(tmp_path / "out", Reference(tensors, **expected))


def test_the_residual_policy_s_names_are_the_same_model(tmp_path):
    usual, behind = gpt_tensors(), gpt_tensors(moe="mlp.moe.deepspeed_moe")
    for name, tensors in (("usual", usual), ("behind", behind)):
        import_deepspeed(write(tmp_path / name, tensors, arguments()), tmp_path / f"{name}-out")
    assert torch.equal(logits(tmp_path / "usual-out"), logits(tmp_path / "behind-out"))


def test_experts_may_be_shared_among_ranks(tmp_path):
    tensors = gpt_tensors()
    folder = write(tmp_path / "ds", tensors, arguments(), ranks=2)
    for file in folder.glob("*expert*"):
        rank = int(file.name.partition("mp_rank_")[2][:2])
        held = torch.load(file, weights_only=True)
        torch.save({name: halved(name, tensor, rank) for name, tensor in held.items()}, file)
    for rank in range(2):
        file = folder / f"mp_rank_{rank:02}_model_states.pt"
        document = torch.load(file, weights_only=False)
        encoder = document["module"]["language_model"]["encoder"]
        encoder |= {name: halved(name, tensor, rank) for name, tensor in encoder.items() if ".mlp.mlp." in name}
        torch.save(document, file)
    import_deepspeed(folder, tmp_path / "out")
    assert_same(tmp_path / "out", Reference(tensors))


def halved(name, tensor, rank):
    if name.endswith("dense_4h_to_h.bias"):
        return tensor
    return tensor.chunk(2, dim=1 if "4h_to_h" in name else 0)[rank].clone()


def test_a_flat_state_dict_and_a_tag_are_known_in_a_process_of_its_own(tmp_path):
    tensors = gpt_tensors()
    write(tmp_path / "ds" / "global_step7", tensors, arguments(), module=dict)
    (tmp_path / "ds" / "latest").write_text("global_step7")
    import_apart(tmp_path / "ds", tmp_path / "out")
    assert_same(tmp_path / "out", Reference(tensors))


def test_what_the_checkpoint_does_not_tell_is_asked_for_one_by_one(tmp_path):
    tensors = gpt_tensors()
    folder = write(tmp_path / "ds", tensors, args=None, version=None)
    wanted = {
        "num_attention_heads": HEADS, "layernorm_epsilon": 1e-5, "bias_gelu_fusion": True, "topk": 1,
        "checkpoint_version": 3,
    }  # fmt: skip
    given = {}
    for name, value in wanted.items():
        with pytest.raises(TrainingUnsupported, match=f"{name} .*--arg {name}="):
            import_deepspeed(folder, tmp_path / "out", given)
        assert not (tmp_path / "out").exists()
        given[name] = value
    import_deepspeed(folder, tmp_path / "out", given)
    assert_same(tmp_path / "out", Reference(tensors))


def test_a_residual_without_a_coefficient_is_the_paper_s_once_that_is_said(tmp_path):
    tensors = gpt_tensors(residual="sum")
    folder = write(tmp_path / "ds", tensors, arguments())
    with pytest.raises(TrainingUnsupported, match="--arg residual=add"):
        import_deepspeed(folder, tmp_path / "out")
    import_deepspeed(folder, tmp_path / "out", {"residual": "add"})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["residual"] == "add"
    assert_same(tmp_path / "out", Reference(tensors))


def test_a_tokenizer_comes_along(tmp_path):
    folder = write(tmp_path / "ds", gpt_tensors(), arguments())
    with pytest.raises(WeightsMissing, match=r"tokenizer\.json"):
        import_deepspeed(folder, tmp_path / "out", tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert import_deepspeed(folder, tmp_path / "out", tokenizer=tmp_path).has_tokenizer
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def rewritten(folder, change):
    """The first rank's module with one entry more, or None for one less."""
    file = folder / "mp_rank_00_model_states.pt"
    document = torch.load(file, weights_only=False)
    encoder = document["module"]["language_model"]["encoder"]
    for name, tensor in change.items():
        encoder[name] = tensor
        if tensor is None:
            del encoder[name]
    torch.save(document, file)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lambda folder: (folder / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink(), WeightsMismatch,
         "layer 3, whose gate knows 3 experts, lacks expert 2"),
        (lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(), WeightsMissing, "mp_rank_<n>_model_states"),
        (lambda folder: rewritten(folder, {"layers.1.mlp.coefficient.bias": None}), WeightsMismatch,
         r"missing.*layers\.1\.mlp\.coefficient\.bias"),
        (lambda folder: rewritten(folder, {"layers.0.rotary.inv_freq": torch.ones(2)}), WeightsMismatch,
         "no tensors of a GPT.*rotary"),
        (lambda folder: rewritten(folder, {"layers.2.mlp.dense_h_to_4h.bias": torch.ones(5)}), WeightsMismatch,
         "of another shape"),
        (lambda folder: (folder / "layer_00-model_00-model_states.pt").write_bytes(b""), WeightsRefused, "pipeline"),
        (lambda folder: (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b""), WeightsRefused,
         "zero_to_fp32"),
        (lambda folder: (folder.parent / "out").write_bytes(b""), WeightsRefused, "is there already"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_nothing_is_left(tmp_path, damage, error, said):
    folder = write(tmp_path / "ds", gpt_tensors(), arguments())
    damage(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=said):
        import_deepspeed(folder, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["swiglu", "apply_layernorm_1p", "num_key_value_heads"])
def test_an_argument_that_would_change_the_numbers_is_refused(tmp_path, name):
    folder = write(tmp_path / "ds", gpt_tensors(), arguments(**{name: 2 if name.startswith("num") else True}))
    with pytest.raises(TrainingUnsupported, match=name):
        import_deepspeed(folder, tmp_path / "out")


@pytest.mark.parametrize("function", [os.system, subprocess.check_call, eval])
def test_nothing_of_a_pickle_runs(tmp_path, function):
    """What it would call is read as a name, and refused as one that no weights need."""
    tensors = gpt_tensors()
    marker = tmp_path / "it-ran"
    command = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    argument = command if function is eval else [sys.executable, "-c", command]
    argument = f"touch {marker}" if function is os.system else argument
    args = arguments(tensorboard=Malicious(function, argument))
    folder = write(tmp_path / "ds", tensors, args)
    with pytest.raises(WeightsRefused, match=r"mp_rank_00_model_states\.pt: .*nothing was run"):
        import_apart(folder, tmp_path / "out")
    assert not marker.exists()


def test_what_is_no_checkpoint_is_not_taken_for_one(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMissing, match="as a checkpoint of DeepSpeed does"):
        import_deepspeed(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsRefused, match="nothing is to be imported, name it as `weights:` of an llm"):
        import_deepspeed(tmp_path, tmp_path / "to")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(WeightsMissing, match="no folder beside it"):
        import_deepspeed(tmp_path, tmp_path / "out")
