"""A box with less memory than was planned with: smaller batches, less in memory, other executors, and UNKNOWN last."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import BudgetChanged, Complete, Evict, Fail, FellBack, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.performance import (
    DEVICE,
    HOST,
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
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep

PASS = Prediction("ok", 0.9)


class Box:
    """A device and a CPU, each with memory of its own; answers are given at once, but for faults by (pool, kind)."""

    def __init__(
        self,
        device_bytes=3,
        with_cpu=True,
        cache=None,
        is_one_piece=False,
        cpu_form="fp32",
        gpu_k_s=0.001,
        own_bytes=1,
        pinned=(),
    ):
        def row(name, form, k_s):
            performance = Performance(k_s, 0.1, 4, 1)
            return ExpertProfile(f"{name}@{form}", performance, Footprint(own_bytes), {SSD: 0.1, HOST: 0.05})

        names = "abcd"
        columns = {"gpu": {name: row(name, "fp16", gpu_k_s) for name in names}}
        executors = [ExecutorSpec(0, "gpu", DEVICE)]
        pools = [PoolSpec(DEVICE, device_bytes, 4, cache, is_one_piece), PoolSpec(HOST, 8, 8)]
        if with_cpu:
            columns["cpu"] = {name: row(name, cpu_form, 1.0) for name in names}
            executors.append(ExecutorSpec(1, "cpu", HOST))
        graph = ExpertGraph(names, {name.upper(): (RouteStep(name, frozenset({"ok"})),) for name in names})
        self.columns = columns
        matrix = PerformanceMatrix(columns, dict.fromkeys(names, 0.25))
        self.engine = Engine(
            graph, matrix, executors, PRESETS["coserve"], Limits(tuple(pools), pinned=frozenset(pinned))
        )
        self.no_room_for_loads: set[str] = set()  # pools, or copies
        self.no_room_for_batches: set[int] = set()  # executors
        self.held: list | None = None  # a list: answers are not given, but kept here
        self.load_s = 0.0  # until one that fails has its answer
        self.log = []
        self.outcomes = {}
        self.now = 0.0
        self.count = 0

    def handle(self, event):
        for effect in self.engine.handle(event, self.now):
            self.log.append(effect)
            if isinstance(effect, Complete | Fail):
                self.outcomes[effect.request] = effect.outcome
            elif isinstance(effect, StartLoad):
                failed = bool({effect.pool, effect.copy} & self.no_room_for_loads)
                answer = events.LoadFailed(effect.load, "no memory", permanent=False, out_of_memory=True)
                self.now += self.load_s
                self.answer(answer if failed else events.Loaded(effect.load))
            elif isinstance(effect, StartBatch):
                batch = effect.batch
                if batch.executor in self.no_room_for_batches:
                    self.answer(events.BatchFailed(batch.id, "no memory", out_of_memory=True))
                else:
                    self.answer(events.Finished(batch.id, (PASS,) * len(batch.requests)))
            self.engine.check_invariants()

    def answer(self, event):
        if self.held is None:
            self.handle(event)
        else:
            self.held.append(event)

    def release(self):
        held, self.held = self.held, None
        for event in held:
            self.handle(event)

    def ask(self, component):
        self.count += 1
        self.handle(events.Arrived(self.count, component))
        return self.count

    def wait(self, seconds):
        end_s = self.now + seconds
        while (wakeup_s := self.engine.next_wakeup_s()) is not None and wakeup_s <= end_s:
            self.now = max(self.now, wakeup_s)
            self.handle(events.Tick())
        self.now = end_s

    def of(self, kind):
        return [effect for effect in self.log if isinstance(effect, kind)]

    def budget(self, name):
        return next(pool.expert_bytes for pool in self.engine.statistics().pools if pool.name == name)


def test_a_load_that_finds_no_memory_lowers_the_budget_to_what_was_there():
    box = Box(device_bytes=3)
    box.ask("A")
    box.ask("B")
    box.no_room_for_loads = {DEVICE}
    box.ask("C")
    (lowered,) = box.of(BudgetChanged)
    assert (lowered.pool, lowered.before_bytes, lowered.after_bytes, lowered.reason) == (DEVICE, 3, 2, "no memory")
    box.no_room_for_loads = set()
    box.wait(1.0)
    assert [outcome.verdict for outcome in box.outcomes.values()] == [Verdict.OK] * 3
    assert box.budget(DEVICE) == 2
    assert box.of(Evict)  # C came where one of the others was


def test_no_budget_is_lowered_below_what_each_expert_needs():
    box = Box(device_bytes=3)
    box.no_room_for_loads = {DEVICE}
    box.ask("A")
    box.wait(5.0)
    assert box.budget(DEVICE) == 1


def test_an_expert_that_cannot_be_had_on_the_device_is_asked_on_the_cpu():
    box = Box()
    box.no_room_for_loads = {DEVICE}
    requests = [box.ask("A") for _ in range(3)]
    box.wait(5.0)
    assert [box.outcomes[request].verdict for request in requests] == [Verdict.OK] * 3
    assert {started.batch.executor for started in box.of(StartBatch)} == {1}
    fell = box.of(FellBack)[0]
    assert (fell.expert, fell.pool, fell.reason) == ("a", DEVICE, "no memory")


def test_it_is_tried_on_the_device_again_once_its_pause_is_over():
    box = Box()
    box.no_room_for_loads = {DEVICE}
    box.ask("A")
    box.wait(5.0)
    box.no_room_for_loads = set()
    box.wait(120.0)
    request = box.ask("A")
    box.wait(1.0)
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.of(StartBatch)[-1].batch.executor == 0


def test_without_another_executor_it_is_unknown_and_on_probation():
    box = Box(with_cpu=False)
    box.no_room_for_loads = {DEVICE}
    request = box.ask("A")
    box.wait(5.0)
    assert box.outcomes[request].verdict is Verdict.UNKNOWN
    assert "a" in box.engine.statistics().on_probation


def test_where_nothing_can_be_had_anywhere_it_is_unknown():
    box = Box()
    box.no_room_for_loads = {DEVICE, HOST}
    request = box.ask("A")
    box.wait(10.0)
    assert box.outcomes[request].verdict is Verdict.UNKNOWN


def test_a_batch_without_memory_gets_smaller_then_less_lies_there_then_it_runs_elsewhere():
    box = Box(device_bytes=3)
    for component in "AB":
        box.ask(component)
    box.no_room_for_batches = {0}
    request = box.ask("A")
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.of(BudgetChanged)[0].after_bytes < 3
    assert box.of(BudgetChanged)[0].reason == "no memory"
    assert box.of(StartBatch)[-1].batch.executor == 1
    later = box.ask("A")  # while the device's copy pauses nobody is sent there
    assert box.outcomes[later].verdict is Verdict.OK
    assert box.of(StartBatch)[-1].batch.executor == 1


@pytest.mark.parametrize("pools", [{DEVICE}, {DEVICE, HOST}])
def test_others_are_judged_all_the_while(pools):
    box = Box()
    box.ask("B")
    box.no_room_for_loads = pools
    for _ in range(5):
        box.ask("A")
        assert box.outcomes[box.ask("B")].verdict is Verdict.OK
    box.wait(60.0)
    assert len(box.outcomes) == 11


def test_a_failure_on_the_device_long_ago_does_not_hide_that_nothing_comes_to_it_any_more():
    box = Box(cache=HOST)
    box.no_room_for_loads = {DEVICE}
    box.handle(events.Wanted("a"))
    box.handle(events.Unwanted("a"))
    assert not box.engine.statistics().pools[1].resident
    box.no_room_for_loads = {"a@fp16"}
    request = box.ask("A")
    box.wait(10.0)
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.of(StartBatch)[-1].batch.executor == 1


def test_an_expert_on_the_device_is_asked_there_though_the_host_has_no_room_for_it():
    box = Box(cache=HOST, cpu_form="fp16", gpu_k_s=2.0)  # the CPU runs the same copy, and faster
    box.handle(events.Wanted("a"))
    box.no_room_for_loads = {HOST}
    request = box.ask("A")
    box.wait(5.0)
    assert box.of(FellBack)[0].pool == HOST
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.of(StartBatch)[-1].batch.executor == 0


@pytest.mark.parametrize("load_s", [0.0, 2.0, 100.0])
def test_a_request_that_fits_nowhere_ends_however_long_each_try_takes(load_s):
    """It does not go round the executors for ever: each pause is over when the next one has failed."""
    box = Box()
    box.no_room_for_loads = {DEVICE, HOST}
    box.load_s = load_s
    request = box.ask("A")
    box.wait(3600.0)
    assert box.outcomes[request].verdict is Verdict.UNKNOWN


def test_the_trial_of_an_expert_goes_on_elsewhere():
    box = Box()
    box.no_room_for_loads = {DEVICE, HOST}
    box.ask("A")
    box.wait(5.0)
    assert "a" in box.engine.statistics().on_probation
    box.wait(60.0)
    box.no_room_for_loads = {DEVICE}
    requests = [box.ask("A")]
    box.wait(60.0)
    assert box.outcomes[requests[0]].verdict is Verdict.OK
    assert box.engine.statistics().on_probation == {}


def test_a_batch_that_ran_again_where_there_was_no_memory_ends_all_doubt():
    """One load that fails later is one, and not one too many."""
    box = Box(device_bytes=1)
    box.no_room_for_batches = {0}
    box.ask("A")
    box.no_room_for_batches = set()
    box.wait(60.0)
    box.ask("A")
    assert box.of(StartBatch)[-1].batch.executor == 0
    box.ask("B")  # takes a's place
    fell_before = len(box.of(FellBack))
    box.no_room_for_loads = {"a@fp16"}
    box.ask("A")
    assert len(box.of(FellBack)) == fell_before


def test_a_line_with_larger_experts_gets_back_what_they_need_of_a_lowered_budget():
    """Whoever changed the line found that each fits into what was planned with."""
    box = Box(device_bytes=6, with_cpu=False)
    box.no_room_for_loads = {DEVICE}
    box.ask("A")
    box.no_room_for_loads = set()
    box.wait(60.0)
    assert box.budget(DEVICE) == 1
    large = ExpertProfile("e@fp16", Performance(0.001, 0.1, 4, 1), Footprint(5), {SSD: 0.1, HOST: 0.05})
    names = "abcde"
    graph = ExpertGraph(names, {name.upper(): (RouteStep(name, frozenset({"ok"})),) for name in names})
    columns = {"gpu": {**box.columns["gpu"], "e": large}}
    box.handle(events.LineChanged(graph, PerformanceMatrix(columns), frozenset(), frozenset()))
    assert box.outcomes[box.ask("E")].verdict is Verdict.OK
    assert box.budget(DEVICE) == 5


def test_a_budget_comes_back_by_halves_while_nothing_runs_short():
    box = Box(device_bytes=9)
    box.no_room_for_loads = {DEVICE}
    box.ask("A")
    box.no_room_for_loads = set()
    assert box.budget(DEVICE) == 1
    found = []
    for _ in range(5):
        found.append(box.budget(DEVICE))
        box.wait(600.0 * 2 ** len(found[1:]))
    assert found == [1, 5, 7, 8, 9]
    box.wait(86_400.0)
    assert box.engine.next_wakeup_s() is None
    assert [change.after_bytes for change in box.of(BudgetChanged)] == found


def test_a_budget_that_came_back_too_soon_is_left_alone_for_longer():
    box = Box(device_bytes=5)
    box.no_room_for_loads = {DEVICE}
    box.ask("A")
    box.wait(601.0)
    assert box.budget(DEVICE) == 3
    box.ask("B")
    box.wait(5.0)
    assert box.budget(DEVICE) == 1
    box.wait(900.0)
    assert box.budget(DEVICE) == 1
    box.wait(400.0)
    assert box.budget(DEVICE) == 3


def test_a_memory_in_one_piece_keeps_its_budget():
    """What leaves it makes no room for a batch: only other executors can help."""
    box = Box(is_one_piece=True)
    box.ask("B")
    box.no_room_for_batches = {0}
    request = box.ask("A")
    assert box.outcomes[request].verdict is Verdict.OK
    assert box.of(StartBatch)[-1].batch.executor == 1
    assert box.budget(DEVICE) == 3
    assert not box.of(Evict)


def test_who_waits_behind_a_batch_that_fits_nowhere_there_waits_elsewhere():
    box = Box()
    box.no_room_for_batches = {0}
    box.held = []
    requests = [box.ask("A")]
    box.release()
    assert box.outcomes[1].verdict is Verdict.OK
    box.wait(120.0)
    box.held = []
    requests = [box.ask("A") for _ in range(7)]  # four make a batch; the others wait
    box.release()
    fell = box.of(FellBack)[-1]
    assert (fell.expert, fell.copy, fell.pool, fell.reason) == ("a", "a@fp16", DEVICE, "no memory")
    assert fell.requests > 0
    assert [each.retry_s for each in box.of(FellBack)] == [0.25, 0.5]
    assert all(box.outcomes[request].verdict is Verdict.OK for request in requests)


def test_a_batch_has_all_its_tries_on_each_executor_and_says_in_the_end_what_it_lacked():
    box = Box()
    box.no_room_for_batches = {0, 1}
    request = box.ask("A")
    assert [started.batch.executor for started in box.of(StartBatch)] == [0, 0, 0, 1, 1, 1]
    outcome = box.outcomes[request]
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, "a: no memory")


def test_a_request_that_has_been_to_every_executor_says_in_the_end_what_it_lacked():
    box = Box()
    box.no_room_for_loads = {DEVICE, HOST}
    box.load_s = 100.0  # each pause is over when the next load has failed
    request = box.ask("A")
    box.wait(3600.0)
    assert box.outcomes[request].reason == "a: no memory"
    assert len(box.of(FellBack)) == 2


def test_a_budget_says_why_it_changes():
    box = Box(device_bytes=6, with_cpu=False)
    box.no_room_for_loads = {DEVICE}
    box.ask("A")
    box.no_room_for_loads = set()
    box.wait(1.0)
    large = ExpertProfile("e@fp16", Performance(0.001, 0.1, 4, 1), Footprint(2), {SSD: 0.1, HOST: 0.05})
    graph = ExpertGraph("abcde", {})
    matrix = PerformanceMatrix({"gpu": {**box.columns["gpu"], "e": large}})
    box.handle(events.LineChanged(graph, matrix, frozenset(), frozenset()))
    box.wait(601.0)
    reasons = [change.reason for change in box.of(BudgetChanged)]
    assert reasons == ["no memory", "the line has larger experts now", "it did not run short again"]


def test_the_last_of_a_budget_that_is_no_more_than_an_expert_comes_back_at_once():
    box = Box(device_bytes=10, own_bytes=3)
    box.no_room_for_loads = {DEVICE}
    box.ask("A")
    box.no_room_for_loads = set()
    box.wait(3600.0)
    assert [change.after_bytes for change in box.of(BudgetChanged)] == [3, 7, 10]


def test_what_the_batch_that_ran_short_needs_is_the_last_to_leave():
    box = Box(device_bytes=2, with_cpu=False)
    for component in "AB":
        box.ask(component)
    box.no_room_for_batches = {0}
    box.ask("A")
    (gone,) = box.of(Evict)
    assert (gone.expert, gone.stage, gone.freed_bytes) == ("b", 2, 1)
    assert (gone.decision.for_copy, gone.decision.needed_bytes) == ("", 1)
    assert [candidate.expert for candidate in gone.decision.candidates] == ["b", "a"]


def test_a_pinned_expert_comes_to_its_home_once_there_is_room_again():
    box = Box(pinned="a")
    box.no_room_for_loads = {DEVICE}
    box.handle(events.Started())
    box.wait(5.0)
    assert box.of(FellBack)
    box.no_room_for_loads = set()
    box.wait(60.0)
    assert "a@fp16" in box.engine.statistics().pools[0].resident
