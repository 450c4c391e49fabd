"""moe_experts on a device, as fake tensors on CUDA: a mixture of devices raises, and so does each synchronisation."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from experts.llm import dispatch
from experts.llm.model import LanguageModel, run_steps
from experts.llm.tiers import offload
from experts.llm.tiers.cache import PlacedMoeExpert
from tests.experts.llm.conftest import MOE_FAMILIES, WHOLE_BLOCKS, block_form
from tests.experts.llm.fake_device import FORMS, there


@pytest.fixture
def device(monkeypatch):
    """Sets the capability of a CUDA device that knows shapes, number formats and devices, and no numbers."""
    return lambda *capability: monkeypatch.setattr(dispatch, "capability_of", lambda of: capability)


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize(("form", "has_triton"), [*((form, False) for form in FORMS), ("int8", True), ("int4", True)])
def test_pass_of_a_moe_model_on_a_device_asks_for_no_number(model_files, device, monkeypatch, family, form, has_triton):
    device(8, 0)
    monkeypatch.setattr(dispatch, "takes_grouped_product", lambda rows, matrices: has_triton)
    monkeypatch.setattr(dispatch, "grouped_product", lambda rows, own, ends: rows.new_empty(len(rows), own.out_size))
    spec, tensors = model_files.read(family, **WHOLE_BLOCKS)
    held = dict(FORMS[form](tensors))
    with FakeTensorMode(), torch.inference_mode():
        model = LanguageModel(spec, there(held))
        for tokens in (1, 7, 200):
            ids = torch.zeros(tokens, dtype=torch.int64, device="cuda")
            hidden = run_steps(model, lambda _, step, *own: step(model, *own), ids, ids, lambda _, own, *stored: own)
            assert model.logits(hidden).device.type == "cuda"


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden", "way"),
    [
        ((8, 0), torch.bfloat16, 64, dispatch.run_grouped),
        ((7, 5), torch.bfloat16, 64, dispatch.run_tiled),  # torch would copy the offsets to the host
        ((9, 0), torch.float16, 64, dispatch.run_tiled),
        ((9, 0), torch.float32, 64, dispatch.run_tiled),
        ((8, 0), torch.bfloat16, 60, dispatch.run_tiled),  # rows that are not aligned
    ],
)
def test_devices_way_is_chosen_by_its_capability_and_by_shapes(device, capability, dtype, hidden, way):
    device(*capability)
    with FakeTensorMode():
        up, down = (torch.empty(4, *shape, dtype=dtype, device="cuda") for shape in ((32, hidden), (hidden, 32)))
        weights = dispatch.MlpWeights(dispatch.Mlp.GELU, up, down)
        rows = torch.empty(80, hidden, dtype=dtype, device="cuda")
        assert dispatch.way_of_running(rows, None, weights) is way, "the table has numbers of the device"


class Resident:
    """A cache in which each moe_expert has the place of its number."""

    need = used = predict = end_pass = lambda *given: None

    def first_of(self, wanted, make_room):
        make_room()
        return PlacedMoeExpert(next(iter(wanted)), next(iter(wanted)).number)


@pytest.mark.parametrize("form", FORMS)
def test_offloaded_layers_on_a_device_ask_for_numbers_in_one_copy_each(model_files, device, monkeypatch, form):
    spec, tensors = model_files.read("qwen3_moe", **WHOLE_BLOCKS, decoder_sparse_step=None)
    held, downs = dict(FORMS[form](tensors)), []
    stacks = {name: one for name, one in held.items() if ".experts." in name}
    block = block_form(stacks)

    def copied_down(parts, where):
        downs.append(len(parts))
        return [SimpleNamespace(tolist=lambda: [3, 3, 7, 12])] * len(parts)  # ends of 12 pairs of 4 moe_experts

    for name, fake in {"mark": lambda where: lambda: None, "likeliest": lambda counts: (0, 1)}.items():
        monkeypatch.setattr(offload, name, fake)
    monkeypatch.setattr(offload, "copied_down", copied_down)
    with FakeTensorMode(), torch.inference_mode():
        dense = there({name: one for name, one in held.items() if name not in stacks})
        places = torch.empty(4 * block.size_bytes, dtype=torch.uint8, device="cuda")
        model = LanguageModel(spec, dense, offload.OffloadedMoe(spec, block, Resident()).show(dense, places))
        ids = torch.zeros(6, dtype=torch.int64, device="cuda")
        run_steps(model, lambda _, step, *own: step(model, *own), ids, ids, lambda _, own, *stored: own)
    assert downs == [2, 2, 1]  # by layer, with the prediction for the next one
