"""Drift of false calls: told from chance, raised and cleared."""

import itertools
import random
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.truth.false_calls import EARLIER, LATEST, LEAST, chance_of, more_false_calls
from agent.records.truth.figures import Rate

CALLS = st.lists(st.booleans(), max_size=LATEST + EARLIER + 40)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_chance_is_the_share_of_all_distributions_of_false_calls(latest, earlier, data):
    called = data.draw(st.tuples(st.integers(0, latest), st.integers(0, earlier)))
    total = latest + earlier
    ways = [sum(place < latest for place in chosen) for chosen in itertools.combinations(range(total), sum(called))]
    expected = sum(count >= called[0] for count in ways) / comb(total, sum(called))
    assert chance_of(Rate(called[0], latest), Rate(called[1], earlier)) == pytest.approx(expected)


@given(st.integers(LATEST, LATEST + EARLIER), st.lists(st.booleans(), max_size=40), st.data())
def test_false_call_alarm_depends_on_the_counts_of_both_windows_only(earlier, older, data):
    windows = [[False] * (size - called) + [True] * called
               for size in (LATEST, min(earlier, EARLIER))
               for called in [data.draw(st.integers(0, size))]]  # fmt: skip
    found = [
        more_false_calls(calls, is_raised=is_raised)
        for is_raised in (False, True)
        for calls in (
            [*windows[0], *windows[1]],
            [*windows[0][::-1], *windows[1][::-1], *(older if len(windows[1]) == EARLIER else [])],
        )
    ]
    assert (found[0], found[2]) == (found[1], found[3])
    assert found[0] is None or found[0][0].share > found[0][1].share
    assert found[0] is None or found[2] is not None  # what raises an alarm keeps it


def test_few_reviews_raise_nothing_however_bad_they_look():
    assert more_false_calls([True] * (LEAST - 1) + [False] * LEAST, is_raised=False) is None
    assert more_false_calls([True] * LEAST + [False] * LEAST, is_raised=False) == (Rate(20, 20), Rate(0, 20))


def test_rise_of_false_calls_raises_an_alarm_until_they_fall():
    seen = random.Random(1)
    shares = [0.1] * 300 + [0.5] * 60 + [0.1] * 100
    calls, raised = [], []
    for share in shares:
        calls.insert(0, seen.random() < share)
        raised.append(more_false_calls(calls, is_raised=bool(raised) and raised[-1]) is not None)
    assert (any(raised[:300]), any(raised[300:360]), raised[-1]) == (False, True, False)
    assert sum(one is not other for one, other in itertools.pairwise(raised)) == 2
