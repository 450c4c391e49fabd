"""DeepSpeed's checkpoints, written here in its layout: the import has every tensor, and says what to compute of them.

What a model of such a directory computes: see test_pyramid_residual.py.
"""

import argparse
import enum
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.checkpoints.conversion import convert_state
from experts.errors import TrainingUnsupported, WeightsMismatch, WeightsMissing, WeightsRefused
from experts.llm.files.config import parse_spec, read_spec
from experts.llm.importing import deepspeed
from experts.llm.importing.deepspeed import import_deepspeed as import_apart
from tests.experts.checkpoints.hostile import Calling
from tests.experts.llm.conftest import ModelFiles

HIDDEN, HEADS = 16, 4
EXPERTS = (0, 2, 0, 3)  # a pyramid over every second layer
VALUES = {
    "model_type": "pr_moe", "vocab_size": 40, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 32, "attention_bias": True,
    "norm": "layernorm", "layer_norm_eps": 1e-5, "positions": "learned", "mlp": "gelu_tanh", "mlp_bias": True,
    "tie_word_embeddings": True, "num_experts": list(EXPERTS), "num_experts_per_tok": 1, "norm_topk_prob": False,
    "residual": "softmax",
}  # fmt: skip


def import_deepspeed(*arguments, **named):
    """In this process: what is read here was written here, and a process of its own takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            deepspeed,
            "convert_states",
            lambda _, files, folder: [convert_state(one, folder / f"{one.name}.safetensors") for one in files],
        )
        return import_apart(*arguments, **named)


class ModelType(enum.Enum):
    ENCODER = 1


def arguments(**changes):
    values = {
        "num_layers": len(EXPERTS), "hidden_size": HIDDEN, "num_attention_heads": HEADS, "topk": 1,
        "layernorm_epsilon": 1e-5, "bias_gelu_fusion": True, "params_dtype": torch.float32,
        "model_type": ModelType.ENCODER, "num_experts": [2, 3],
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


NAMES = {  # of a directory, and Megatron's below language_model
    "model.embed_tokens": "embedding.word_embeddings", "model.embed_positions": "embedding.position_embeddings",
    "model.norm": "encoder.final_layernorm", "model.layers": "encoder.layers",
    "self_attn.o_proj": "self_attention.dense", "mlp.residual": "mlp.mlp", "mlp.gate.": "mlp.deepspeed_moe.gate.wg.",
    "mlp.experts": "mlp.deepspeed_moe.experts.deepspeed_experts", "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}  # fmt: skip


class Gpt:
    """A model as the directory that its import writes, and as Megatron's tensors of one rank."""

    def __init__(self, **changes):
        self.values = {**VALUES, **changes}
        self.stored = ModelFiles(None).tensors(self.values)
        if self.values["residual"] == "softmax":
            biases = {f"model.layers.{layer}.mlp.coefficient.bias": torch.ones(2) for layer in (1, 3)}
            self.stored |= biases

    def tensors(self, version=3.0):
        tensors = {}
        for name, tensor in self.stored.items():
            if ".q_proj" in name:
                parts = [self.stored[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
                fused = name.replace("model", "encoder").replace("self_attn.q_proj", "self_attention.query_key_value")
                by_kind = torch.stack(parts).unflatten(1, (HEADS, -1))  # (kind, head, ...)
                tensors[fused] = by_kind.movedim(0, {0: 0, 1: 2, 2: 1, 3: 1}[int(version)]).flatten(0, 2)
            elif "k_proj" not in name and "v_proj" not in name:
                for ours, theirs in NAMES.items():
                    name = name.replace(ours, theirs)
                tensors[name] = tensor
        return tensors

    def assert_is(self, directory):
        found = {name: one for file in directory.glob("*.safetensors") for name, one in load_file(file).items()}
        assert read_spec(directory, "imported") == parse_spec(self.values, "imported")
        assert found.keys() == self.stored.keys()
        assert all(torch.equal(found[name], self.stored[name]) for name in found)


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


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("made", "args", "written", "change"),
    [
        ({}, {}, {}, dict),
        ({"residual": None}, {}, {}, renamed("self_attention", "attention")),
        ({"num_experts_per_tok": 2, "norm_topk_prob": True, "mlp": "gelu"}, {"topk": 2, "bias_gelu_fusion": False}, {},
         dict),
        ({}, {}, {"is_old": True}, dict),  # all layers of an expert in one file
        ({}, {}, {}, renamed("mlp.deepspeed_moe", "mlp.moe.deepspeed_moe")),  # by the residual policy
        *(({}, {}, {"version": version, "ranks": ranks}, dict) for version in (0, 1.0, 2.0, 3.0) for ranks in (1, 2)),
    ],
)  # fmt: skip
def test_imported_gpt_answers_as_the_original(tmp_path, made, args, written, change):
    gpt = Gpt(**made)
    tensors = change(gpt.tensors(written.get("version", 3.0)))
    imported = import_deepspeed(write(tmp_path / "ds", tensors, arguments(**args), **written), tmp_path / "out")
    assert imported.moe_experts == EXPERTS
    gpt.assert_is(tmp_path / "out")


def test_moe_experts_may_be_shared_among_ranks(tmp_path):
    gpt = Gpt()
    folder = write(tmp_path / "ds", gpt.tensors(), arguments(), ranks=2)
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
    gpt.assert_is(tmp_path / "out")


def halved(name, tensor, rank):
    if name.endswith("dense_4h_to_h.bias"):
        return tensor
    return tensor.chunk(2, dim=1 if "4h_to_h" in name else 0)[rank].clone()


def test_flat_state_dict_and_tag_are_imported_in_a_separate_process(tmp_path):
    gpt = Gpt()
    write(tmp_path / "ds" / "global_step7", gpt.tensors(), arguments(), module=dict)
    (tmp_path / "ds" / "latest").write_text("global_step7")
    import_apart(tmp_path / "ds", tmp_path / "out")
    gpt.assert_is(tmp_path / "out")


def test_missing_arguments_of_a_checkpoint_are_asked_for_one_by_one(tmp_path):
    gpt = Gpt()
    folder = write(tmp_path / "ds", gpt.tensors(), args=None, version=None)
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
    gpt.assert_is(tmp_path / "out")


def test_residual_without_a_coefficient_is_the_papers_if_declared(tmp_path):
    gpt = Gpt(residual="add")
    folder = write(tmp_path / "ds", gpt.tensors(), arguments())
    with pytest.raises(TrainingUnsupported, match="--arg residual=add"):
        import_deepspeed(folder, tmp_path / "out")
    import_deepspeed(folder, tmp_path / "out", {"residual": "add"})
    gpt.assert_is(tmp_path / "out")


def test_tokenizer_is_imported_too(tmp_path):
    folder = write(tmp_path / "ds", Gpt().tensors(), arguments())
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
        (lambda folder: (folder.parent / "out").write_bytes(b""), WeightsRefused, "exists already"),
    ],
)  # fmt: skip
def test_faulty_checkpoint_is_named_and_leaves_nothing(tmp_path, damage, error, said):
    folder = write(tmp_path / "ds", Gpt().tensors(), arguments())
    damage(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=said):
        import_deepspeed(folder, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["swiglu", "apply_layernorm_1p", "num_key_value_heads"])
def test_argument_that_would_change_the_numbers_is_refused(tmp_path, name):
    folder = write(tmp_path / "ds", Gpt().tensors(), arguments(**{name: 2 if name.startswith("num") else True}))
    with pytest.raises(TrainingUnsupported, match=name):
        import_deepspeed(folder, tmp_path / "out")


def test_no_pickle_of_a_checkpoint_runs(tmp_path):
    """Other ways to run something: see tests/experts/checkpoints."""
    marker = tmp_path / "it-ran"
    folder = write(tmp_path / "ds", Gpt().tensors(), arguments(tensorboard=Calling(os.system, f"touch {marker}")))
    with pytest.raises(WeightsRefused, match=r"mp_rank_00_model_states\.pt: .*nothing was run"):
        import_apart(folder, tmp_path / "out")
    assert not marker.exists()


def test_folder_that_is_no_checkpoint_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMissing, match="as a checkpoint of DeepSpeed does"):
        import_deepspeed(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsRefused, match="needs no import: name it as `weights:` of an llm"):
        import_deepspeed(tmp_path, tmp_path / "to")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(WeightsMissing, match="no folder beside it"):
        import_deepspeed(tmp_path, tmp_path / "out")
