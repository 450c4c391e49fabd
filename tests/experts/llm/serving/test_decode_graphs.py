"""Texts whose single tokens run as graphs: the tokens of a run without, through joins, ends and other experts."""

import pytest
import torch

from experts.devices.graphs import RUNS_BEFORE, using_graphs
from experts.llm.arenas.blocks import BatchOfBlocks, BlockArena
from experts.llm.arenas.key_values import KvLayout
from experts.llm.model import LanguageModel
from experts.llm.serving.family import ModelFamily
from experts.llm.serving.generation import Sampling
from experts.llm.token_batch import Chunk, TokenBatch
from tests.experts.llm.conftest import WHOLE_BLOCKS
from tests.experts.llm.fake_device import CUDA, FORMS, FakeDevice
from tests.experts.llm.serving.conftest import Desk
from tests.experts.played_graphs import played

CAPTURED = ["llama", "qwen3", "qwen2_moe", "pr_moe"]
LENGTHS = (3, 20, 40, 7, 33)


def written(model, graphs=None, requests=range(7)):
    """Tokens of texts that join by and by, and end one after the other."""
    desk = Desk(model, BlockArena(2**22))
    with using_graphs(graphs):
        for request in requests:
            prompt = [(7 * request + n) % 90 for n in range(3 + 4 * request)]
            sampling = Sampling(seed=request) if request % 2 else Sampling(temperature=0)
            desk.ask(request, prompt, 30 + 4 * request, model=model, sampling=sampling)
            desk.quantum(0.0)
        return desk.finish()


def states(model, steps, graphs=None, before=lambda step: None):
    """Hidden states of some texts, token by token."""
    layout, arena, found = KvLayout.of(model.spec, model.dtype), BlockArena(2**22), []
    key_values = arena.key_values(layout)
    for row, length in enumerate(LENGTHS):
        arena.begin(row, layout, length + steps)
    model.hidden(
        TokenBatch.of([Chunk(row, 0, range(end)) for row, end in enumerate(LENGTHS)]), arena.key_values(layout)
    )
    with using_graphs(graphs):
        for step in range(steps):
            before(step)
            batch = TokenBatch.of([Chunk(row, end + step, [step + row]) for row, end in enumerate(LENGTHS)])
            found.append(ModelFamily([model]).hidden(batch, key_values, [0] * len(LENGTHS)).clone())
    return torch.stack(found)


@pytest.mark.parametrize("kind", CAPTURED)
def test_tokens_by_graphs_are_those_without(model_files, kind):
    model, (graphs, recorder) = LanguageModel(*model_files.read(kind)), played()
    assert written(model, graphs) == written(model)
    assert recorder.replays > 4 * recorder.captures > 0


def test_rows_that_fill_a_bucket_change_no_other(model_files):
    model, (graphs, recorder) = LanguageModel(*model_files.read("llama")), played()
    torch.testing.assert_close(states(model, 7, graphs), states(model, 7))
    assert recorder.replays == 7 - RUNS_BEFORE


def test_graphs_stay_when_a_slots_bytes_become_another_experts(model_files):
    spec, tensors = model_files.read("llama")

    def overwritten(graphs=None):
        slot = {name: tensor.clone() for name, tensor in tensors.items()}

        def overwrite(step):
            if step == RUNS_BEFORE + 2:
                for tensor in slot.values():
                    tensor.copy_(tensor.flip(0))

        return states(LanguageModel(spec, slot), 7, graphs, overwrite)

    graphs, recorder = played()
    torch.testing.assert_close(overwritten(graphs), overwritten())
    assert (recorder.captures, recorder.replays) == (1, 7 - RUNS_BEFORE)


def test_failed_capture_leaves_tokens_as_they_are(model_files):
    model, (graphs, recorder) = LanguageModel(*model_files.read("llama")), played(error=RuntimeError("capturing"))
    assert written(model, graphs) == written(model)
    assert (recorder.captures, recorder.replays) == (1, 0)


@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_layers_that_ask_the_host_are_not_captured(model_files, kind):
    spec, tensors = model_files.read(kind)
    loading = dict.fromkeys(range(len(spec.layers)), lambda tokens, table: torch.zeros_like(tokens))
    graphs, recorder = played()
    written(LanguageModel(spec, tensors, loading if kind == "mixtral" else None), graphs, range(2))
    assert recorder.captures == 0


@pytest.mark.parametrize("form", ["torch.bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", CAPTURED)
def test_captured_work_asks_the_device_for_nothing(model_files, monkeypatch, kind, form):
    device, (graphs, recorder) = FakeDevice(monkeypatch), played()
    monkeypatch.setattr(BatchOfBlocks, "address", 0)  # fake memory has none
    spec, tensors = model_files.read(kind, **WHOLE_BLOCKS)
    model = device.model(spec, dict(FORMS[form](tensors)))
    with device.watched(), using_graphs(graphs):
        desk = Desk(model, BlockArena(2**22, CUDA)).ask(1, range(9), 8).ask(2, range(20), 8)
        desk.finish(0)
    assert device.up == device.down == desk.engine.statistics().iterations
    assert recorder.replays > recorder.captures > 0
