"""How the agent's room is shared among its folders, whatever each of them holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.service.inspections.line import shares_room


def filled(held, limit, order):
    """What the folders hold once each of ``order`` has taken as many files as it may, in turn."""
    held = list(held)
    for index in order:
        while shares_room(held[index], held, limit):
            held[index] += 1
    return held


def test_a_backlog_leaves_each_other_folder_its_share():
    assert [filled([0], limit, [0]) for limit in (1, 2, 3, 2000)] == [[1], [2], [3], [2000]]
    assert filled([0, 0], 2000, [0, 1]) == [1500, 500]
    assert filled([0, 0, 0, 0], 2000, [2, 0, 1, 3]) == [250, 250, 1250, 250]


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 50))
def test_whoever_comes_first_the_limit_holds_and_nobody_is_starved(order, limit):
    held = filled([0] * 6, limit, order)
    assert sum(held) <= max(limit, 6)
    share = max(limit // 12, 1)
    assert all(count >= share or shares_room(count, held, limit) for count in held)
    assert sum(filled(held, limit, list(range(6)))) == max(limit, 6)
