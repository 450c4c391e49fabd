"""Background work: what shadows are asked runs when nobody else has work, and takes nothing from anybody."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import events
from agent.core.background import DROPPED, BackgroundStatistics
from agent.core.effects import Complete, Evict, Fail, Standing, StandingChanged, StartBatch, StartLoad
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
from agent.core.request import CANCELLED, Batch, Outcome, Rejected, StepResult
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core.test_engine_properties import SETTINGS, WORKS, Setup, setups

PASS = Prediction("ok", 0.75)
FIRST_OFFER = 10**6


class Line:
    """Experts a, b and c; a2 and b2 in the shadow of a and b. K = 1 s, B = 2 s; a copy takes a byte."""

    def __init__(self, expert_bytes=3, executors=1, **limits):
        steps = {name.upper(): (RouteStep(name, frozenset({"ok"})),) for name in "abc"}
        names = ("a", "b", "c", "a2", "b2")
        performance = Performance(1.0, 2.0, max_batch=4, workspace_bytes=1)
        column = {name: ExpertProfile(f"{name}@fp32", performance, Footprint(1), {SSD: 10.0}) for name in names}
        self.graph = ExpertGraph(names, steps, {"a": "a2", "b": "b2"})
        self.matrix = PerformanceMatrix({"cpu": column})
        pool = PoolSpec("host", expert_bytes, 8)
        specs = [ExecutorSpec(number, "cpu", "host") for number in range(executors)]
        self.engine = Engine(self.graph, self.matrix, specs, PRESETS["coserve"], Limits((pool,), **limits))
        self.now = 0.0

    def handle(self, event, at_s=None):
        self.now = self.now if at_s is None else at_s
        effects = self.engine.handle(event, self.now)
        self.engine.check_invariants()
        return effects

    @property
    def background(self) -> BackgroundStatistics:
        return self.engine.statistics().background

    @property
    def resident(self) -> set[str]:
        (pool,) = self.engine.statistics().pools
        return set(pool.resident)

    def bring_shadow(self, shadow="a2", request=FIRST_OFFER):
        """The shadow is loaded, and its first batch under way."""
        (load,) = self.handle(events.Offered(request, shadow))
        (batch,) = self.handle(events.Loaded(load.load))
        return batch.batch


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_shadow_is_loaded_into_free_room_runs_one_image_and_decides_nothing():
    line = Line()
    assert line.handle(events.Offered(7, "a2")) == [StartLoad(1, "a2", "a2@fp32", SSD, "host", 1)]
    assert line.background == BackgroundStatistics(waiting=1)
    assert line.handle(events.Offered(8, "a2")) == []
    batch = Batch(1, 0, "a2", "a2@fp32", (7,), 1)
    assert line.handle(events.Loaded(1)) == [StartBatch(batch)]
    outcome = Outcome(Verdict.UNKNOWN, "ok", 0.75, (StepResult("a2", PASS),), "asked in the shadow of another expert")
    effects = line.handle(events.Finished(1, (PASS,)))
    assert effects == [Complete(7, outcome), StartBatch(replace(batch, id=2, requests=(8,)))]
    line.handle(events.Finished(2, (Rejected("not an image"),)))
    assert line.background == BackgroundStatistics(ran=1, failed=1)
    statistics = line.engine.statistics()
    assert (statistics.arrived, statistics.completed, statistics.failed, statistics.batches) == (0, 0, 0, 0)


def test_nothing_begins_in_the_background_while_a_request_is_in_flight():
    line = Line(executors=2)
    (assigned, load) = line.handle(events.Arrived(1, "A"))
    assert line.handle(events.Offered(FIRST_OFFER, "b2")) == []
    (batch,) = of(StartBatch, line.handle(events.Loaded(load.load)))
    assert line.handle(events.Offered(FIRST_OFFER + 1, "b2")) == []
    effects = line.handle(events.Finished(batch.batch.id, (PASS,)))
    assert [effect.request for effect in of(Complete, effects)] == [1]
    assert [effect.expert for effect in of(StartLoad, effects)] == ["b2"]
    assert assigned.request == 1


def test_a_pinned_expert_that_cannot_be_placed_now_keeps_no_shadow_waiting():
    line = Line(pinned=frozenset("c"))
    first, second = of(StartLoad, line.handle(events.Started()))
    assert (first.expert, second.expert) == ("c", "a")
    (third,) = of(StartLoad, line.handle(events.LoadFailed(first.load, "no drive", permanent=False)))
    for load in (second, third):
        line.handle(events.Loaded(load.load))
    assert [effect.expert for effect in of(StartLoad, line.handle(events.Offered(FIRST_OFFER, "a2")))] == ["a2"]


def test_who_arrives_meanwhile_has_the_other_executor_and_waits_for_nothing():
    line = Line(executors=2)
    (load,) = of(StartLoad, line.handle(events.Wanted("a")))
    line.handle(events.Loaded(load.load))
    line.bring_shadow()
    (batch,) = of(StartBatch, line.handle(events.Arrived(1, "A")))
    assert batch.batch.executor == 1


def test_a_load_in_the_background_takes_no_place_on_the_link():
    line = Line(loads_in_flight=1)
    line.handle(events.Offered(FIRST_OFFER, "a2"))
    assert [effect.expert for effect in of(StartLoad, line.handle(events.Arrived(1, "A")))] == ["a"]


def test_a_shadow_leaves_first_and_nothing_leaves_for_one():
    line = Line(expert_bytes=2)
    batch = line.bring_shadow()
    line.handle(events.Finished(batch.id, (PASS,)))
    (load,) = of(StartLoad, line.handle(events.Wanted("a")))
    line.handle(events.Loaded(load.load))
    assert line.resident == {"a2@fp32", "a@fp32"}
    effects = line.handle(events.Wanted("b"))  # of the weakest claim there is: free room only
    assert [effect.copy for effect in of(Evict, effects)] == ["a2@fp32"]
    (load,) = of(StartLoad, effects)
    line.handle(events.Loaded(load.load))
    assert line.handle(events.Offered(FIRST_OFFER + 1, "a2")) == []
    assert line.resident == {"a@fp32", "b@fp32"}


def test_who_lacks_room_that_a_shadow_has_waits_for_its_image_and_evicts_nobody():
    line = Line(expert_bytes=2)
    (load,) = of(StartLoad, line.handle(events.Wanted("a")))
    line.handle(events.Loaded(load.load))
    batch = line.bring_shadow()
    assert of(Evict, line.handle(events.Arrived(1, "B"))) == []
    effects = line.handle(events.Finished(batch.id, (PASS,)))
    assert [effect.copy for effect in of(Evict, effects)] == ["a2@fp32"]
    assert [effect.copy for effect in of(StartLoad, effects)] == ["b@fp32"]


def test_one_shadow_leaves_for_another_once_nothing_waits_for_it():
    line = Line(expert_bytes=1)
    batch = line.bring_shadow("a2")
    line.handle(events.Offered(FIRST_OFFER + 1, "b2"))
    line.handle(events.Offered(FIRST_OFFER + 2, "a2"))
    (_, again) = line.handle(events.Finished(batch.id, (PASS,)))
    assert again.batch.expert == "a2"
    effects = line.handle(events.Finished(again.batch.id, (PASS,)))
    assert [effect.copy for effect in of(Evict, effects)] == ["a2@fp32"]
    assert [effect.copy for effect in of(StartLoad, effects)] == ["b2@fp32"]


def test_a_shadow_is_not_placed_at_the_start():
    line = Line(expert_bytes=9)
    effects = line.handle(events.Started())
    while loads := of(StartLoad, effects):
        effects = [effect for load in loads for effect in line.handle(events.Loaded(load.load))]
    assert line.resident == {"a@fp32", "b@fp32", "c@fp32"}


def test_the_oldest_are_dropped_beyond_the_bound_and_counted():
    line = Line(background_requests=2)
    line.handle(events.Arrived(1, "A"))
    ended = [effect for number in range(5) for effect in line.handle(events.Offered(FIRST_OFFER + number, "a2"))]
    assert [effect.request - FIRST_OFFER for effect in ended] == [0, 1, 2]
    assert {effect.outcome.reason for effect in ended} == {DROPPED}
    assert line.background == BackgroundStatistics(waiting=2, dropped=3)


def test_one_that_waits_can_be_cancelled_and_a_drain_drops_the_others():
    line = Line()
    line.handle(events.Arrived(1, "A"))
    for number in range(3):
        line.handle(events.Offered(FIRST_OFFER + number, "a2"))
    (cancelled,) = line.handle(events.Cancelled(FIRST_OFFER + 1))
    assert cancelled == Fail(FIRST_OFFER + 1, Outcome(Verdict.UNKNOWN, None, None, (), CANCELLED))
    dropped = line.handle(events.Drain())
    assert [effect.request - FIRST_OFFER for effect in dropped] == [0, 2]
    (late,) = line.handle(events.Offered(FIRST_OFFER + 9, "a2"))
    assert late.outcome.reason == DROPPED
    assert line.background.dropped == 4


def test_only_who_is_in_the_shadow_of_another_is_asked_in_the_background():
    (fail,) = Line().handle(events.Offered(FIRST_OFFER, "c"))
    assert fail.outcome.reason == DROPPED


def test_the_same_request_is_not_taken_twice():
    line = Line()
    line.handle(events.Arrived(1, "A"))
    line.handle(events.Offered(2, "a2"))
    assert line.handle(events.Offered(1, "a2")) == line.handle(events.Offered(2, "a2")) == []
    assert line.handle(events.Arrived(2, "B")) == []
    assert line.engine.statistics().unexpected_events == 3


def test_a_memory_that_is_too_short_for_a_shadow_keeps_its_budget_and_has_no_shadow_for_a_while():
    line = Line(probation_s=1.0)
    (load,) = line.handle(events.Offered(FIRST_OFFER, "a2"))
    line.handle(events.LoadFailed(load.load, "no memory", permanent=False, out_of_memory=True))
    (pool,) = line.engine.statistics().pools
    assert pool.expert_bytes == 3
    assert line.handle(events.Tick(), at_s=0.9) == []
    assert line.engine.next_wakeup_s() == 1.0
    (load,) = line.handle(events.Tick(), at_s=1.0)
    (batch,) = line.handle(events.Loaded(load.load))
    (fail,) = line.handle(events.BatchFailed(batch.batch.id, "no memory", out_of_memory=True))
    assert (fail.request, fail.outcome.reason) == (FIRST_OFFER, "a2: no memory")
    assert line.engine.statistics().pools[0].expert_bytes == 3
    assert line.engine.statistics().on_probation == {}
    assert line.handle(events.Offered(FIRST_OFFER + 1, "a2"), at_s=1.5) == []
    assert of(StartBatch, line.handle(events.Tick(), at_s=2.0))


def test_a_shadow_that_breaks_is_on_probation_and_what_waits_for_it_ends():
    line = Line(expert_failures=2)
    batch = line.bring_shadow()
    line.handle(events.Offered(FIRST_OFFER + 1, "a2"))
    line.handle(events.Offered(FIRST_OFFER + 2, "a2"))
    (fail, again) = line.handle(events.BatchFailed(batch.id, "broke"))
    assert fail.outcome.reason == "a2: broke"
    effects = line.handle(events.BatchFailed(again.batch.id, "broke"))
    assert [effect.standing for effect in of(StandingChanged, effects)] == [Standing.PROBATION]
    assert [effect.copy for effect in of(Evict, effects)] == ["a2@fp32"]
    assert [effect.request - FIRST_OFFER for effect in of(Fail, effects)] == [1, 2]
    (load,) = line.handle(events.Offered(FIRST_OFFER + 3, "a2"), at_s=60.0)
    (batch,) = line.handle(events.Loaded(load.load))
    effects = line.handle(events.Finished(batch.batch.id, (PASS,)))
    assert [effect.standing for effect in of(StandingChanged, effects)] == [Standing.SERVING]


def test_another_line_drops_what_waits_for_who_is_no_shadow_any_more():
    line = Line()
    line.handle(events.Arrived(1, "A"))
    line.handle(events.Offered(FIRST_OFFER, "a2"))
    line.handle(events.Offered(FIRST_OFFER + 1, "b2"))
    graph = ExpertGraph(line.graph.experts, line.graph.routes, {"b": "b2"})
    effects = line.handle(events.LineChanged(graph, line.matrix, frozenset(), frozenset()))
    assert [effect.request for effect in of(Fail, effects)] == [FIRST_OFFER]
    assert line.background.waiting == 1


@pytest.mark.parametrize(
    ("shadows", "reason"),
    [
        ({"a": "x"}, "not both experts"),
        ({"a": "b"}, "on a route"),
        ({"a": "c", "c": "d"}, "has a shadow itself"),
        ({"a": "c", "b": "c"}, "the shadow of two"),
    ],
)
def test_a_graph_refuses_shadows_that_cannot_be(shadows, reason):
    with pytest.raises(ValueError, match=reason):
        ExpertGraph("abcd", {name: (RouteStep(name, frozenset({"ok"})),) for name in "ab"}, shadows)


class Play:
    """One Engine under virtual time; whatever shadows are asked takes no time at all."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.engine = setup.engine()
        self.log: list = []
        self.ran = 0
        self._agenda: list = []
        self._tickets = count()
        self._copies_s = {
            row.copy: 0.2 + 0.01 * row.footprint.total_bytes
            for column in setup.profile.experts.values()
            for row in column.values()
        }

    def post(self, at_s: float, event) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._tickets), event))

    def run(self, offers: list[tuple[float, str]]) -> list:
        offered = count(FIRST_OFFER)
        self.post(0.0, events.Started())
        while self._agenda:
            now, _, event = heapq.heappop(self._agenda)
            while offers and offers[0][0] <= now:
                at_s, shadow = offers[0]
                offers = offers[1:]
                self.handle(at_s, events.Offered(next(offered), shadow))
            self.handle(now, event)
            wakeup_s = self.engine.next_wakeup_s()
            if wakeup_s is not None and not self._agenda:
                self.post(wakeup_s, events.Tick())
        return self.log

    def handle(self, now: float, event) -> None:
        answers: list = []
        for effect in self.engine.handle(event, now):
            answers.extend(self.take(now, effect))
        self.engine.check_invariants()
        for answer in answers:
            self.handle(now, answer)

    def take(self, now: float, effect):
        """Keep what is of the line, as it would be without numbers; yield the answers to the rest, which is at once."""
        in_shadow = self.setup.graph.in_shadow
        if isinstance(effect, StartLoad):
            if effect.expert in in_shadow:
                yield events.Loaded(effect.load)
                return
            self.post(now + self._copies_s[effect.copy], events.Loaded(effect.load))
            self.log.append((now, effect.copy, effect.source, effect.pool))
        elif isinstance(effect, StartBatch):
            batch = effect.batch
            results = tuple(Prediction("ok", 0.9) if each % 3 else Prediction("bad", 0.9) for each in batch.requests)
            if batch.requests[0] >= FIRST_OFFER:
                self.ran += 1
                yield events.Finished(batch.id, results)
                return
            self.post(now + 0.02 + 0.01 * len(batch.requests), events.Finished(batch.id, results))
            self.log.append((now, replace(batch, id=0)))
        elif isinstance(effect, Evict):
            if effect.expert not in in_shadow:
                ranked = [each._replace(loaded_order=0, used_order=0) for each in effect.decision.candidates]
                self.log.append((now, replace(effect, decision=replace(effect.decision, candidates=tuple(ranked)))))
        elif not (isinstance(effect, Complete | Fail) and effect.request >= FIRST_OFFER):
            self.log.append((now, effect))


def in_little_memory(setup: Setup, spare_bytes: int) -> Setup:
    """The same line, nothing pinned, where the largest expert has room, and so much more."""
    rows = (row for column in setup.profile.experts.values() for row in column.values())
    expert_bytes = max(row.footprint.total_bytes for row in rows) + spare_bytes
    pools = tuple(replace(pool, expert_bytes=expert_bytes) for pool in setup.limits.pools)
    return replace(setup, limits=replace(setup.limits, pools=pools, pinned=frozenset()))


@st.composite
def traces(draw):
    """A line with shadows, what arrives, and what its shadows are asked, both with their seconds."""
    setup = in_little_memory(draw(setups().filter(lambda each: each.graph.in_shadow)), draw(st.integers(0, 25)))
    components, shadows = sorted(setup.graph.routes), sorted(setup.graph.in_shadow)
    arrivals, now = [], 0.0
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.01, 0.1, 2.0]))
        work = draw(st.sampled_from(WORKS))
        arrivals.append((now, events.Arrived(number, draw(st.sampled_from(components)), work=work)))
    moments = st.tuples(st.floats(0.0, now + 1.0, allow_nan=False), st.sampled_from(shadows))
    return setup, arrivals, sorted(draw(st.lists(moments, max_size=30)))


def played(setup: Setup, arrivals, offers) -> Play:
    play = Play(setup)
    for at_s, event in arrivals:
        play.post(at_s, event)
    play.run(offers)
    return play


@SETTINGS
@given(traces())
def test_background_work_that_takes_no_time_changes_nothing(trace):
    """Every decision of the line, with its reasons, is to the letter what it is without."""
    setup, arrivals, offers = trace
    assert played(setup, arrivals, offers).log == played(setup, arrivals, []).log


def test_background_work_runs_in_such_a_play():
    """What the property above compares is something: a shadow is loaded, runs, leaves, and what was there stays."""
    line = Line()
    limits = Limits((PoolSpec("host", 2, 8),))
    setup = Setup(line.graph, line.matrix, (ExecutorSpec(0, "cpu", "host"),), limits, "samba")
    arrivals = [(10.0 * number, events.Arrived(number, "AAAABBBB"[number])) for number in range(8)]
    play = played(setup, arrivals, [(5.0 + 10.0 * number, "a2") for number in range(8)])
    assert play.ran == 4
    assert play.engine.statistics().evictions == 1
    assert set(play.engine.statistics().pools[0].resident) == {"a@fp32", "b@fp32"}
