"""Runs that a search remembers: by everything they were made with, and across budgets that differ a little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.performance import ExecutorSpec, PoolSpec
from agent.deployment.memory_split import casual_allocation, pool_budgets
from agent.device_profile.identity import identity_of
from agent.device_profile.store import ProfileDraft
from agent.runtime.machine.box import Box, MemorySize
from profiler.allocation.step import SearchRuns
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import fakes, profile_of, write_line

BOX = Box("cuda", "made up", ("cuda", "cpu"), 4, MemorySize(2**34, 2**33), MemorySize(2**33, 2**32), ())
TRACE = (TracedArrival(0.0, "c0"), TracedArrival(0.1, "c0"))
EXECUTORS = (ExecutorSpec(0, "cuda", "device"), ExecutorSpec(1, "cpu", "host"))
POOLS = (PoolSpec("host", 1000, 100), PoolSpec("device", 2000, 200, "host"))


@pytest.fixture
def config(tmp_path):
    return write_line(tmp_path, fakes(1))


@pytest.fixture
def draft(tmp_path):
    with ProfileDraft.open(tmp_path / "profile.db", "test", identity_of(BOX)) as draft:
        yield draft


PROFILE = profile_of(
    box=identity_of(BOX),
    packed={("cls/a", "fp32"): "1"},
    precisions={("fake", "cuda"): "fp32"},
    allocation=casual_allocation(BOX, {}),
)


class Engine:
    """A source of throughputs that counts how often it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, executors, pools):
        self.asked.append((executors, pools))
        return 10.0 + len(self.asked) / 3


def test_what_was_run_is_known_after_a_kill_and_only_that(config, draft):
    first = Engine()
    known = SearchRuns(draft, config, BOX, PROFILE, TRACE).remembered(first)(EXECUTORS, POOLS)
    engine = Engine()
    ask = SearchRuns(draft, config, BOX, PROFILE, TRACE).remembered(engine)
    assert ask(EXECUTORS, POOLS) == known
    assert engine.asked == []
    others = [(EXECUTORS[:1], POOLS), (EXECUTORS, (replace(POOLS[0], expert_bytes=1001), POOLS[1]))]
    for executors, pools in others:
        ask(executors, pools)
    assert engine.asked == others


@pytest.mark.parametrize(
    ("config_changes", "profile_changes", "trace"),
    [
        pytest.param({}, {"packed": {("cls/a", "fp32"): "2"}}, TRACE, id="weights"),
        pytest.param({}, {"precisions": {("fake", "cuda"): "bf16"}}, TRACE, id="precision"),
        pytest.param({}, {"usage": replace(PROFILE.usage, probabilities={"cls/a": 0.5})}, TRACE, id="usage"),
        pytest.param({}, {"speedups": {"cuda": (1.0, 1.8)}}, TRACE, id="times"),
        pytest.param({"policy": "samba"}, {}, TRACE, id="policy"),
        pytest.param({}, {}, TRACE[:1], id="requests"),
        pytest.param({}, {}, (replace(TRACE[0], image=Path("a.png")), TRACE[1]), id="images"),
    ],
)
def test_nothing_is_known_of_another_situation(config, draft, config_changes, profile_changes, trace):
    SearchRuns(draft, config, BOX, PROFILE, TRACE).remembered(Engine())(EXECUTORS, POOLS)
    engine, changed = Engine(), replace(PROFILE, **profile_changes)
    SearchRuns(draft, replace(config, **config_changes), BOX, changed, trace).remembered(engine)(EXECUTORS, POOLS)
    assert len(engine.asked) == 1


def with_free(fraction):
    host, device = (
        replace(size, available_bytes=int(size.available_bytes * fraction)) for size in (BOX.host, BOX.device)
    )
    return replace(BOX, host=host, device=device)


@pytest.mark.parametrize(("fraction", "is_taken_up"), [(0.95, True), (1.05, True), (0.5, False), (1.5, False)])
def test_automatic_budgets_are_those_that_the_search_began_with_while_they_are_near(
    config, draft, fraction, is_taken_up
):
    SearchRuns(draft, config, BOX, PROFILE, TRACE).remembered(Engine())(EXECUTORS, POOLS)
    later = with_free(fraction)
    runs = SearchRuns(draft, config, later, PROFILE, TRACE)
    assert pool_budgets(config, runs.box) == pool_budgets(config, BOX if is_taken_up else later)
    engine = Engine()
    runs.remembered(engine)(EXECUTORS, POOLS)
    assert len(engine.asked) == (not is_taken_up)
