"""Ranks of victims: the paper's figure 10, our lookahead, the baselines."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.performance import Footprint, SharedTensors
from agent.core.policy import RANKS, Evicting, EvictionCandidate, victims

NONE_KEPT = frozenset()


def candidate(copy, size=1, usage=0.0, next_use_s=None, lacks=False, order=0, shared=()):
    return EvictionCandidate(copy, copy, Footprint(size, shared), usage, next_use_s, lacks, order, -order)


def names(ranked):
    return [each.copy for each in ranked]


two_stage, lookahead, lru, fifo = (
    partial(sorted, key=RANKS[each]) for each in (Evicting.TWO_STAGE, Evicting.LOOKAHEAD, Evicting.LRU, Evicting.FIFO)
)


def test_stage_1_evicts_dependents_largest_first_and_stage_2_by_usage():
    resident = [
        candidate("a", 1, usage=0.3),
        candidate("b", 2, usage=0.1),
        candidate("i", 3, usage=0.9, lacks=True),
        candidate("j", 5, usage=0.8, lacks=True),
        candidate("c", 1, usage=0.2),
    ]
    assert names(two_stage(resident)) == ["j", "i", "b", "c", "a"]


def test_lookahead_evicts_queued_experts_last_and_furthest_first():
    resident = [
        candidate("soon", usage=0.0, next_use_s=1.0),
        candidate("late", usage=0.9, next_use_s=9.0),
        candidate("rare", usage=0.1),
        candidate("often", usage=0.8),
    ]
    assert names(lookahead(resident)) == ["rare", "often", "late", "soon"]


def test_baselines_evict_by_last_use_and_by_age():
    resident = [candidate("old", order=1), candidate("young", order=2)]
    assert names(fifo(resident)) == ["old", "young"]
    assert names(lru(resident)) == ["young", "old"]


def test_victims_are_taken_by_rank_and_superfluous_ones_are_spared():
    ranked = two_stage(
        [candidate("small", 1, usage=0.1), candidate("large", 5, usage=0.2), candidate("x", 9, usage=0.3)]
    )
    assert names(victims(ranked, 5, lambda part: 0, NONE_KEPT)) == ["large"]
    assert victims(ranked, 16, lambda part: 0, NONE_KEPT) is None


def test_shared_part_is_freed_with_its_last_holder_unless_the_newcomer_needs_it():
    trunk = (SharedTensors("trunk", 10),)
    ranked = two_stage([candidate("a", 1, shared=trunk), candidate("b", 1, shared=trunk)])
    assert names(victims(ranked, 12, lambda part: 2, NONE_KEPT)) == ["a", "b"]
    assert victims(ranked, 12, lambda part: 3, NONE_KEPT) is None
    assert victims(ranked, 12, lambda part: 2, frozenset({"trunk"})) is None


def test_shared_part_of_one_holder_is_freed_with_it():
    (alone,) = two_stage([candidate("a", 1, shared=(SharedTensors("trunk", 10),))])
    assert names(victims([alone], 11, lambda part: {"trunk": 1}[part], NONE_KEPT)) == ["a"]
    assert victims([alone], 12, lambda part: 1, NONE_KEPT) is None


def test_shared_part_of_a_spared_holder_is_not_counted_as_freed():
    trunk = (SharedTensors("trunk", 10),)
    ranked = [candidate("x", 2, shared=trunk), candidate("y", 1, shared=trunk), candidate("z", 30)]
    assert names(victims(ranked, 31, lambda part: 2, NONE_KEPT)) == ["x", "z"]  # y and the trunk stay: 32 bytes go
    assert names(victims(ranked, 30, lambda part: 2, NONE_KEPT)) == ["z"]


@pytest.mark.parametrize(
    ("evicting", "stages"),
    [(Evicting.TWO_STAGE, [1, 2, 1, 2]), (Evicting.LOOKAHEAD, [1, 2, 3, 3]), (Evicting.LRU, [0] * 4),
     (Evicting.FIFO, [0] * 4)],
)  # fmt: skip
def test_victims_stage_names_the_rule_of_its_eviction(evicting, stages):
    facts = [(None, True), (None, False), (4.0, True), (4.0, False)]
    told = [RANKS[evicting](candidate("a", next_use_s=at_s, lacks=lacks))[0] for at_s, lacks in facts]
    assert told == stages


@given(
    st.sampled_from(sorted(RANKS)),
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1), st.none() | st.floats(0, 9), st.booleans()), max_size=12),
    st.integers(1, 40),
)
def test_any_strategy_frees_enough_or_reports_that_it_cannot(evicting, facts, needed):
    resident = [candidate(f"e{n}", *fact, order=n) for n, fact in enumerate(facts)]
    chosen = victims(sorted(resident, key=RANKS[Evicting(evicting)]), needed, lambda part: 0, NONE_KEPT)
    total = sum(each.footprint.own_bytes for each in resident)
    if chosen is None:
        assert total < needed
        return
    freed = [victim.footprint.own_bytes for victim in chosen]
    assert sum(freed) >= needed
    assert len({victim.copy for victim in chosen}) == len(chosen)
    assert all(sum(freed) - size < needed for size in freed)  # nobody leaves for nothing
