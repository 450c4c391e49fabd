"""The residency of moe_experts: properties over all passes through a model, and known cases."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.llm.tiers.moe_experts import MoeExpert, MoeResidency

LAYERS, NUMBERS = 3, 5


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
def test_every_need_is_met_and_nothing_needed_is_evicted(passes, places, loads_at_once, seed):
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
def test_a_load_ahead_never_takes_the_place_of_what_is_needed_sooner(passes, places):
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


def test_usage_probabilities_say_who_goes_before_anything_was_seen():
    cache = Cache(2, prior={MoeExpert(0, 0): 0.9, MoeExpert(0, 1): 0.1, MoeExpert(0, 2): 0.5, MoeExpert(0, 3): 0.0})
    cache.run_layer(0, [0, 1])
    cache.run_layer(0, [2])
    assert cache.held() == {MoeExpert(0, 0), MoeExpert(0, 2)}


def test_what_was_seen_is_how_likely_a_pass_needs_each():
    cache = Cache(LAYERS * NUMBERS)
    for passed in range(400):
        cache.run_layer(0, [0] if passed % 4 else [0, 1])
        cache.settle()
    usage = cache.policy.usage()
    assert usage[MoeExpert(0, 0)] == pytest.approx(1.0, abs=0.1)
    assert usage[MoeExpert(0, 1)] == pytest.approx(0.25, abs=0.05)
    assert usage.keys() == {MoeExpert(0, 0), MoeExpert(0, 1)}


def test_a_need_goes_before_what_is_predicted_and_a_load_ahead_that_fails_waits_to_be_predicted_again():
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


def test_a_pass_that_breaks_off_gives_up_what_it_needed():
    cache = Cache(1)
    cache.need(0, 0, 1)
    for number in (0, 1):
        cache.use(MoeExpert(0, number))
    cache.settle()
    cache.run_layer(0, [2])
    assert cache.held() == {MoeExpert(0, 2)}


def test_what_two_need_stays_until_both_have_used_it():
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
