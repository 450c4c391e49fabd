"""Ways that take turns, under a clock of our own: every round has each once, and nobody always follows the same one."""

from __future__ import annotations

import pytest

from proof.compute.alternating import PAUSE_S, ROUNDS_LEAST, WARMING_UP, Clock, Times, alternating


class Machine:
    """A clock that stands still until a way runs or somebody sleeps."""

    def __init__(self):
        self.at_s = 0.0
        self.ran = []

    @property
    def clock(self):
        return Clock(lambda: self.at_s, self.spend)

    def spend(self, seconds):
        self.at_s += seconds

    def way(self, name, *seconds):
        left = list(seconds)

        def run():
            self.ran.append(name)
            self.spend(left.pop(0) if len(left) > 1 else left[0])

        return run


def test_each_round_runs_each_way_once_and_begins_with_the_next():
    machine = Machine()
    alternating({name: machine.way(name, 1.0) for name in "abc"}, 3, machine.clock)
    rounds = ["".join(machine.ran[at : at + 3]) for at in range(0, len(machine.ran), 3)]
    assert len(rounds) == WARMING_UP + 3
    assert rounds[WARMING_UP:] == ["abc", "bca", "cab"]
    assert machine.at_s == pytest.approx(3 * (WARMING_UP + 3) * (1.0 + PAUSE_S))


def test_what_warms_up_does_not_count():
    machine = Machine()
    slow_first = (9.0,) * WARMING_UP
    times = alternating({"a": machine.way("a", *slow_first, 2.0, 1.0, 4.0)}, 3, machine.clock)
    assert times["a"].seconds == pytest.approx((2.0, 1.0, 4.0))
    assert (times["a"].median_s, times["a"].least_s) == pytest.approx((2.0, 1.0))


@pytest.mark.parametrize(("limit_s", "rounds"), [(0.0, ROUNDS_LEAST), ((WARMING_UP + 4.5) * 2, 5), (1000.0, 9)])
def test_no_round_begins_after_the_limit_but_those_that_a_median_needs(limit_s, rounds):
    machine = Machine()
    ways = {name: machine.way(name, 1.0 - PAUSE_S) for name in "ab"}
    times = alternating(ways, 9, machine.clock, limit_s=limit_s)
    assert {len(each.seconds) for each in times.values()} == {rounds}


def test_times_of_so_many_times_the_work():
    assert Times((1.0, 3.0)).scaled(0.5) == Times((0.5, 1.5))


def test_what_a_way_raises_comes_out():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        alternating({"a": fail}, 1, Machine().clock)
