"""Requests of idle precedence beside a line, under virtual time: an arrival waits for what had begun, and no more."""

import random

import pytest

from agent.core.effects import StartLoad
from agent.core.events import Arrived, Loaded
from agent.core.request import GAVE_WAY, Precedence
from experts.expert import Verdict
from profiler.simulation.simulator import Simulator
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import IMAGES, graph_of, row, setup_of

LOAD_S = 0.2
OFFERED = 10_000  # the first request of the source
LATE_S = IMAGES.latency_s(1) + LOAD_S  # one batch of one image, and one load, that were under way


def simulator(capacity, executors=1):
    """Eight experts; 0 and 1 have shadows."""
    names = [f"e{n}" for n in range(8)]
    graph = graph_of({name: [name] for name in names}, ["new0", "new1"], shadows={"e0": "new0", "e1": "new1"})
    rows = {name: row(name, load_s=LOAD_S) for name in graph.experts}
    usage = dict.fromkeys(names, 0.125)
    setup = setup_of(rows, ["cpu"] * executors, capacity, routes=graph, usage=usage)
    return IdleSource(setup, check_every_step=True)


class IdleSource(Simulator):
    """Offers to shadows, one at a time, whenever nothing of the line is under way."""

    def beside(self, trace, waiting):
        self.waiting, self.asked, self.open_loads, self.in_flight = list(waiting), {}, 0, set()
        return self.run(trace)

    def _handle(self, event, now):
        known = len(self._log)
        self.in_flight |= {event.request} if isinstance(event, Arrived) and event.request < OFFERED else set()
        super()._handle(event, now)
        self.open_loads += sum(isinstance(effect, StartLoad) for _, effect in self._log[known:])
        self.open_loads -= isinstance(event, Loaded)
        self.in_flight -= self._outcomes.keys()
        is_idle = self._outcomes and not (self.in_flight or self.open_loads or self._running)
        if is_idle and self.waiting and self.asked.keys() <= self._outcomes.keys():
            number = OFFERED + len(self.asked)
            self.asked[number] = self.waiting.pop()
            self._post(now, Arrived(number, expert=self.asked[number], precedence=Precedence.IDLE))


def arrivals(count, gap_s, seed):
    rng = random.Random(seed)
    return [TracedArrival(gap_s * number + 0.1 * rng.random(), f"e{rng.randrange(8)}") for number in range(count)]


@pytest.mark.parametrize("capacity", [3, 9, 12])
@pytest.mark.parametrize("executors", [1, 2])
def test_a_line_with_time_to_spare_is_late_by_what_had_begun_at_most(capacity, executors):
    trace, rng = arrivals(100, 0.6, seed=capacity), random.Random(1)
    offers = [f"new{rng.randrange(2)}" for _ in range(300)]
    alone = simulator(capacity, executors).beside(trace, ()).waits_s(trace)
    beside = simulator(capacity, executors).beside(trace, offers)
    late_s = [after - before for before, after in zip(alone, beside.waits_s(trace), strict=True)]
    assert max(late_s) <= LATE_S + 1e-9
    ran = [number for number, outcome in beside.outcomes.items() if number >= OFFERED and outcome.steps]
    assert (len(ran) > 100) == (capacity > 8)  # a memory that the line's own fill has no room for a shadow
    assert all(beside.outcomes[number].verdict is Verdict.UNKNOWN for number in ran)


def test_a_line_without_time_to_spare_is_not_delayed():
    trace = [TracedArrival(0.004 * number, f"e{number % 8}") for number in range(400)]
    alone, beside = simulator(12).beside(trace, ()), simulator(12).beside(trace, ["new0"] * 200)
    assert beside.waits_s(trace) == pytest.approx(alone.waits_s(trace), abs=LATE_S)
    gave_way = [outcome for outcome in beside.outcomes.values() if outcome.reason == GAVE_WAY]
    assert len(gave_way) <= 1
