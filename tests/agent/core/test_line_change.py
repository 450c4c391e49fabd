"""Another line while the Engine works: what was accepted is finished by the earlier one, and then that one is gone."""

import pytest

from agent.core import events
from agent.core.performance import PerformanceMatrix, PoolSpec
from experts.expert import Verdict
from tests.agent.core.shell import PASS
from tests.agent.core.worlds import Line, graph_of, row


class ChangingLine(Line):
    """One executor; route X runs on the experts that ``routes`` gives it."""

    def __init__(self, routes, capacity=4, **limits):
        names = sorted(set().union(*routes.values()))
        usage, processors = dict.fromkeys(names, 0.1), {"cpu": (names, "host")}
        super().__init__((PoolSpec("host", capacity, 8),), processors, "paper", routes=routes, usage=usage, **limits)

    def change(self, routes, retired=(), pinned=(), unknown=()):
        """``unknown``: retired experts of which nothing is known any more."""
        names = {expert for steps in routes.values() for expert in steps} | set(retired)
        matrix = PerformanceMatrix({"cpu": {name: row(name) for name in sorted(names - set(unknown))}})
        self.handle(events.LineChanged(graph_of(names, routes), matrix, frozenset(pinned), frozenset(retired)))

    @property
    def there(self):
        return {copy.partition("@")[0] for copy in self.pools()[0].resident}


NEXT = {"A": ["a+2"]}


@pytest.fixture
def line():
    """Component A on expert a, which was never loaded; a+2 takes its place with NEXT."""
    return ChangingLine({"A": ["a"]})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("wanted a; loaded a", ""),
        ("wanted a", "loaded a -> evict a host stage 0"),
        ("arrive A", "loaded a -> run a; finished a => OK 1 after a | evict a host stage 0"),
        ("wanted a; loaded a; arrive B; loaded b; arrive A", "cancelled 2 -> evict a host stage 0"),
    ],
    ids=["no request needs it", "it loads", "it loads for a request", "a request waits for it"],
)
def test_an_expert_that_is_replaced_leaves_once_nothing_needs_it(before, after):
    line = ChangingLine({"A": ["a"], "B": ["b"]})
    line.play(before)
    line.change(NEXT | {"B": ["b"]}, retired=["a"])
    if after:
        line.play(after)
    assert "a" not in line.there


def test_while_it_stops_no_expert_of_another_line_is_brought(line):
    line.handle(events.Drain())
    line.change({"A": ["a"], "B": ["b"]}, pinned=["b"])
    assert not line.loads


def test_one_that_is_replaced_while_it_runs_leaves_once_its_last_request_has_ended(line):
    line.handle(events.Arrived(1, "A"))
    line.loaded("a")
    line.handle(events.Arrived(2, "A"))
    line.change(NEXT, retired=["a"])
    line.finished("a")
    assert line.there == {"a"}
    line.finished("a")
    assert {number: outcome.steps[0].expert for number, outcome in line.outcomes.items()} == {1: "a", 2: "a"}
    assert line.there == set()


def test_a_request_is_finished_by_the_routes_it_came_under():
    line = ChangingLine({"A": ["a", "c"]})
    line.handle(events.Arrived(1, "A"))
    line.change(NEXT, retired=["a", "c"])
    line.handle(events.Arrived(2, "A"))
    for expert in ("a", "a+2", "c"):
        line.loaded(expert)
        line.finished(expert)
    assert [[step.expert for step in line.outcomes[number].steps] for number in (1, 2)] == [["a", "c"], ["a+2"]]
    assert line.there == {"a+2"}


def test_an_expert_that_is_pinned_from_now_on_is_brought_and_stays():
    line = ChangingLine({"A": ["a"], "B": ["b"], "C": ["c"]}, capacity=2)
    line.change({"A": ["a"], "B": ["b"], "C": ["c"]}, pinned=["a"])
    line.loaded("a")
    for number, expert in enumerate("bc"):
        line.handle(events.Arrived(number, expert.upper()))
        line.loaded(expert)
        line.finished(expert)
    assert line.there == {"a", "c"}


def test_it_is_told_while_something_is_under_way_that_came_under_earlier_routes(line):
    line.handle(events.Arrived(1, "A"))
    assert not line.engine.statistics().serves_earlier_lines
    line.change(NEXT, retired=["a"])
    assert line.engine.statistics().serves_earlier_lines
    line.loaded("a")
    line.finished("a")
    assert not line.engine.statistics().serves_earlier_lines


def test_of_a_retired_expert_nothing_has_to_be_known_once_nobody_needs_it(line):
    line.handle(events.Wanted("a"))
    line.change(NEXT, retired=["a"], unknown=["a"])
    line.load_failed("a")
    line.now = line.engine.next_wakeup_s()
    line.handle(events.Wanted("a"))
    assert "a" not in line.loads
    line.handle(events.Arrived(1, "A"))
    line.loaded("a+2")
    line.finished("a+2")
    assert line.outcomes[1].verdict is Verdict.OK


def test_a_retired_expert_on_probation_is_tried_no_more(line):
    line.handle(events.Arrived(1, "A"))
    for _ in range(3):
        line.load_failed("a")
        line.now = line.engine.next_wakeup_s()
        if line.engine.statistics().on_probation:
            break
        line.handle(events.Tick())
    line.change(NEXT, retired=["a"], unknown=["a"])
    line.handle(events.Tick())
    assert "a" in line.engine.statistics().on_probation
    assert "a" not in line.loads


def test_what_waits_to_be_placed_is_placed_though_the_line_changes_unless_it_has_gone():
    """A load at a time: of a, b and c the first is on its way when the others wait."""
    line = ChangingLine({"A": ["a"], "B": ["b"], "C": ["c"]}, loads_in_flight=1)
    line.handle(events.Started())
    line.change({"A": ["a"], "C": ["c"], "D": ["d"]}, retired=["b"])
    order = []
    while line.loads:
        (expert,) = line.loads
        order.append(expert)
        line.loaded(expert)
    assert order == ["a", "c", "d"]


@pytest.mark.parametrize(
    "answer", [lambda batch: events.Finished(batch, (PASS,)), lambda batch: events.BatchFailed(batch, "broke")]
)
def test_what_was_asked_of_a_retired_expert_at_the_last_moment_ends_whatever_is_known_of_it(line, answer):
    line.change(NEXT, retired=["a"])
    for number in range(2):
        line.handle(events.Arrived(number, expert="a"))
    line.loaded("a")
    line.change(NEXT, retired=["a"], unknown=["a"])
    while "a" in line.batches:
        line.handle(answer(line.batches["a"].id))
    assert line.outcomes.keys() == {0, 1}
    assert line.there <= {"a+2"}
