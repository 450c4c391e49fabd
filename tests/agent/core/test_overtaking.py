"""Who may run past a group whose expert is in memory, but held for a head that has waited beyond the bound."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import Assigned, StartBatch, StartLoad
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
from experts.expert import Prediction
from experts.graph import ExpertGraph

PASS = Prediction("ok", 1.0)
LARGE = "h"  # of two bytes: of three that there are, the pinned one takes one, and the one in use another
PINNED, IN_USE, ELSEWHERE = "c", "a", "x"
RUNS_ON = {"p0": [LARGE], "p1": [IN_USE, PINNED, ELSEWHERE], "p2": [IN_USE]}


@pytest.fixture
def engine():
    """Executor 1 runs what is pinned, executor 2 what is in use; executor 0 waits for the large one, since 0 s."""
    experts = [LARGE, IN_USE, PINNED, ELSEWHERE]
    rows = {
        name: ExpertProfile(name, Performance(1.0, 1.0, 4, 1), Footprint(2 if name == LARGE else 1), {SSD: 1.0})
        for name in experts
    }
    matrix = PerformanceMatrix({each: {name: rows[name] for name in named} for each, named in RUNS_ON.items()})
    executors = [ExecutorSpec(number, processor, "host") for number, processor in enumerate(RUNS_ON)]
    limits = Limits((PoolSpec("host", 3, 12),), max_overtake_s=1.0, pinned=frozenset(PINNED))
    engine = Engine(ExpertGraph(experts, {}), matrix, executors, PRESETS["coserve"], limits)
    for number, expert in enumerate([PINNED, IN_USE]):
        ask(engine, number, expert, 0.0, executor=number + 1)
        assert started(engine.handle(events.Loaded(number + 1), 0.0)) == [expert]
    assert ask(engine, 2, LARGE, 0.0, executor=0) == []
    return engine


def ask(engine, request, expert, at_s, executor):
    effects = engine.handle(events.Arrived(request, expert=expert), at_s)
    (assigned,) = (effect for effect in effects if isinstance(effect, Assigned))
    assert assigned.executor == executor
    return [effect for effect in effects if not isinstance(effect, Assigned | StartLoad)]


def started(effects):
    return [effect.batch.expert for effect in effects if isinstance(effect, StartBatch)]


@pytest.mark.parametrize(("at_s", "may_pass"), [(4.5, True), (4.99, True), (5.0, False), (5.5, False)])
def test_nobody_runs_past_one_that_is_here_who_came_later_than_it_by_the_bound(engine, at_s, may_pass):
    ask(engine, 3, IN_USE, 4.0, executor=1)
    ask(engine, 4, PINNED, at_s, executor=1)
    assert started(engine.handle(events.Finished(1, (PASS,)), 6.0)) == ([PINNED] if may_pass else [])


def test_one_that_nobody_here_stands_before_runs_however_late_its_last_request_came(engine):
    ask(engine, 3, ELSEWHERE, 3.9, executor=1)
    ask(engine, 4, PINNED, 4.0, executor=1)
    ask(engine, 5, PINNED, 5.5, executor=1)
    assert started(engine.handle(events.Finished(1, (PASS,)), 6.0)) == [PINNED]
