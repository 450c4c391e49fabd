"""Another line while the Engine works: what was accepted is finished by the earlier one, and then that one is gone."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import Complete, Fail, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
)
from agent.core.policy import PRESETS
from agent.core.request import CANCELLED
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep

OK = frozenset({"ok"})
PASS = Prediction("ok", 1.0)


class Line:
    """One CPU executor; route X runs on the experts that ``routes`` gives it. Every answer is given by hand."""

    def __init__(self, routes, retired=(), pinned=(), capacity=4, **limits):
        setup = self.setup(routes, retired)
        limits = Limits((PoolSpec("host", capacity, 8),), pinned=frozenset(pinned), **limits)
        self.engine = Engine(*setup, [ExecutorSpec(0, "cpu", "host")], PRESETS["paper"], limits)
        self.loads: dict[str, int] = {}  # under way, by copy
        self.batches: dict[str, StartBatch] = {}  # under way, by expert
        self.outcomes = {}
        self.now = 0.0

    def setup(self, routes, retired):
        experts = sorted({expert for steps in routes.values() for expert in steps} | set(retired))
        graph = ExpertGraph(
            experts, {name: tuple(RouteStep(each, OK) for each in steps) for name, steps in routes.items()}
        )
        column = {each: ExpertProfile(each, Performance(1.0, 2.0, 4, 1), Footprint(1), {SSD: 1.0}) for each in experts}
        return graph, PerformanceMatrix({"cpu": column}, dict.fromkeys(experts, 0.1))

    def handle(self, event):
        for effect in self.engine.handle(event, self.now):
            if isinstance(effect, StartLoad):
                self.loads[effect.copy] = effect.load
            elif isinstance(effect, StartBatch):
                self.batches[effect.batch.expert] = effect
            elif isinstance(effect, Complete | Fail):
                self.outcomes[effect.request] = effect.outcome
        self.engine.check_invariants()

    def change(self, routes, retired=(), pinned=()):
        graph, matrix = self.setup(routes, retired)
        self.handle(events.LineChanged(graph, matrix, frozenset(pinned), frozenset(retired)))

    def ask(self, request, component):
        self.handle(events.Arrived(request, component))

    def load(self, expert):
        self.handle(events.Loaded(self.loads.pop(expert)))

    def run(self, expert, result=PASS):
        batch = self.batches.pop(expert).batch
        self.handle(events.Finished(batch.id, (result,) * len(batch.requests)))

    @property
    def resident(self):
        return set(self.engine.statistics().pools[0].resident)


NEXT = {"A": ["a+2"]}


@pytest.fixture
def line():
    """Component A on expert a, of which nothing has been asked yet; a+2 takes its place with NEXT."""
    return Line({"A": ["a"]})


def test_one_that_is_replaced_while_nobody_asks_it_leaves_at_once(line):
    line.handle(events.Wanted("a"))
    line.load("a")
    line.change(NEXT, retired=["a"])
    assert line.resident == set()


def test_one_that_is_replaced_while_it_loads_leaves_when_it_has_come(line):
    line.handle(events.Wanted("a"))
    line.change(NEXT, retired=["a"])
    line.load("a")
    assert line.resident == set()


def test_one_that_is_replaced_while_it_loads_for_somebody_serves_him_first(line):
    line.ask(1, "A")
    line.change(NEXT, retired=["a"])
    line.load("a")
    line.run("a")
    assert line.outcomes[1].verdict is Verdict.OK
    assert line.resident == set()


def test_one_that_is_replaced_while_it_runs_leaves_once_its_last_request_has_ended(line):
    line.ask(1, "A")
    line.load("a")
    line.ask(2, "A")
    line.change(NEXT, retired=["a"])
    line.run("a")
    assert line.resident == {"a"}
    line.run("a")
    assert {number: outcome.steps[0].expert for number, outcome in line.outcomes.items()} == {1: "a", 2: "a"}
    assert line.resident == set()


def test_one_that_waits_in_memory_leaves_when_who_waits_for_it_is_cancelled():
    line = Line({"A": ["a"], "B": ["b"]})
    line.handle(events.Wanted("a"))
    line.load("a")
    line.ask(1, "B")
    line.load("b")
    line.ask(2, "A")
    line.change({"B": ["b"]}, retired=["a"])
    assert line.resident == {"a", "b"}
    line.handle(events.Cancelled(2))
    assert line.outcomes[2].reason == CANCELLED
    assert line.resident == {"b"}


def test_a_request_is_finished_by_the_routes_it_came_under():
    line = Line({"A": ["a", "c"]})
    line.ask(1, "A")
    line.change(NEXT, retired=["a", "c"])
    line.ask(2, "A")
    for expert in ("a", "a+2", "c"):
        line.load(expert)
        line.run(expert)
    assert [[step.expert for step in line.outcomes[number].steps] for number in (1, 2)] == [["a", "c"], ["a+2"]]
    assert line.resident == {"a+2"}


def test_a_component_that_the_line_has_no_more_is_refused(line):
    line.change({"B": ["b"]}, retired=["a"])
    line.ask(1, "A")
    assert line.outcomes[1].verdict is Verdict.UNKNOWN


def test_an_expert_that_is_pinned_from_now_on_is_brought_and_stays():
    line = Line({"A": ["a"], "B": ["b"], "C": ["c"]}, capacity=2)
    line.change({"A": ["a"], "B": ["b"], "C": ["c"]}, pinned=["a"])
    line.load("a")
    for number, expert in enumerate("bc"):
        line.ask(number, expert.upper())
        line.load(expert)
        line.run(expert)
    assert line.resident == {"a", "c"}


def test_while_it_stops_no_expert_of_another_line_is_brought(line):
    line.handle(events.Drain())
    line.change({"A": ["a"], "B": ["b"]}, pinned=["b"])
    assert not line.loads


def test_it_is_told_while_something_is_under_way_that_came_under_earlier_routes(line):
    line.ask(1, "A")
    assert not line.engine.statistics().serves_earlier_lines
    line.change(NEXT, retired=["a"])
    assert line.engine.statistics().serves_earlier_lines
    line.load("a")
    line.run("a")
    assert not line.engine.statistics().serves_earlier_lines


def test_of_a_retired_expert_nothing_has_to_be_known_once_nobody_needs_it(line):
    """Its loads may still fail, and its pauses end."""
    line.handle(events.Wanted("a"))
    graph, matrix = line.setup(NEXT, ["a"])
    column = {name: row for name, row in matrix.experts["cpu"].items() if name != "a"}
    line.handle(events.LineChanged(graph, PerformanceMatrix({"cpu": column}), frozenset(), frozenset({"a"})))
    line.handle(events.LoadFailed(line.loads.pop("a"), "no drive", permanent=False))
    line.now = line.engine.next_wakeup_s()
    line.handle(events.Wanted("a"))
    assert "a" not in line.loads
    line.ask(1, "A")
    line.load("a+2")
    line.run("a+2")
    assert line.outcomes[1].verdict is Verdict.OK


def test_a_retired_expert_on_probation_is_tried_no_more(line):
    line.ask(1, "A")
    for _ in range(3):
        line.handle(events.LoadFailed(line.loads.pop("a"), "no drive", permanent=False))
        line.now = line.engine.next_wakeup_s()
        if line.engine.statistics().on_probation:
            break
        line.handle(events.Tick())
    graph, matrix = line.setup(NEXT, ["a"])
    column = {name: row for name, row in matrix.experts["cpu"].items() if name != "a"}
    line.handle(events.LineChanged(graph, PerformanceMatrix({"cpu": column}), frozenset(), frozenset({"a"})))
    line.handle(events.Tick())
    assert "a" in line.engine.statistics().on_probation
    assert "a" not in line.loads


def test_what_waits_to_be_placed_is_placed_though_the_line_changes_unless_it_has_gone():
    """A load at a time: of a, b and c the first is on its way when the others wait."""
    line = Line({"A": ["a"], "B": ["b"], "C": ["c"]}, loads_in_flight=1)
    line.handle(events.Started())
    line.change({"A": ["a"], "C": ["c"], "D": ["d"]}, retired=["b"])
    order = []
    while line.loads:
        (expert,) = line.loads
        order.append(expert)
        line.load(expert)
    assert order == ["a", "c", "d"]


@pytest.mark.parametrize(
    "answer", [lambda batch: events.Finished(batch, (PASS,)), lambda batch: events.BatchFailed(batch, "broke")]
)
def test_what_was_asked_of_a_retired_expert_at_the_last_moment_ends_whatever_is_known_of_it(line, answer):
    graph, matrix = line.setup(NEXT, ["a"])
    line.change(NEXT, retired=["a"])
    for number in range(2):
        line.handle(events.Arrived(number, expert="a"))
    line.load("a")
    column = {name: row for name, row in matrix.experts["cpu"].items() if name != "a"}
    line.handle(events.LineChanged(graph, PerformanceMatrix({"cpu": column}), frozenset(), frozenset({"a"})))
    while "a" in line.batches:
        line.handle(answer(line.batches.pop("a").batch.id))
    assert line.outcomes.keys() == {0, 1}
    assert line.resident <= {"a+2"}
