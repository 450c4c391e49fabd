"""A whole agent in one process: real Engine, real files, real threads; and requests whose outcomes are waited for."""

import errno
import logging
import queue
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

import agent.runtime.loop
from agent.core.engine import EngineSetup
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Performance, PerformanceMatrix, PoolSpec
from agent.core.policy import PRESETS
from agent.core.request import Outcome
from agent.faults.errors import AgentCrashed, DeviceLost, WorkOverdue
from agent.runtime.assembly import assemble
from agent.runtime.dispatcher import BatchWatch
from agent.runtime.expert_copy import prepared_form
from agent.runtime.loop import AgentPlan, LoopOptions
from agent.runtime.machine.detection import detect
from agent.runtime.requests import Requests
from experts.backends.torch_backend import ModuleSkeleton
from experts.errors import MemoryExceeded
from experts.expert import Verdict
from experts.graph import ExpertGraph, RouteStep
from experts.packed.weights import SegmentStore
from tests.agent.core import worlds
from tests.agent.runtime.conftest import Served
from tests.waiting import until

PATIENCE_S = 60.0
WORKSPACE_BYTES = 64 * 1024 * 1024
PERFORMANCE = Performance(K_s=0.004, B_s=0.002, max_batch=4, workspace_bytes=4 * 1024 * 1024)
ANY = frozenset({"ok", "missing", "tombstone"})
IMAGE = np.zeros((8, 8, 3), dtype=np.uint8)


class Agent(Served):
    def __init__(
        self, line, *, executors=1, room=3, policy="coserve", on_outcome=None, device=0, has_own=True, **options
    ):
        """``device``: number of executors of an emulated device, after those of the CPU; ``has_own``: its memory."""
        self.line, self.outcomes = line, {}
        specs = [ExecutorSpec(number, "cpu", "host") for number in range(executors)]
        largest = max(copy.footprint.total_bytes for copy in line.copies.values())
        pools = (PoolSpec("host", room * largest, WORKSPACE_BYTES),)
        if device:
            kind = ("emulated", "device") if has_own else ("integrated", "host")
            specs += [ExecutorSpec(executors + number, *kind) for number in range(device)]
            pools += (replace(pools[0], name="device", cache="host"),) * has_own
        limits = worlds.limits(pools, load_backoff_s=0.001, away_s=0.0, prepared_bytes=1024 * 1024)
        setup = EngineSetup(self.graph(), policy, tuple(specs), self.profile(specs), limits)
        box = replace(detect(specs[-1].processor), cores=1)
        plan = AgentPlan(box, setup, line.copies)
        told = on_outcome or self.outcomes.__setitem__
        self.loop = assemble(setup.engine(), plan, line.segments, told, LoopOptions(checks_invariants=True, **options))

    def submit(self, component, seed=0):
        return self.loop.submit(self.line.pixels(seed), component=component)

    def graph(self):
        names = sorted(copy.expert.id for copy in self.line.copies.values())
        direct = {name.removeprefix("cls/"): (RouteStep(name, ANY),) for name in names}
        two_steps = {"chain": (RouteStep("cls/twin-0", frozenset({"ok", "missing"})), RouteStep("cls/wide", ANY))}
        return ExpertGraph(names, direct | two_steps)

    def profile(self, specs):
        rows = {}
        for copy in self.line.copies.values():
            loads, form = {SSD: 0.01, "host": 0.001}, prepared_form(copy.expert)
            rows[copy.expert.id] = ExpertProfile(copy.name, PERFORMANCE, copy.footprint, loads, prepared=form)
        return PerformanceMatrix({spec.processor: rows for spec in specs})


def expected_of(line, component, image):
    if component != "chain":
        return Verdict.OK, line.predict(component, image).label
    first = line.predict("twin-0", image)
    if first.label == "tombstone":
        return Verdict.NG, first.label
    return Verdict.OK, line.predict("wide", image).label


@pytest.mark.parametrize(("policy", "executors"), [*((policy, 1) for policy in sorted(PRESETS)), ("coserve", 2)])
def test_every_policy_gives_every_request_the_verdict_of_its_models(line, policy, executors):
    random, asked = np.random.default_rng(1), {}
    with Agent(line, policy=policy, executors=executors) as agent:
        components = sorted(agent.graph().routes)
        for number in range(60):
            component = components[random.integers(len(components))]
            asked[agent.submit(component, number % 12)] = component, line.pixels(number % 12)
        agent.settle()
        statistics = agent.loop.statistics()
    told = {request: (outcome.verdict, outcome.label) for request, outcome in agent.outcomes.items()}
    assert told == {request: expected_of(line, *each) for request, each in asked.items()}
    assert (statistics.engine.completed, statistics.engine.failed, statistics.requests_in_flight) == (60, 0, 0)
    assert statistics.engine.evictions > 0
    assert (statistics.transfers.loads, statistics.transfers.failed) == (statistics.engine.loads, 0)
    assert all(executor.batches > 0 for executor in statistics.executors)


def test_bad_weights_give_unknown_with_the_reason_and_other_experts_go_on(breakable_line):
    breakable_line.file_of("own-1").write_bytes(b"")
    with Agent(breakable_line) as agent:
        bad = [agent.submit("own-1", n) for n in range(3)]
        good = [agent.submit("own-2", n) for n in range(3)]
        agent.settle()
        statistics = agent.loop.statistics()
    assert {agent.outcomes[request].verdict for request in bad} == {Verdict.UNKNOWN}
    assert all("was not what was packed" in agent.outcomes[request].reason for request in bad)
    assert {agent.outcomes[request].verdict for request in good} == {Verdict.OK}
    assert list(statistics.engine.quarantined) == ["cls/own-1"]


def test_expert_serves_again_after_a_disk_error_and_the_log_has_both(line, caplog, monkeypatch):
    read, is_failing = SegmentStore.read, True

    def fail(store, segment, buffer, expert):
        if is_failing and expert == "cls/own-1":
            raise OSError(errno.EIO, "Input/output error")
        return read(store, segment, buffer, expert)

    monkeypatch.setattr(SegmentStore, "read", fail)
    with caplog.at_level(logging.INFO), Agent(line) as agent:
        refused = agent.submit("own-1")
        agent.settle()
        assert "cls/own-1" in agent.loop.statistics().engine.on_probation
        is_failing = False
        until(lambda: not agent.loop.statistics().engine.on_probation)
        judged = agent.submit("own-1")
        agent.settle()
    assert agent.outcomes[refused].verdict is Verdict.UNKNOWN
    assert "3 loads in a row failed, last: [Errno 5] Input/output error" in agent.outcomes[refused].reason
    assert agent.outcomes[judged].verdict is Verdict.OK
    told = [(each.levelname, each.message) for each in caplog.records if each.message.startswith("expert_")]
    level, message = told[0]
    assert level == "WARNING"
    assert message.startswith("expert_on_probation expert=cls/own-1 retry_s=0.0 reason=3 loads in a row failed")
    assert told[-1] == ("INFO", "expert_serves_again expert=cls/own-1 reason=a load went well")


def test_cancelled_requests_have_an_outcome(line):
    with Agent(line) as agent:
        numbers = [agent.submit("own-0", n) for n in range(20)]
        for number in numbers:
            agent.loop.cancel(number)
        agent.loop.cancel(10_000)
        agent.settle()
        assert agent.loop.requests_in_flight == 0
        assert agent.loop.statistics().engine.unexpected_events >= 1
    assert sorted(agent.outcomes) == numbers


def test_quarantined_expert_gets_no_more_requests(line):
    with Agent(line) as agent:
        agent.loop.quarantine("cls/own-0", "the operator said so")
        request = agent.submit("own-0")
        agent.settle()
    assert "the operator said so" in agent.outcomes[request].reason


def test_request_names_either_a_component_or_an_expert(line):
    with Agent(line) as agent:
        for wrong in ({}, {"component": "own-0", "expert": "cls/own-0"}):
            with pytest.raises(ValueError, match="exactly one"):
                agent.loop.submit(line.pixels(0), **wrong)


def crashing(line, **options):
    agent, told = Agent(line, **options), queue.SimpleQueue()
    agent.loop.when_crashed(told.put)
    agent.loop.start()
    return agent, told


def test_exception_of_a_callback_crashes_the_agent_and_is_reported(line):
    def broken(_request, _outcome):
        raise OSError("the results cannot be written")

    agent, told = crashing(line, on_outcome=broken)
    agent.submit("own-0")
    crash = told.get(timeout=PATIENCE_S)
    assert isinstance(crash.error, OSError)
    assert agent.loop.crash is crash
    assert not agent.loop.wait_until_drained(PATIENCE_S)
    with pytest.raises(AgentCrashed, match="results"):
        agent.loop.wait_until_idle(PATIENCE_S)
    with pytest.raises(RuntimeError, match="stopped"):
        agent.submit("own-0")
    assert agent.loop.statistics().engine.arrived == 1
    agent.loop.when_crashed(told.put)
    assert told.get(timeout=PATIENCE_S) is crash
    with pytest.raises(AgentCrashed, match="results"):
        agent.loop.stop()


def test_lost_device_crashes_the_agent_and_judges_nothing(line, monkeypatch):
    def lose(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ModuleSkeleton, "infer", lose)
    agent, told = crashing(line, executors=2)
    for component in ("own-0", "own-1", "twin-0", "wide"):
        for number in range(4):
            with suppress(RuntimeError):  # it has crashed already
                agent.submit(component, number)
    crash = told.get(timeout=PATIENCE_S)
    assert isinstance(crash.error, DeviceLost)
    with pytest.raises(AgentCrashed, match="illegal memory access"):
        agent.loop.stop()
    assert (agent.outcomes, agent.loop.statistics().engine.quarantined) == ({}, {})


def is_all_else_idle(engine):
    """But for the device's executor, number 1."""
    here = next(queue for queue in engine.queues if queue.executor == 0)
    return not (here.requests or here.running or any(pool.loading for pool in engine.pools))


@pytest.mark.parametrize("how", ["lost", "hung"])
def test_lost_or_hanging_device_leaves_its_work_to_other_executors(line, monkeypatch, request, how):
    now_s, released, hung = 1000.0, threading.Event(), threading.Event()
    request.addfinalizer(released.set)
    infer = ModuleSkeleton.infer

    def run(skeleton, *arguments):
        if threading.current_thread().name == "executor-1":
            if how == "lost":
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            hung.set()
            released.wait()
        return infer(skeleton, *arguments)

    monkeypatch.setattr(ModuleSkeleton, "infer", run)
    monkeypatch.setattr(agent.runtime.loop, "STOP_S", 0.1)
    with Agent(line, device=1, clock=lambda: now_s) as split:
        numbers = {
            split.submit(component, seed): (component, seed) for component in ("own-0", "own-1") for seed in range(8)
        }
        if how == "hung":
            assert hung.wait(PATIENCE_S)
            until(lambda: is_all_else_idle(split.loop.statistics().engine))
            while not split.loop.lost:  # its age is logged, then it is given up
                now_s += LoopOptions().ages.ended_s
                for _ in range(2):  # ages are looked at after each message
                    split.loop.statistics()
        split.settle()
        assert (split.loop.crash, split.loop.lost.keys()) == (None, {"emulated"})
        for number, (component, seed) in numbers.items():
            outcome = split.outcomes[number]
            assert (outcome.verdict, outcome.label) == expected_of(line, component, line.pixels(seed))
        assert {pool.name for pool in split.loop.statistics().engine.pools} == {"host"}


HANGING = {"batch": (ModuleSkeleton, "infer"), "load": (SegmentStore, "read")}


@pytest.mark.parametrize("what", HANGING)
def test_hanging_work_is_logged_once_and_then_ends_the_agent(line, monkeypatch, caplog, request, what):
    limits, now_s, entered, released = LoopOptions().ages, 1000.0, threading.Event(), threading.Event()

    def hang(*_):
        entered.set()
        released.wait()
        raise OSError("released")

    def look_after(seconds):
        nonlocal now_s
        now_s += seconds
        for _ in range(3):
            hung.loop.statistics()

    request.addfinalizer(released.set)
    monkeypatch.setattr(*HANGING[what], hang)
    monkeypatch.setattr(agent.runtime.loop, "STOP_S", 0.1)
    hung, told = crashing(line, clock=lambda: now_s)
    hung.submit("own-0")
    assert entered.wait(PATIENCE_S)
    if what == "batch":  # experts are still placed: those loads would be as old as the batch
        until(lambda: not any(pool.loading for pool in hung.loop.statistics().engine.pools))
    look_after(limits.logged_s - 1)
    assert "overdue" not in caplog.text
    look_after(1)
    assert caplog.text.count("overdue") == {"batch": 1, "load": 2}[what]  # two loads are in flight at a time
    assert f"the {what} of" in caplog.text
    look_after(limits.ended_s - limits.logged_s - 1)
    assert hung.loop.crash is None
    look_after(1)
    crash = told.get(timeout=PATIENCE_S)
    assert isinstance(crash.error, WorkOverdue)
    assert f"the {what} of" in str(crash)
    assert "600 s" in str(crash)
    assert crash.leaves_threads
    with pytest.raises(AgentCrashed, match="dmesg"):
        hung.loop.stop()
    assert "threads_left_behind" in caplog.text
    assert hung.outcomes == {}


def test_draining_waits_for_requests_and_not_for_loads(line):
    with Agent(line, ssd_bytes_per_s=1.0) as agent:
        agent.loop.drain()
        assert agent.loop.wait_until_drained(PATIENCE_S)
        statistics = agent.loop.statistics()
        assert any(pool.loading for pool in statistics.engine.pools)
        assert not agent.loop.wait_until_idle(0)


def test_watcher_hears_of_each_batch_before_it_runs_and_after_its_answer(breakable_line):
    breakable_line.file_of("own-1").unlink()
    told = []
    agent = Agent(breakable_line)
    tell = [lambda requests, what=what: told.extend((what, each) for each in requests) for what in ("begun", "ended")]
    agent.loop.watch_batches(BatchWatch(*tell))
    with agent:
        asked = [agent.submit("own-0", n) for n in range(5)]
        unjudged = agent.submit("own-1")
        agent.settle()
    assert agent.outcomes[unjudged].verdict is Verdict.UNKNOWN
    assert sorted(told) == sorted((what, each) for each in asked for what in ("begun", "ended"))
    assert all(told.index(("begun", each)) < told.index(("ended", each)) for each in asked)


def test_expert_larger_than_its_memory_is_refused_at_the_start(line):
    with pytest.raises(MemoryExceeded):
        Agent(line, room=0)


class Loop:
    def __init__(self):
        self.asked, self.told, self.crash = [], [], None

    def when_crashed(self, tell):
        self.told.append(tell)

    def submit(self, image, *, component=None, expert=None):
        self.asked.append((component, expert))
        return len(self.asked)


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture
def requests(loop):
    requests = Requests()
    requests.watch(loop)
    return requests


def outcome(label):
    return Outcome(Verdict.OK, label, 1.0, ())


def test_outcomes_are_in_request_order_and_collected_once(loop, requests):
    requests.submit(IMAGE, component="resistor")
    requests.submit(IMAGE, expert="cls/a")
    for number, label in ((2, "second"), (1, "first")):
        requests.report(number, outcome(label))
    told = []
    ended = requests.collect(lambda done, total: told.append((done, total)))
    assert loop.asked == [("resistor", None), (None, "cls/a")]
    assert [each.outcome.label for each in ended] == ["first", "second"]
    assert ended[0].submitted_s <= ended[1].submitted_s <= ended[1].at_s <= ended[0].at_s
    assert told == [(1, 2), (2, 2)]
    requests.submit(IMAGE, component="resistor")
    requests.report(3, outcome("third"))
    assert ([each.outcome.label for each in requests.collect()], requests.collect()) == (["third"], [])


def test_crash_ends_the_wait_and_refuses_further_requests(loop, requests):
    requests.submit(IMAGE, component="resistor")
    (tell,) = loop.told
    loop.crash = AgentCrashed(ValueError("broken"))
    tell(loop.crash)
    with pytest.raises(AgentCrashed, match="broken"):
        requests.collect()
    with pytest.raises(AgentCrashed, match="broken"):
        requests.submit(IMAGE, component="resistor")
    assert len(loop.asked) == 1


def test_free_memory_is_returned_to_the_system_at_intervals_and_at_the_end(line, monkeypatch):
    given_back = []
    monkeypatch.setattr(agent.runtime.loop, "give_back_unused", lambda: given_back.append(threading.current_thread()))
    monkeypatch.setattr(agent.runtime.loop, "GIVEN_BACK_EVERY_S", 0.001)
    with Agent(line):
        until(lambda: len(given_back) >= 3)
    assert {each.name for each in given_back[:-1]} == {"heap-keeper"}
    assert given_back[-1] is threading.current_thread()
