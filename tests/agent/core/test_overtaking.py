"""Bounds on overtaking: groups that stop growing, and heads that waited beyond the bound."""

import pytest

from agent.core import events
from agent.core.performance import PoolSpec
from tests.agent.core.worlds import Line, alone


def one_memory(*experts, room=1, **more):
    """An executor for each of these, all in one memory."""
    processors = {f"p{number}": (each, "host") for number, each in enumerate(experts)}
    return Line((PoolSpec("host", room, 4 * len(experts)),), processors, **more)


def test_requests_of_one_expert_run_together_and_split_at_the_maximum_batch():
    """Figure 9: a b a b a a, with a maximum of 3."""
    line, ran = alone(policy="paper", host=1, max_batch=3), []
    for component in "ABABAA":
        line.arrive(component)
    while line.answer():
        ran += [batch.requests for batch in line.running.values() if batch.requests not in ran]
    assert ran == [(1, 3, 5), (6,), (2, 4)]


@pytest.mark.parametrize(("policy", "joined"), [("coserve", [True, False]), ("paper", [True, True])])
def test_group_stops_growing_once_a_request_behind_it_waited_for_the_bound(policy, joined):
    line = alone(policy=policy, max_overtake_s=5.0)
    line.arrive("A", at=0.0)
    line.arrive("B", at=1.0)
    told = []
    for at_s in (5.9, 6.0):
        line.arrive("A", at=at_s)
        told.append(line.assigned.joined)
    assert told == joined


@pytest.mark.parametrize(("since_s", "told"), [(1.0, []), (0.4, ["run x"])])
def test_executors_sharing_a_copy_yield_it_to_an_overdue_head(since_s, told):
    line = one_memory("x", "x", "y", max_batch=1, max_overtake_s=5.0)
    first = line.serve("x", 0.0)
    second = line.serve("x", 0.0)
    assert (first.executor, second.executor) == (0, 1)
    waiting = [("x", since_s), ("y", 0.5)] if since_s < 0.5 else [("y", 0.5), ("x", 1.0), ("x", 1.0)]
    for expert, at_s in waiting:
        line.serve(expert, at_s)
    assert line.finished("x", at=6.0) == told  # held for y, as the second still runs on x
    if not told:
        assert line.finished("x", at=7.0) == ["evict x host stage 3", "load y ssd>host"]


@pytest.mark.parametrize(
    "script",
    [  # x's executor always has work: y's turn comes when x's older requests ran, and not before y is overdue
        "serve x @0.0; serve x @0.0; serve y @0.5; serve x @2.0; finished x @3.0 -> run x;"
        "finished x @6.0 -> evict x host stage 3, load y ssd>host",
        "serve x @0.0; serve x @0.4; serve y @0.5; finished x @6.0 -> run x",
        "serve x @0.0; serve y @0.5; short x @6.0 -> run x",
    ],
    ids=["it grows old with its oldest request", "an older one goes first", "a failed batch makes it no younger"],
)
def test_group_is_as_old_as_its_oldest_request(script):
    one_memory("x", "y", max_batch=1, max_overtake_s=5.0).play(script)


@pytest.mark.parametrize("policy", ["coserve", "paper"])
def test_load_that_a_request_waited_for_is_a_switch(policy):
    line = alone(policy=policy)
    line.play("ask a; ask b; loaded a" + ("; loaded b" if policy == "coserve" else ""))  # its turn has not come: a runs
    assert line.engine.statistics().switches == 1


# -- past a group whose expert is in memory, but held for an overdue head --


@pytest.fixture
def line():
    """Executor 1 runs what is pinned (c), executor 2 what is in use (a); executor 0 waits since 0 s for h, of two of
    three bytes."""
    line = one_memory("h", "acx", "a", room=3, sizes={"h": 2}, max_overtake_s=1.0, pinned=frozenset("c"))
    assert line.serve("c", 0.0).executor == 1
    assert line.serve("a", 0.0).executor == 2
    assert line.ask("h", at=0.0) == []
    return line


@pytest.mark.parametrize(("at_s", "may_pass"), [(4.5, True), (4.99, True), (5.0, False), (5.5, False)])
def test_request_runs_past_an_earlier_one_only_within_the_overtaking_bound(line, at_s, may_pass):
    for expert, since_s in (("a", 4.0), ("c", at_s)):
        line.ask(expert, at=since_s)
        assert line.assigned.executor == 1
    assert line.finished("c", at=6.0) == (["run c"] if may_pass else [])


def test_request_without_an_earlier_one_in_its_pool_runs_despite_late_arrivals(line):
    for expert, since_s in (("x", 3.9), ("c", 4.0), ("c", 5.5)):
        line.ask(expert, at=since_s)
    assert line.finished("c", at=6.0) == ["run c"]


def test_pinned_expert_is_placed_where_its_executor_can_run_it():
    for policy, placed in (("samba", []), ("coserve", ["load a ssd>host"])):  # Samba-CoE uses the first executor alone
        line = one_memory("", "a", room=2, policy=policy, pinned=frozenset("a"))
        assert line.handle(events.Started()) == placed
