"""A box with less memory than was planned with: smaller batches, less in memory, other executors, and UNKNOWN last."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import BudgetLowered, Complete, Evict, Fail, FellBack, StartBatch, StartLoad
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

    def __init__(self, device_bytes=3, with_cpu=True):
        def row(name, form, k_s):
            performance = Performance(k_s, 0.1, 4, 1)
            return ExpertProfile(f"{name}@{form}", performance, Footprint(1), {SSD: 0.1, HOST: 0.05})

        names = "abcd"
        columns = {"gpu": {name: row(name, "fp16", 0.001) for name in names}}
        executors = [ExecutorSpec(0, "gpu", DEVICE)]
        pools = [PoolSpec(DEVICE, device_bytes, 4), PoolSpec(HOST, 8, 8)]
        if with_cpu:
            columns["cpu"] = {name: row(name, "fp32", 1.0) for name in names}
            executors.append(ExecutorSpec(1, "cpu", HOST))
        graph = ExpertGraph(names, {name.upper(): (RouteStep(name, frozenset({"ok"})),) for name in names})
        matrix = PerformanceMatrix(columns, dict.fromkeys(names, 0.25))
        self.engine = Engine(graph, matrix, executors, PRESETS["coserve"], Limits(tuple(pools)))
        self.no_room_for_loads: set[str] = set()  # pools
        self.no_room_for_batches: set[int] = set()  # executors
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
                failed = effect.pool in self.no_room_for_loads
                answer = events.LoadFailed(effect.load, "no memory", permanent=False, out_of_memory=True)
                self.handle(answer if failed else events.Loaded(effect.load))
            elif isinstance(effect, StartBatch):
                batch = effect.batch
                if batch.executor in self.no_room_for_batches:
                    self.handle(events.BatchFailed(batch.id, "no memory", out_of_memory=True))
                else:
                    self.handle(events.Finished(batch.id, (PASS,) * len(batch.requests)))
            self.engine.check_invariants()

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
    (lowered,) = box.of(BudgetLowered)
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
    assert box.of(BudgetLowered)[0].after_bytes < 3
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
