"""A model whose moe_experts come and go writes what it writes with all in memory; properties of their residency."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import LoadError
from experts.llm.dispatch import route
from experts.llm.files.config import MoeSpec
from experts.llm.model import LanguageModel
from experts.llm.quant import Int4Tensors, Int8Tensors
from experts.llm.tiers import offload as offload_module
from experts.llm.tiers.cache import MoeCache
from experts.llm.tiers.moe_experts import MoeExpert, MoeResidency
from experts.llm.tiers.offload import GateAhead, OffloadedMoe, likeliest
from tests.experts.llm.conftest import MOE_FAMILIES, WHOLE_BLOCKS, block_form, greedy

LAYERS, NUMBERS = 3, 5


class Offloaded:
    """A model over ``places``, whose moe_experts are read from its own tensors, in the place of an SSD."""

    def __init__(self, spec, tensors, places):
        self.stacks = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        dense = {name: tensor for name, tensor in tensors.items() if name not in self.stacks}
        self.running = set()  # places that kernels of a device read
        self.form, self.read = block_form(self.stacks), []
        size_bytes = places * self.form.size_bytes
        self.bytes = torch.full((size_bytes,), 255, dtype=torch.uint8)  # not a number, if anybody reads it
        residency = MoeResidency(places, len(spec.layers), loads_at_once=1)
        self.cache = MoeCache(residency, lambda *load: self.fill(*load), name="test-moe", loads_at_once=1)
        self.layers = OffloadedMoe(spec, self.form, self.cache)
        self.model = LanguageModel(spec, dense, self.layers.show(dense, self.bytes))

    def fill(self, moe_expert, place):
        self.read.append(moe_expert)
        assert place not in self.running, "a kernel still reads these bytes"
        for part in self.form.tensors:
            stack = self.stacks[f"layers.{moe_expert.layer}.experts.{part.name}"]
            raw = stack[moe_expert.number].contiguous().flatten().view(torch.uint8)
            start = place * self.form.size_bytes + part.offset_bytes
            self.bytes[start : start + len(raw)] = raw

    def close(self):
        self.cache.settle()
        self.cache.close()


@pytest.fixture
def offload():
    with ExitStack() as opened:
        yield lambda *given: opened.enter_context(closing(Offloaded(*given)))


PROMPTS = [list(range(3, 20)), [5, 90, 17], list(range(60, 30, -1))]


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("places", [1, 2, 5, 100])
def test_offloaded_model_writes_what_a_resident_one_writes(model_files, offload, family, places):
    spec, tensors = model_files.read(family)
    expected, expected_logits = greedy(LanguageModel(spec, tensors), PROMPTS, 6)
    offloaded = offload(spec, tensors, places)
    found, logits = greedy(offloaded.model, PROMPTS, 6)
    assert found == expected
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    offloaded.cache.settle()
    assert offloaded.cache.statistics().loads == len(offloaded.read)
    if places == 100:
        assert len(offloaded.read) == len(set(offloaded.read))


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("places", [1, 3, 100])
def test_device_waits_once_in_a_layer_and_no_load_overwrites_what_its_kernels_read(
    model_files, offload, monkeypatch, family, places
):
    """The CPU is a device that runs its kernels when the host waits for it."""
    spec, tensors = model_files.read(family)
    expected, _ = greedy(LanguageModel(spec, tensors), PROMPTS, 4)
    one, downs, given = offload(spec, tensors, places), [], []
    weights_at, layers = one.layers._weights_at, sum(layer.moe is not None for layer in spec.layers)

    def launched(place):
        one.running.add(place)
        given.append(place)
        return weights_at(place)

    def mark(device):
        launches = [given.pop() for _ in given.copy()]
        return lambda: one.running.difference_update(launches)

    def copied_down(parts, device):
        downs.append(len(parts))
        return parts

    monkeypatch.setattr(one.layers, "_weights_at", launched)
    seams = {"ON_HOST": (), "BEHIND_HOST": ("cpu",), "mark": mark, "copied_down": copied_down}
    for name, seam in seams.items():
        monkeypatch.setattr(offload_module, name, seam)
    assert greedy(one.model, PROMPTS, 4)[0] == expected
    assert downs == [*[2] * (layers - 1), 1] * 4  # with the prediction for the next of these layers
    one.layers.let_go()
    assert not one.running


def test_offloaded_model_in_bf16_int8_or_int4_writes_what_a_resident_one_writes(model_files, offload):
    in_bf16 = lambda tensors: {name: one.bfloat16() for name, one in tensors.items()}  # noqa: E731
    for tensors_of in (in_bf16, Int8Tensors, Int4Tensors):
        spec, tensors = model_files.read("qwen3_moe", **WHOLE_BLOCKS)
        held = dict(tensors_of(tensors))
        expected, expected_logits = greedy(LanguageModel(spec, held), PROMPTS[1:2], count=1)
        found, logits = greedy(offload(spec, held, 2).model, PROMPTS[1:2], count=1)
        torch.testing.assert_close(logits, expected_logits, rtol=2e-2, atol=2e-2)
        assert found == expected


def test_gate_ahead_predicts_the_experts_of_the_next_layer(model_files, offload):
    """Layers that add nothing to their tokens: each gate sees what the one before it could see."""
    spec, tensors = model_files.read("mixtral")
    for number in range(len(spec.layers)):
        tensors[f"layers.{number}.output"].zero_()
        tensors[f"layers.{number}.experts.down"].zero_()
    offloaded = offload(spec, tensors, 100)
    greedy(offloaded.model, PROMPTS[1:2], count=1)
    offloaded.cache.settle()
    counts = offloaded.cache.statistics()
    assert counts.ahead_used == counts.ahead
    assert counts.hits + counts.late + counts.misses == len(offloaded.read)


def test_failed_load_is_raised_to_its_pass_and_loads_go_on_until_the_end(model_files, offload):
    spec, tensors = model_files.read("mixtral")
    expected, _ = greedy(LanguageModel(spec, tensors), PROMPTS, 6)
    offloaded = offload(spec, tensors, 2)

    def fail(*_):
        raise LoadError("tiny", "the drive says no")

    offloaded.fill = fail
    for _ in range(2):
        with pytest.raises(LoadError, match="the drive says no"):
            greedy(offloaded.model, PROMPTS, 6)
        offloaded.cache.settle()
    del offloaded.fill
    assert greedy(offloaded.model, PROMPTS, 6)[0] == expected
    offloaded.close()
    with pytest.raises(RuntimeError, match="stopped"):
        greedy(offloaded.model, PROMPTS, 6)


def test_two_concurrent_passes_share_one_cache(model_files, offload):
    spec, tensors = model_files.read("mixtral")
    expected, _ = greedy(LanguageModel(spec, tensors), PROMPTS, 6)
    offloaded = offload(spec, tensors, 2)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: greedy(offloaded.model, PROMPTS, 6)[0], range(3)))
    assert found == [expected] * 3


@given(st.integers(1, 20), st.integers(1, 3), st.booleans(), st.integers(0, 100))
def test_gate_ahead_names_what_the_gate_behind_its_norm_chooses(tokens, per_token, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    normalised, gate = draw(tokens, 8), draw(6, 8)
    here, there = ((1 + draw(8).abs(), draw(8) if has_bias else None) for _ in range(2))
    spec = MoeSpec(6, per_token, 4, is_normalised=False)
    predicted = likeliest(GateAhead.between(spec, gate, here, there).counts(under(normalised, here)))
    counts = torch.bincount(route(under(normalised, there) @ gate.T, spec).moe_expert, minlength=6)
    assert set(predicted) == set(counts.nonzero().flatten().tolist())
    assert [int(counts[one]) for one in predicted] == sorted((int(one) for one in counts if one), reverse=True)


def under(normalised, norm):
    scale, bias = norm
    return normalised * scale if bias is None else normalised * scale + bias


class Cache:
    """Carries loads out in some order, and checks what the policy guarantees."""

    def __init__(self, places, *, loads_at_once=1, seed=0, prior=None):
        self.policy = MoeResidency(places, LAYERS, prior, loads_at_once=loads_at_once)
        self.random = random.Random(seed)
        self.content, self.loading = {}, {}  # what lies in each place; where what is under way goes
        self.pinned, self.begun = set(), []

    def start(self, loads):
        self.begun += loads
        for load in loads:
            assert load.evicted not in self.pinned, "what is needed was evicted"
            assert self.content.pop(load.place, None) == load.evicted
            assert load.place not in self.loading.values()
            self.loading[load.moe_expert] = load.place
        self.policy.check_invariants()

    def need(self, layer, *numbers):
        self.start(self.policy.need(layer, numbers))

    def predict(self, layer, *numbers):
        self.start(self.policy.predict(layer, numbers))

    def use(self, moe_expert):
        self.start(self.policy.used(moe_expert))

    def answer(self):
        """One load comes to its end, any of those under way."""
        moe_expert = self.random.choice(sorted(self.loading))
        self.content[self.loading.pop(moe_expert)] = moe_expert
        self.start(self.policy.loaded(moe_expert))

    def fail(self):
        moe_expert = self.random.choice(sorted(self.loading))
        del self.loading[moe_expert]
        self.start(self.policy.failed(moe_expert))

    def run_layer(self, layer, numbers):
        """Everything that a layer needs, each used as soon as it is there."""
        left = {MoeExpert(layer, number) for number in numbers}
        self.pinned |= left
        self.need(layer, *numbers)
        while left:
            there = sorted(one for one in left if self.policy.place_of(one) is not None)
            if not there:
                assert self.loading, "something is needed, and nothing is on its way"
                self.answer()
                continue
            assert self.content[self.policy.place_of(there[0])] == there[0]
            left.discard(there[0])
            self.pinned.discard(there[0])
            self.use(there[0])

    def settle(self):
        self.start(self.policy.end_pass())
        while self.loading:
            self.answer()

    def held(self):
        return set(self.content.values())


numbers = st.lists(st.integers(0, NUMBERS - 1), unique=True, max_size=NUMBERS)
passes = st.lists(st.lists(st.tuples(numbers, numbers), min_size=LAYERS, max_size=LAYERS), max_size=6)


@given(passes, st.integers(1, 9), st.integers(1, 3), st.integers(0, 9))
def test_every_needed_expert_is_loaded_and_none_needed_is_evicted(passes, places, loads_at_once, seed):
    cache = Cache(places, loads_at_once=loads_at_once, seed=seed)
    for one in passes:
        for layer, (needed, predicted) in enumerate(one):
            cache.predict((layer + 1) % LAYERS, *predicted)
            if cache.loading and cache.random.random() < 0.3:
                cache.fail() if cache.random.random() < 0.3 else cache.answer()
            cache.run_layer(layer, needed)
        cache.settle()
    statistics = cache.policy.statistics()
    needs = sum(len(needed) for one in passes for needed, _ in one)
    assert statistics.hits + statistics.late + statistics.misses >= needs


@given(passes, st.integers(1, 9))
def test_prefetch_never_replaces_what_is_needed_sooner(passes, places):
    cache = Cache(places)
    for one in passes:
        for layer, (needed, predicted) in enumerate(one):
            cache.run_layer(layer, needed)
            cache.begun.clear()
            ahead = (layer + 2) % LAYERS
            cache.predict(ahead, *predicted)
            while cache.loading:
                cache.answer()
            between = (layer + 1) % LAYERS
            gone = [load.evicted for load in cache.begun if load.evicted is not None]
            assert not [one for one in gone if one.layer == between]
            assert not [one for one in gone if one.layer == ahead and one.number in predicted]
        cache.settle()


def test_usage_probabilities_rank_evictions_before_any_observation():
    cache = Cache(2, prior={MoeExpert(0, 0): 0.9, MoeExpert(0, 1): 0.1, MoeExpert(0, 2): 0.5, MoeExpert(0, 3): 0.0})
    cache.run_layer(0, [0, 1])
    cache.run_layer(0, [2])
    assert cache.held() == {MoeExpert(0, 0), MoeExpert(0, 2)}


def test_observed_usage_is_the_share_of_passes_that_need_an_expert():
    cache = Cache(LAYERS * NUMBERS)
    for passed in range(400):
        cache.run_layer(0, [0] if passed % 4 else [0, 1])
        cache.settle()
    usage = cache.policy.usage()
    assert usage[MoeExpert(0, 0)] == pytest.approx(1.0, abs=0.1)
    assert usage[MoeExpert(0, 1)] == pytest.approx(0.25, abs=0.05)
    assert usage.keys() == {MoeExpert(0, 0), MoeExpert(0, 1)}


def test_needed_load_precedes_a_prefetch_and_a_failed_prefetch_waits_for_a_new_prediction():
    cache = Cache(4)
    cache.predict(1, 0, 1)
    cache.need(0, 2)
    cache.answer()
    assert [load.moe_expert for load in cache.begun] == [MoeExpert(1, 0), MoeExpert(0, 2)]
    cache = Cache(1)
    cache.predict(0, 0)
    cache.fail()
    assert not cache.loading
    cache.predict(0, 0)
    assert cache.loading


def test_aborted_pass_releases_what_it_needed():
    cache = Cache(1)
    cache.need(0, 0, 1)
    for number in (0, 1):
        cache.use(MoeExpert(0, number))
    cache.settle()
    cache.run_layer(0, [2])
    assert cache.held() == {MoeExpert(0, 2)}


def test_expert_needed_by_two_passes_stays_until_both_used_it():
    cache = Cache(1)
    for _ in range(2):
        cache.need(0, 0)
    cache.answer()
    cache.need(0, 1)
    cache.use(MoeExpert(0, 0))
    assert cache.held() == {MoeExpert(0, 0)}
    cache.use(MoeExpert(0, 0))
    cache.answer()
    assert cache.held() == {MoeExpert(0, 1)}
