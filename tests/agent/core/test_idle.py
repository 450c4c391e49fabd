"""Requests of idle precedence: asked while no other is in flight, in memory that nothing else needs."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Footprint, Performance, PerformanceMatrix, PoolSpec
from agent.core.policy import PRESETS
from agent.core.request import GAVE_WAY, NO_SPARE_ROOM, Precedence
from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core.worlds import limits, of

OFFERED = 100


class Line:
    def __init__(self, room=2):
        column = {name: ExpertProfile(name, Performance(1.0, 2.0, 4, 1), Footprint(1), {SSD: 10.0}) for name in "abns"}
        routes = {name: (RouteStep(name, frozenset({"ok"})),) for name in "ab"}
        graph, specs = ExpertGraph("abns", routes, {"a": "n", "b": "s"}), [ExecutorSpec(0, "cpu", "host")]
        pools = (PoolSpec("host", room, 4),)
        self.engine = Engine(graph, PerformanceMatrix({"cpu": column}), specs, PRESETS["paper"], limits(pools))

    def handle(self, event):
        effects = self.engine.handle(event, 0.0)
        self.engine.check_invariants()
        return effects

    def offer(self, expert="n", request=OFFERED):
        return self.handle(events.Arrived(request, expert=expert, precedence=Precedence.IDLE))

    def loaded(self, effects):
        return self.handle(events.Loaded(of(StartLoad, effects)[0].load))

    def finish(self, effects):
        batch = of(StartBatch, effects)[0].batch
        return self.handle(events.Finished(batch.id, (Prediction("ok", 0.9),) * len(batch.requests)))

    def shown(self, expert="n", request=OFFERED):
        return of(Complete, self.finish(self.loaded(self.offer(expert, request))))

    def reasons(self, effects):
        return [(each.request, each.outcome.reason) for each in of(Fail, effects)]


def test_an_idle_request_is_loaded_run_and_not_counted():
    line = Line()
    (told,) = line.shown()
    statistics = line.engine.statistics()
    assert told.request == OFFERED
    assert (statistics.arrived, statistics.completed, statistics.batches, statistics.switches) == (0, 0, 0, 0)


def test_it_gives_way_while_it_waits_and_not_once_it_runs():
    line = Line()
    waiting = line.offer()
    assert line.reasons(line.handle(events.Arrived(1, "a"))) == [(OFFERED, GAVE_WAY)]
    assert line.reasons(line.offer(request=OFFERED + 1)) == [(OFFERED + 1, GAVE_WAY)]
    assert of(StartBatch, line.loaded(waiting)) == []
    other = Line()
    running = other.loaded(other.offer())
    assert other.reasons(other.handle(events.Arrived(1, "a"))) == []
    assert [each.request for each in of(Complete, other.finish(running))] == [OFFERED]


def test_nothing_leaves_for_it_but_a_copy_of_its_own_kind():
    line = Line(room=1)
    line.finish(line.loaded(line.handle(events.Arrived(1, "a"))))
    assert line.reasons(line.offer()) == [(OFFERED, NO_SPARE_ROOM)]
    line.handle(events.Unwanted("a"))
    line.shown(request=OFFERED + 1)
    assert [each.expert for each in of(Evict, line.offer("s", OFFERED + 2))] == ["n"]


def test_its_copy_leaves_first_until_another_request_runs_on_it():
    line = Line()
    line.finish(line.loaded(line.handle(events.Arrived(1, "a"))))
    line.shown()
    assert [each.expert for each in of(Evict, line.handle(events.Arrived(2, "b")))] == ["n"]
    used = Line()
    used.shown()
    used.finish(used.handle(events.Arrived(1, expert="n")))
    used.finish(used.loaded(used.handle(events.Arrived(2, "a"))))
    assert used.reasons(used.offer("s")) == [(OFFERED, NO_SPARE_ROOM)]


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_its_failures_end_it_and_lower_no_budget(out_of_memory):
    line = Line()
    (load,) = of(StartLoad, line.offer())
    effects = line.handle(events.LoadFailed(load.load, "I/O", permanent=False, out_of_memory=out_of_memory))
    assert line.reasons(effects) == [(OFFERED, "n: I/O")]
    other = Line()
    (started,) = of(StartBatch, other.loaded(other.offer()))
    effects = other.handle(events.BatchFailed(started.batch.id, "broke", out_of_memory=out_of_memory))
    assert other.reasons(effects) == [(OFFERED, "n: broke")]
    assert line.engine.statistics().pools[0].expert_bytes == other.engine.statistics().pools[0].expert_bytes == 2


def test_a_drain_ends_it_unless_it_runs():
    line = Line()
    line.offer()
    assert line.reasons(line.handle(events.Drain())) == [(OFFERED, GAVE_WAY)]
    assert line.reasons(line.offer(request=OFFERED + 1)) == [(OFFERED + 1, "the agent is stopping")]
