"""AWQ's and GPTQ's matrices of four bits: the numbers that their levels, zero points and scales stand for."""

import pytest
import torch

from experts.errors import ModelUnsupported, WeightsCorrupt, WeightsMismatch
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import read_spec
from experts.llm.model import load_model
from tests.experts.llm.conftest import logits_of, tiny_config

GROUP = 16
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # as AutoAWQ packs: the n-th place of an int32 holds this neighbour
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def packed(levels, order=range(8)):
    """Eight levels of a row in each int32, as the quantisers' own loops write them."""
    words = torch.zeros(levels.shape[0], levels.shape[1] // 8, dtype=torch.int64)
    for place, neighbour in enumerate(order):
        words |= levels[:, neighbour::8] << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantised(tensors, settings):
    """Stored tensors with matrices of four bits, and the same tensors with the numbers that these stand for."""
    generator = torch.Generator().manual_seed(1)
    stored, numbers = {}, {}
    for name, tensor in tensors.items():
        if not any(kind in name for kind in QUANTISED) or not name.endswith(".weight"):
            stored[name] = numbers[name] = tensor.half()
            continue
        stem, (outs, ins) = name.removesuffix(".weight"), tensor.shape
        levels = torch.randint(0, 16, (ins, outs), generator=generator)
        zeros = torch.randint(0, 16, (ins // GROUP, outs), generator=generator)
        if settings.get("sym"):
            zeros[:] = 8
        scales = (0.01 + 0.02 * torch.rand(zeros.shape, generator=generator)).half()
        groups = torch.arange(ins) // GROUP
        if settings.get("desc_act"):
            groups = groups[torch.randperm(ins, generator=generator)]
        numbers[name] = ((levels - zeros[groups]) * scales.double()[groups]).float().t().contiguous()
        if settings["quant_method"] == "awq":
            words, middles = packed(levels, AWQ_ORDER), packed(zeros, AWQ_ORDER)
        else:
            offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
            words, middles = packed(levels.t()).t().contiguous(), packed((zeros - offset) & 15)
            stored |= {f"{stem}.g_idx": groups.to(torch.int32), f"{stem}.bias": torch.zeros(outs)}
        stored |= {f"{stem}.qweight": words, f"{stem}.qzeros": middles, f"{stem}.scales": scales}
    return stored, numbers


@pytest.mark.parametrize(
    "settings",
    [
        AWQ, GPTQ, {**GPTQ, "sym": True}, {**GPTQ, "desc_act": True}, {**GPTQ, "checkpoint_format": "gptq_v2"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_numbers_are_exactly_those_that_the_quantiser_meant(model_files, family, settings):
    values = tiny_config(family)
    stored, numbers = quantised(model_files.tensors(values), settings)
    directory = model_files.write({**values, "quantization_config": settings}, stored)
    plain = model_files.write(values, numbers)
    ours, theirs = (
        open_checkpoint(one, "x", read_spec(one, "x")).read_all(torch.float32) for one in (directory, plain)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(
        logits_of(load_model(directory, "x"), [1, 2, 3]), logits_of(load_model(plain, "x", torch.float32), [1, 2, 3])
    )


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"), ({"bits": 8}, "bits"), ({"version": "gemv"}, "version"),
        ({"zero_point": False}, "zero_point"), ({"quant_method": "gptq", "dynamic": {"-:.*": {}}}, "dynamic"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format"),
    ],
)  # fmt: skip
def test_quantisation_that_is_not_read_is_refused_by_name(model_files, changed, field):
    with pytest.raises(ModelUnsupported, match=f"quantization_config.{field}"):
        read_spec(model_files.write(tiny_config("llama", quantization_config={**AWQ, **changed})), "x")


def test_parts_of_a_matrix_that_do_not_fit_are_refused(model_files):
    values = {**tiny_config("llama"), "quantization_config": GPTQ}
    stored, _ = quantised(model_files.tensors(values), GPTQ)
    name = "model.layers.0.mlp.up_proj"
    for changed, error, said in (
        ({f"{name}.g_idx": torch.full((32,), 2, dtype=torch.int32)}, WeightsCorrupt, f"{name}.weight"),
        ({f"{name}.scales": torch.ones(2, 8).half()}, WeightsCorrupt, f"{name}.weight"),
        ({f"{name}.bias": torch.ones(48)}, WeightsMismatch, f"unexpected: {name}.bias"),
    ):
        directory = model_files.write(values, {**stored, **changed})
        with pytest.raises(error, match=said):
            load_model(directory, "x")
