"""Requests of idle precedence: asked while no other is in flight, in memory that nothing else needs."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.performance import PoolSpec
from agent.core.request import GAVE_WAY, NO_SPARE_ROOM, Precedence
from tests.agent.core.worlds import Line

EVICT_N, RUN_N = "evict n host stage 0", ["run n"]


class IdleLine(Line):
    """n and s are shadows of a and b; offers count from 100."""

    def __init__(self, room=2):
        shadows, routes = {"a": "n", "b": "s"}, {"a": "a", "b": "b"}
        super().__init__(
            (PoolSpec("host", room, 4),), {"cpu": ("abns", "host")}, "paper", shadows=shadows, routes=routes
        )
        self.offers = 99

    def offer(self, expert="n"):
        self.offers += 1
        return self.handle(events.Arrived(self.offers, expert=expert, precedence=Precedence.IDLE))

    def show(self, expert="n"):
        self.offer(expert)
        self.loaded(expert)
        self.finished(expert)

    @property
    def reason(self):
        """Of the latest offer, once it has ended."""
        return self.outcomes[self.offers].reason if self.offers in self.outcomes else None


def test_an_idle_request_is_loaded_run_and_not_counted():
    line = IdleLine()
    line.show()
    statistics = line.engine.statistics()
    assert line.outcomes.keys() == {100}
    assert (statistics.arrived, statistics.completed, statistics.batches, statistics.switches) == (0, 0, 0, 0)


def test_it_gives_way_while_it_waits_and_not_once_it_runs():
    line = IdleLine()
    line.offer()
    line.arrive("a")
    assert line.reason == GAVE_WAY
    line.offer()
    assert line.reason == GAVE_WAY
    assert line.loaded("n") == []
    line = IdleLine()
    line.offer()
    assert line.loaded("n") == RUN_N
    line.arrive("a")
    assert line.reason is None
    line.finished("n")
    assert line.outcomes[100].label == "ok"


def test_nothing_leaves_for_it_but_a_copy_of_its_own_kind():
    line = IdleLine(room=1)
    line.bring("a")
    line.offer()
    assert line.reason == NO_SPARE_ROOM
    line.handle(events.Unwanted("a"))
    line.show()
    assert line.offer("s") == [EVICT_N, "load s ssd>host"]


def test_its_copy_leaves_first_until_another_request_runs_on_it():
    line = IdleLine()
    line.bring("a")
    line.show()
    assert line.arrive("b") == [EVICT_N, "load b ssd>host"]
    line = IdleLine()
    line.show()
    line.bring("n", "a")
    line.offer("s")
    assert line.reason == NO_SPARE_ROOM


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_its_failures_end_it_and_lower_no_budget(out_of_memory):
    line = IdleLine()
    line.offer()
    line.load_failed("n", out_of_memory=out_of_memory)
    assert line.reason == "n: I/O error"
    assert line.pools()[0].expert_bytes == 2
    line = IdleLine()
    line.offer()
    line.loaded("n")
    line.failed("n", out_of_memory=out_of_memory)
    assert line.reason == "n: broke"
    assert line.pools()[0].expert_bytes == 2


def test_a_drain_ends_it_unless_it_runs():
    line = IdleLine()
    line.offer()
    line.handle(events.Drain())
    assert line.reason == GAVE_WAY
    line.offer()
    assert line.reason == "the agent is stopping"
