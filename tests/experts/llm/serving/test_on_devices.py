"""Iterations of texts on a device of fake tensors: each is one copy up, one down, and nothing waits between."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorDeviceMismatchError

from experts.devices import copies as device_copies
from experts.devices.copies import Download, Upload
from experts.expert import Prediction
from experts.llm.arenas.extents import arena_for
from experts.llm.low_rank import DOWN, UP
from experts.llm.model import LanguageModel
from experts.llm.serving import family
from experts.llm.serving.generation import GREEDY, Sampling
from experts.llm.serving.iteration import IterationLimits
from experts.llm.serving.lookup import PromptLookup
from experts.llm.serving.pooling import Pooling
from experts.llm.serving.readings import PooledPrompt, PromptScores
from experts.llm.text.constraints import Constraint
from tests.experts.llm.conftest import FAMILIES, WHOLE_BLOCKS
from tests.experts.llm.fake_device import CUDA, FORMS, FakeDevice, Synchronised
from tests.experts.llm.serving.conftest import Desk, byte_grammar
from tests.experts.llm.serving.test_sampling import SAMPLINGS

WRITTEN = ord("A")
IDENTITY = family.identity
KINDS = [GREEDY, *SAMPLINGS.values(), Sampling(logprobs=3)]


@pytest.fixture
def device(monkeypatch):
    return FakeDevice(monkeypatch, WRITTEN)


def run(device, model, ask, tokens=16, quantum_s=0):
    """Texts that ``ask`` asks of a desk, until they are done. Each iteration is one copy up, and one down."""
    with device.watched():
        desk = Desk(model, arena_for(CUDA, 2**22, keeps_prefixes=True), IterationLimits(tokens=tokens))
        ask(desk)
        desk.finish(quantum_s)
    assert device.down == desk.engine.statistics().iterations
    return desk


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_iteration_of_each_family_and_form_is_one_copy_up_and_one_down(model_files, device, kind, form):
    spec, tensors = model_files.read(kind, **WHOLE_BLOCKS)
    model = device.model(spec, dict(FORMS[form](tensors)))
    desk = run(device, model, lambda desk: desk.ask(1, range(9), 2).ask(2, range(20), 2, sampling=Sampling(top_p=0.8)))
    assert device.up == device.down >= 3
    assert desk.finished == dict.fromkeys((1, 2), Prediction("length", 1.0))


@pytest.fixture
def model(model_files, device):
    spec, tensors = model_files.read("qwen3")
    return device.model(spec, {name: one.bfloat16() for name, one in tensors.items()})


def test_texts_of_all_samplings_in_one_iteration_wait_once(device, model):
    def ask(desk):
        for request, sampling in enumerate(KINDS):
            desk.ask(request, range(5 + request), 3, sampling=sampling)

    desk = run(device, model, ask, tokens=128)
    assert device.up == device.down >= 3
    assert desk.notes[0].tokens == [WRITTEN] * 3
    assert [other.id for other in desk.notes[len(KINDS) - 1].sampled[0].alternatives] == [WRITTEN] * 3


def test_grammar_goes_up_while_the_device_runs_the_model(device, model):
    grammar = byte_grammar(Constraint.of_regex("regex", "A{5}"))
    desk = run(device, model, lambda desk: desk.ask(1, range(5), 9, grammar=grammar).ask(2, range(7), 3), tokens=64)
    assert (device.up, device.down) == (10, 5)
    assert desk.finished == {1: Prediction("stop", 1.0), 2: Prediction("length", 1.0)}


@pytest.mark.parametrize("drafts", [True, False])
def test_draft_is_verified_by_one_download(device, model, drafts, monkeypatch):
    monkeypatch.setattr(PromptLookup, "share", 0.9 if drafts else 0.0)
    monkeypatch.setattr(PromptLookup, "draft", lambda lookup, tokens, count: [WRITTEN] * count)
    sampling = Sampling(seed=1, top_p=0.9)

    def ask(desk):
        desk.engine._clock = itertools.count(step=0.001).__next__
        desk.ask(1, range(5), 20, sampling=sampling).ask(2, range(5), 20, sampling=SAMPLINGS["repetition"])

    desk = run(device, model, ask, quantum_s=1.0)
    tally = desk.engine.statistics()
    assert device.up == device.down
    assert tally.accepted_tokens == tally.drafted_tokens
    assert (tally.accepted_tokens > 10) == drafts
    assert desk.notes[1].tokens == desk.notes[2].tokens == [WRITTEN] * 20


def test_prompts_that_are_read_and_choices_that_are_weighed_wait_once(device, model):
    scores, further, vectors = [], [], []
    readings = [
        PromptScores(2, scores.extend),
        *(PooledPrompt(Pooling(mean, True), vectors.append) for mean in (True, False)),
    ]

    def ask(desk):
        for request, reading in enumerate(readings):
            desk.ask(request, range(40), 0, reading=reading)
        desk.ask(3, range(40), 2, reading=PromptScores(0, further.extend))
        desk.ask(4, range(8), choices={"left": (11,), "far": (13, 14, 15), "farther": (14, 15)})

    desk = run(device, model, ask, tokens=50)
    assert device.up == device.down
    assert desk.finished[4].label in {"left", "far", "farther"}
    assert [token.id for token in scores] == [token.id for token in further] == list(range(40))
    assert [len(vector) for vector in vectors] == [32, 32]


def test_texts_by_packed_copies_are_those_without(model_files, monkeypatch):
    model, here = LanguageModel(*model_files.read("qwen3")), torch.device("cpu")

    def texts():
        desk, scores, vectors = Desk(model, limits=IterationLimits(tokens=50)), [], []
        for request, sampling in enumerate(replace(kind, seed=5) for kind in KINDS):
            desk.ask(request, range(5 + request), 8, sampling=sampling)
        desk.ask(20, range(40), 0, reading=PromptScores(2, scores.extend))
        desk.ask(21, range(40), 0, reading=PooledPrompt(Pooling(is_mean=True, is_normalised=True), vectors.append))
        desk.ask(22, range(8), choices={"left": (11,), "far": (13, 14, 15), "farther": (14, 15)})
        return desk.finish(quantum_s=0), desk.finished, scores, vectors

    class Packed(Upload):
        def __getitem__(self, number):
            later = self._parts[self._there :]
            self._parts[self._there :] = device_copies.copied_up(later, here) if later else []
            self._there = len(self._parts)
            return self._parts[number]

    plain = texts()
    monkeypatch.setattr("experts.llm.token_batch.Upload", Packed)
    monkeypatch.setattr(
        Download, "fetch", lambda results: setattr(results, "_parts", device_copies.copied_down(results._parts, here))
    )
    assert texts() == plain


def test_beginning_is_shared_and_texts_leave_without_waiting(device, model):
    def ask(desk):
        desk.ask(1, range(40), 2, weights="w").ask(2, range(45), 2, weights="w").quantum(0)
        desk.engine.preempt(1)
        desk.engine.forget(3)

    desk = run(device, model, ask, tokens=64)
    assert device.up == device.down
    assert desk.engine.statistics().read_tokens < 40 + 45


def test_family_with_adapters_divides_its_tokens_without_waiting(model_files, device, monkeypatch):
    monkeypatch.setattr(family, "identity", lambda part: id(part) if isinstance(part, torch.Tensor) else IDENTITY(part))
    spec, tensors = model_files.read("llama")
    adapter = {
        f"layers.1.{name}{half}0": torch.zeros(shape)
        for name, outputs in (("qkv", 64), ("mlp.up", 96))
        for half, shape in ((DOWN, (4, 32)), (UP, (outputs, 4)))
    }
    first = device.model(spec, tensors)
    changed = [device.model(spec, tensors | adapter) for _ in range(3)]
    for model in changed:
        model._feed_forward, model._attention, model._embedding = (
            first._feed_forward,
            first._attention,
            first._embedding,
        )
    desk = run(
        device, first, lambda desk: [desk.ask(n, range(5 + n), 3, model=one) for n, one in enumerate([first, *changed])]
    )
    assert device.up == device.down
    assert desk.engine.statistics().rows > desk.engine.statistics().iterations, "they ran together"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda there: there.sum().item(), DataDependentOutputException),
        (lambda there: there + torch.zeros(3), FakeTensorDeviceMismatchError),
        (lambda there: torch.tensor([1], device=CUDA), Synchronised),
        (lambda there: there[torch.tensor([1])], Synchronised),
        (lambda there: there.cpu(), Synchronised),
    ],
    ids=["value", "mixture", "upload", "index", "download"],
)
def test_fake_device_raises_for_what_waits(device, act, error):
    with device.watched(), pytest.raises(error):
        act(torch.zeros(3, device=CUDA))
