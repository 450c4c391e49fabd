"""Failures that pass are no verdict: probation, trials, pauses that double, and release; quarantine is for the rest."""

from __future__ import annotations

import itertools

import pytest

from agent.core import events
from agent.core.effects import Assigned, Complete, Evict, Fail, Standing, StandingChanged, StartBatch, StartLoad
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
from agent.core.request import Rejected
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep

OK = frozenset({"ok"})
PASSES = Prediction("ok", 1.0)
FAILURES = 3  # of loads, or of batches, that put an expert on probation
LOAD_BACKOFF_S, PROBATION_S, LONGEST_S = 0.25, 1.0, 60.0


class Line:
    """An Engine whose loads and batches are answered at once, in virtual time; faults are injected by expert.

    ``load_faults`` and ``batch_faults``: expert -> what is answered instead. Component X runs on expert x, component
    XY on x and then on y.
    """

    def __init__(self, experts="abcdef", capacity=2, executors=1, **limits):
        routes = {name.upper(): (RouteStep(name, OK),) for name in experts}
        routes["AB"] = (RouteStep("a", OK), RouteStep("b", OK))
        column = {name: ExpertProfile(name, Performance(1.0, 2.0, 4, 1), Footprint(1), {SSD: 1.0}) for name in experts}
        specs = [ExecutorSpec(number, "cpu", "host") for number in range(executors)]
        every_limit = Limits((PoolSpec("host", capacity, 8 * executors),), **limits)
        graph, profile = ExpertGraph(experts, routes), PerformanceMatrix({"cpu": column}, dict.fromkeys(experts, 0.1))
        self.engine = Engine(graph, profile, specs, PRESETS["coserve"], every_limit)
        self.load_faults: dict[str, events.LoadFailed] = {}
        self.batch_faults: dict[str, events.BatchFailed] = {}
        self.rejects: set[str] = set()
        self.held: list[StartBatch] | None = None  # a list: batches are not answered, but kept here
        self.now = 0.0
        self.log: list[tuple[float, object]] = []
        self.outcomes: dict[int, object] = {}
        self._requests = 0

    def ask(self, component):
        """A request comes; its number."""
        self._requests += 1
        self.handle(events.Arrived(self._requests, component))
        return self._requests

    def judge(self, component):
        """A request comes and, as everything is answered at once, ends: its verdict and the reason."""
        outcome = self.outcomes[self.ask(component)]
        return outcome.verdict, outcome.reason

    def pass_time(self, seconds):
        """Time passes; the Engine has its Ticks when it asks for them."""
        end_s = self.now + seconds
        while (wakeup_s := self.engine.next_wakeup_s()) is not None and wakeup_s <= end_s:
            self.now = max(self.now, wakeup_s)
            self.handle(events.Tick())
        self.now = end_s

    def handle(self, event):
        for effect in self.engine.handle(event, self.now):
            self.log.append((self.now, effect))
            if isinstance(effect, Complete | Fail):
                self.outcomes[effect.request] = effect.outcome
            elif isinstance(effect, StartLoad):
                fault = self.load_faults.get(effect.expert)
                answer = events.Loaded(effect.load)
                if fault is not None:
                    answer = events.LoadFailed(effect.load, fault.reason, fault.permanent)
                self.handle(answer)
            elif isinstance(effect, StartBatch):
                self.run(effect)
        self.engine.check_invariants()

    def run(self, started):
        if self.held is not None:
            self.held.append(started)
        else:
            self.answer(started)

    def answer(self, started):
        batch, fault = started.batch, self.batch_faults.get(started.batch.expert)
        if fault is not None:
            self.handle(events.BatchFailed(batch.id, fault.reason, fault.out_of_memory))
            return
        result = Rejected("not an image") if batch.expert in self.rejects else PASSES
        self.handle(events.Finished(batch.id, tuple(result for _ in batch.requests)))

    def of(self, kind, expert=None):
        """Effects of one kind, of one expert: with their times."""
        return [
            (at_s, each)
            for at_s, each in self.log
            if isinstance(each, kind) and expert in (None, getattr(each, "expert", None))
        ]

    def standings(self):
        return [(at_s, each.expert, each.standing) for at_s, each in self.of(StandingChanged)]

    @property
    def on_probation(self):
        return self.engine.statistics().on_probation


def loads_fail(reason="I/O error", *, permanent=False):
    return events.LoadFailed(0, reason, permanent)


def batches_fail(reason="it broke", *, out_of_memory=False):
    return events.BatchFailed(0, reason, out_of_memory)


def line_on_probation_by_loads(**options):
    """a's loads failed three times: at 0, 0.25 and 0.75 s."""
    line = Line(**options)
    line.load_faults["a"] = loads_fail()
    line.ask("A")
    line.pass_time(LOAD_BACKOFF_S * 3)
    return line


def line_on_probation_by_batches(**options):
    """Three of a's batches failed, at 0 s."""
    line = Line(**options)
    line.batch_faults["a"] = batches_fail()
    for _ in range(FAILURES):
        line.ask("A")
    return line


def test_loads_that_fail_in_a_row_mean_probation_and_unknown_with_the_last_reason():
    line = Line()
    line.load_faults["a"] = loads_fail("timed out")
    first, second = line.ask("A"), line.ask("A")
    line.pass_time(0.25)
    line.load_faults["a"] = loads_fail("I/O error")
    assert line.standings() == []
    line.pass_time(0.5)
    reason = "3 loads in a row failed, last: I/O error"
    assert line.on_probation == {"a": reason}
    assert line.engine.statistics().quarantined == {}
    ((at_s, told),) = line.of(StandingChanged)
    assert at_s == 0.75
    assert told == StandingChanged("a", Standing.PROBATION, reason, retry_s=1.0)
    for request in (first, second, line.ask("A")):
        assert line.outcomes[request].verdict is Verdict.UNKNOWN
        assert line.outcomes[request].reason == f"a is on probation: {reason}"


def test_the_engine_loads_an_expert_on_probation_again_by_itself_and_releases_it():
    line = line_on_probation_by_loads()
    line.load_faults.clear()
    assert line.engine.next_wakeup_s() == 1.75
    line.pass_time(0.99)
    assert line.judge("A")[0] is Verdict.UNKNOWN
    line.pass_time(0.01)
    assert line.standings()[1:] == [(1.75, "a", Standing.SERVING)]
    assert line.on_probation == {}
    assert line.judge("A") == (Verdict.OK, None)


def test_the_pause_doubles_up_to_a_minute_and_begins_anew_after_success():
    line = line_on_probation_by_loads()
    line.pass_time(400)
    told = [each.retry_s for _, each in line.of(StandingChanged)]
    assert told[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(told[8:]) == {60}
    loads = [at_s for at_s, _ in line.of(StartLoad, "a")]
    assert [later - earlier for earlier, later in itertools.pairwise(loads[2:])] == told[:-1]
    line.load_faults.clear()
    line.pass_time(60)
    assert line.on_probation == {}
    line.load_faults["a"] = loads_fail()
    for component in "BC":  # they take a's room
        line.judge(component)
    line.log.clear()
    line.ask("A")
    line.pass_time(0.75)
    assert [each.retry_s for _, each in line.of(StandingChanged)] == [1.0]


def test_an_expert_that_never_comes_back_is_tried_for_ever_and_no_number_grows_with_it():
    line = line_on_probation_by_loads()
    line.pass_time(60.0 * 3000)
    assert [each.retry_s for _, each in line.of(StandingChanged)][-1] == LONGEST_S
    assert line.on_probation["a"].startswith("300")


def test_a_trial_load_evicts_nobody():
    line = line_on_probation_by_loads()
    line.load_faults.clear()
    for component in "BC":
        line.judge(component)
    line.log.clear()
    line.pass_time(10)
    assert line.of(StartLoad) == []
    assert line.of(Evict) == []
    assert line.on_probation.keys() == {"a"}


def test_without_free_room_the_next_request_after_the_pause_is_the_trial():
    line = line_on_probation_by_loads()
    line.load_faults.clear()
    for component in "BC":
        line.judge(component)
    line.pass_time(10)
    assert line.judge("A") == (Verdict.OK, None)
    assert line.on_probation == {}


def test_a_pinned_expert_is_placed_again_as_soon_as_there_is_room():
    line = line_on_probation_by_loads(pinned=frozenset("a"))
    line.load_faults.clear()
    line.held = []
    line.ask("B")
    line.ask("C")
    line.pass_time(10)
    assert line.on_probation.keys() == {"a"}
    line.handle(events.Quarantined("c", "the operator said so"))  # its room is free
    assert line.on_probation == {}
    assert "a" in line.engine.statistics().pools[0].resident


def test_batches_that_fail_in_a_row_mean_probation_and_the_bytes_are_read_anew():
    line = line_on_probation_by_batches()
    reason = "3 batches in a row failed, last: it broke"
    assert line.on_probation == {"a": reason}
    assert [each for _, each in line.of(StandingChanged)] == [
        StandingChanged("a", Standing.PROBATION, reason, retry_s=PROBATION_S)
    ]
    assert "a" not in line.engine.statistics().pools[0].resident
    assert line.judge("A") == (Verdict.UNKNOWN, f"a is on probation: {reason}")
    assert line.outcomes[1].reason == "a: it broke"


def test_after_failed_batches_the_next_request_after_the_pause_is_the_trial():
    line = line_on_probation_by_batches()
    line.batch_faults.clear()
    line.pass_time(0.99)
    assert line.judge("A")[0] is Verdict.UNKNOWN
    line.pass_time(0.01)
    assert line.judge("A") == (Verdict.OK, None)
    assert line.standings()[1:] == [(1.0, "a", Standing.SERVING)]
    assert line.on_probation == {}


def test_nothing_is_loaded_for_a_trial_that_nobody_asks_for():
    line = line_on_probation_by_batches()
    line.log.clear()
    line.pass_time(100)
    assert line.log == []


def test_a_failed_trial_doubles_the_pause_and_says_how_many_failed():
    line = line_on_probation_by_batches()
    told = []
    for _ in range(9):
        line.pass_time(LONGEST_S)
        line.ask("A")
        told.append(line.of(StandingChanged)[-1][1])
    assert [each.retry_s for each in told] == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert told[0].reason == "4 batches in a row failed, last: it broke"
    line.batch_faults.clear()
    line.pass_time(LONGEST_S)
    line.ask("A")
    line.batch_faults["a"] = batches_fail()
    line.log.clear()
    for _ in range(FAILURES):
        line.ask("A")
    assert [each.retry_s for _, each in line.of(StandingChanged)] == [PROBATION_S]


def test_one_trial_at_a_time():
    line = line_on_probation_by_batches()
    line.pass_time(1.0)
    line.batch_faults.clear()
    line.held = []
    trial, others = line.ask("A"), [line.ask("A") for _ in range(3)]
    assert [started.batch.requests for started in line.held] == [(trial,)]
    assert all("on probation" in line.outcomes[other].reason for other in others)
    line.answer(line.held.pop())
    assert line.outcomes[trial].verdict is Verdict.OK


@pytest.mark.parametrize("fate", ["cancelled in its queue", "cancelled while it ran", "no memory", "not an image"])
def test_a_trial_that_says_nothing_of_the_expert_leaves_the_next_one_free(fate):
    line = line_on_probation_by_batches()
    line.pass_time(1.0)
    line.held = []
    if fate == "cancelled in its queue":
        line.ask("B")
        line.handle(events.Cancelled(line.ask("A")))
        line.answer(line.held.pop())
    else:
        trial = line.ask("A")
        if fate == "no memory":
            line.batch_faults["a"] = batches_fail("no memory", out_of_memory=True)
        elif fate == "not an image":
            line.batch_faults.clear()
            line.rejects.add("a")
        else:
            line.handle(events.Cancelled(trial))
        while line.held:
            line.answer(line.held.pop())
        assert trial in line.outcomes
    assert line.standings() == [(0.0, "a", Standing.PROBATION)]
    line.held, line.batch_faults, line.rejects = None, {}, set()
    assert line.judge("A") == (Verdict.OK, None)


def test_a_trial_without_memory_is_run_again_alone_like_any_other():
    line = line_on_probation_by_batches()
    line.pass_time(1.0)
    line.batch_faults["a"] = batches_fail("no memory", out_of_memory=True)
    line.held = []
    trial = line.ask("A")
    line.answer(line.held.pop())
    line.batch_faults.clear()
    line.answer(line.held.pop())
    assert line.outcomes[trial].verdict is Verdict.OK


@pytest.mark.parametrize("fate", ["no memory", "cancelled"])
def test_what_is_not_the_experts_fault_does_not_count_against_it(fate):
    line = Line()
    line.batch_faults["a"] = batches_fail("no memory", out_of_memory=fate == "no memory")
    for _ in range(5):
        line.held = [] if fate == "cancelled" else None
        request = line.ask("A")
        if fate == "cancelled":
            line.handle(events.Cancelled(request))
            line.answer(line.held.pop())
        assert line.outcomes[request].verdict is Verdict.UNKNOWN
    assert line.standings() == []


def test_an_image_that_cannot_be_read_does_not_end_a_row_of_failures():
    line = Line()
    for fault in (batches_fail(), None, batches_fail(), None, batches_fail()):
        line.batch_faults = {} if fault is None else {"a": fault}
        line.rejects = {"a"}
        line.ask("A")
    assert line.on_probation.keys() == {"a"}


def test_a_good_batch_ends_a_row_of_failures():
    line = Line()
    for fault in (batches_fail(), batches_fail(), None, batches_fail(), batches_fail()):
        line.batch_faults = {} if fault is None else {"a": fault}
        line.ask("A")
    assert line.standings() == []


def test_what_ran_when_others_failed_may_release_but_does_not_lengthen_the_pause():
    for goes_well in (True, False):
        line = Line(executors=2)
        line.held = []
        for _ in range(4):
            line.ask("A")
        by_executor = {started.batch.executor: started for started in line.held}
        assert by_executor.keys() == {0, 1}
        late = by_executor[1]
        line.held.remove(late)
        line.batch_faults["a"] = batches_fail()
        while line.held and not line.on_probation:
            line.answer(line.held.pop())
            if not line.held and not line.on_probation:
                line.ask("A")
        assert line.on_probation.keys() == {"a"}
        assert "a" in line.engine.statistics().pools[0].resident  # the late one runs on it
        if goes_well:
            line.batch_faults.clear()
        line.answer(late)
        standings = [standing for _, _, standing in line.standings()]
        assert standings == [Standing.PROBATION, Standing.SERVING] if goes_well else [Standing.PROBATION]


def test_a_route_that_comes_to_an_expert_on_probation_keeps_its_steps():
    line = Line()
    line.batch_faults["b"] = batches_fail()
    for _ in range(FAILURES):
        line.ask("B")
    outcome = line.outcomes[line.ask("AB")]
    assert [step.expert for step in outcome.steps] == ["a"]
    assert "b is on probation" in outcome.reason


def test_bad_weights_found_during_probation_are_for_good():
    line = line_on_probation_by_loads()
    line.load_faults["a"] = loads_fail("wrong sha256", permanent=True)
    line.pass_time(1000)
    statistics = line.engine.statistics()
    assert (statistics.quarantined, statistics.on_probation) == ({"a": "wrong sha256"}, {})
    assert line.standings()[1:] == [(1.75, "a", Standing.QUARANTINE)]
    line.load_faults.clear()
    line.pass_time(1000)
    assert line.judge("A") == (Verdict.UNKNOWN, "a is in quarantine: wrong sha256")


def test_the_shells_word_is_for_good_and_told_once():
    line = line_on_probation_by_batches()
    for _ in range(2):
        line.handle(events.Quarantined("a", "the operator said so"))
    line.batch_faults.clear()
    line.pass_time(1000)
    assert line.judge("A") == (Verdict.UNKNOWN, "a is in quarantine: the operator said so")
    assert [standing for _, _, standing in line.standings()] == [Standing.PROBATION, Standing.QUARANTINE]


def test_who_is_on_probation_is_not_loaded_on_a_guess():
    line = Line(capacity=3)
    line.load_faults["b"] = loads_fail()
    line.ask("B")
    line.pass_time(0.75)
    line.log.clear()
    line.ask("AB")  # b would be speculated on while a runs
    assert line.of(StartLoad, "b") == []


def test_a_stopping_agent_tries_nobody_again():
    line = line_on_probation_by_loads()
    line.handle(events.Drain())
    line.log.clear()
    line.pass_time(100)
    assert line.log == []


@pytest.mark.parametrize(("kind", "most"), [("loads", 20), ("batches", 35), ("both in turn", 100)])
def test_an_expert_that_flaps_never_loops_hot(kind, most):
    """Ten requests a second for ten minutes: what fails is tried a few times, then once a pause."""
    line = Line()
    for number in range(6000):
        loads, batches = kind == "loads", kind == "batches"
        if kind == "both in turn":
            loads, batches = number // 350 % 2 == 0, number // 350 % 2 == 1
        line.load_faults = {"a": loads_fail()} if loads else {}
        line.batch_faults = {"a": batches_fail()} if batches else {}
        line.ask("A")
        line.pass_time(0.1)
    batches_tried = sum(started.batch.expert == "a" for _, started in line.of(StartBatch))
    assert len(line.of(StartLoad, "a")) + batches_tried < most
    assert len(line.of(Assigned)) < most
    line.load_faults, line.batch_faults = {}, {}
    line.pass_time(LONGEST_S)
    assert line.judge("A") == (Verdict.OK, None)


def test_a_trial_reads_its_bytes_anew_also_where_another_executor_still_ran_on_them():
    line = Line(executors=2)
    line.batch_faults["a"] = batches_fail()
    line.held = []
    for _ in range(4):
        line.ask("A")
    while line.held and "a" not in line.on_probation:
        line.answer(line.held.pop(0))
    assert "a" in line.on_probation
    while line.held:  # the other executor's batch ends after the probation began
        line.answer(line.held.pop(0))
    assert "a" not in line.engine.statistics().pools[0].resident


def test_loads_that_fail_leave_a_probation_for_batches_to_batches():
    line = line_on_probation_by_batches()
    line.load_faults["a"] = loads_fail()
    line.pass_time(PROBATION_S)
    line.ask("A")  # the trial; its loads fail
    line.pass_time(LOAD_BACKOFF_S * 3)
    assert line.on_probation == {"a": "3 loads in a row failed, last: I/O error"}
    line.load_faults.clear()
    line.pass_time(LONGEST_S)
    assert "a" in line.on_probation  # a good load says nothing of the batches
    assert line.judge("A")[0] is Verdict.UNKNOWN
    line.batch_faults.clear()
    line.pass_time(2 * LONGEST_S)
    assert line.judge("A") == (Verdict.OK, None)
    assert line.on_probation == {}
