"""Requests of idle precedence: served while no other is in flight, in memory that nothing else needs."""

import pytest

from agent.core import events
from agent.core.performance import PoolSpec
from agent.core.request import GAVE_WAY, NO_SPARE_ROOM, Precedence
from tests.agent.core.worlds import Line


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

    def ended(self, *words):
        """The latest offer ended with this reason; without one, it goes on or ended well."""
        assert self.reason == (" ".join(words) or None)

    @property
    def reason(self):
        return self.outcomes[self.offers].reason if self.offers in self.outcomes else None


SHOWN = "offer n; loaded n; finished n"


@pytest.mark.parametrize(
    ("room", "script"),
    [
        (2, f"offer n; asks a; ended {GAVE_WAY}; offer n; ended {GAVE_WAY}; loaded n -> nothing"),
        (2, "offer n; loaded n -> run n; asks a; ended; finished n; ended asked of one expert, not of a route"),
        (
            1,
            f"bring a; offer n; ended {NO_SPARE_ROOM}; unwanted a; {SHOWN};"
            "offer s -> evict n host stage 0, load s ssd>host",
        ),
        (2, f"bring a; {SHOWN}; arrive b -> evict n host stage 0, load b ssd>host"),
        (2, f"{SHOWN}; bring na; offer s; ended {NO_SPARE_ROOM}; offer n -> run n"),
        (2, f"offer n; drain; ended {GAVE_WAY}; offer n; ended the agent is stopping"),
    ],
)
def test_idle_request_takes_only_spare_room_and_gives_way(room, script):
    IdleLine(room).play(script)


def test_idle_request_is_loaded_run_and_not_counted():
    line = IdleLine()
    line.play(SHOWN)
    statistics = line.engine.statistics()
    assert line.outcomes.keys() == {100}
    assert (statistics.arrived, statistics.completed, statistics.batches, statistics.switches) == (0, 0, 0, 0)


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_failed_idle_request_ends_and_lowers_no_budget(out_of_memory):
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


def test_expert_pinned_by_a_reload_during_an_idle_request_blocks_no_other():
    line = IdleLine()
    line.play(SHOWN)
    line.handle(events.LineChanged(line.graph, line.matrix, frozenset("n"), frozenset()))
    line.play("arrive a -> load a ssd>host; loaded a; finished a; arrive b -> evict a host stage 2, load b ssd>host")
