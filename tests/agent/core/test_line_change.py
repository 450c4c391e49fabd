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
def test_replaced_expert_is_evicted_after_its_last_use(before, after):
    line = ChangingLine({"A": ["a"], "B": ["b"]})
    line.play(before)
    line.change(NEXT | {"B": ["b"]}, retired=["a"])
    if after:
        line.play(after)
    assert "a" not in line.there


def test_draining_engine_loads_no_expert_of_a_new_line(line):
    line.handle(events.Drain())
    line.change({"A": ["a"], "B": ["b"]}, pinned=["b"])
    assert not line.loads


def test_expert_replaced_while_running_is_evicted_after_its_last_request(line):
    line.handle(events.Arrived(1, "A"))
    line.loaded("a")
    line.handle(events.Arrived(2, "A"))
    line.change(NEXT, retired=["a"])
    line.finished("a")
    assert line.there == {"a"}
    line.finished("a")
    assert {number: outcome.steps[0].expert for number, outcome in line.outcomes.items()} == {1: "a", 2: "a"}
    assert line.there == set()


def test_request_is_finished_by_the_routes_of_its_arrival():
    line = ChangingLine({"A": ["a", "c"]})
    line.handle(events.Arrived(1, "A"))
    line.change(NEXT, retired=["a", "c"])
    line.handle(events.Arrived(2, "A"))
    for expert in ("a", "a+2", "c"):
        line.loaded(expert)
        line.finished(expert)
    assert [[step.expert for step in line.outcomes[number].steps] for number in (1, 2)] == [["a", "c"], ["a+2"]]
    assert line.there == {"a+2"}


def test_newly_pinned_expert_is_loaded_and_stays():
    line = ChangingLine({"A": ["a"], "B": ["b"], "C": ["c"]}, capacity=2)
    line.change({"A": ["a"], "B": ["b"], "C": ["c"]}, pinned=["a"])
    line.loaded("a")
    for number, expert in enumerate("bc"):
        line.handle(events.Arrived(number, expert.upper()))
        line.loaded(expert)
        line.finished(expert)
    assert line.there == {"a", "c"}


def test_statistics_show_work_under_earlier_routes_until_it_ends(line):
    line.handle(events.Arrived(1, "A"))
    assert not line.engine.statistics().serves_earlier_lines
    line.change(NEXT, retired=["a"])
    assert line.engine.statistics().serves_earlier_lines
    line.loaded("a")
    line.finished("a")
    assert not line.engine.statistics().serves_earlier_lines


def test_idle_retired_expert_needs_no_profile(line):
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


def test_retired_expert_on_probation_is_not_tried_again(line):
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


def test_pending_placements_survive_a_line_change_except_of_retired_experts():
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
def test_last_requests_of_a_retired_expert_end_without_its_profile(line, answer):
    line.change(NEXT, retired=["a"])
    for number in range(2):
        line.handle(events.Arrived(number, expert="a"))
    line.loaded("a")
    line.change(NEXT, retired=["a"], unknown=["a"])
    while "a" in line.batches:
        line.handle(answer(line.batches["a"].id))
    assert line.outcomes.keys() == {0, 1}
    assert line.there <= {"a+2"}
