"""Runs that a search remembers: by everything they were made with, and across budgets that differ a little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agent.config import read_line
from agent.core.performance import ExecutorSpec, PoolSpec
from agent.deployment.memory_split import casual_allocation, pool_budgets
from agent.device_profile.identity import identity_of
from agent.device_profile.records import StoredProfile, UsageProfile
from agent.device_profile.store import ProfileDraft
from agent.runtime.machine.box import Box, MemorySize
from profiler.allocation.search_runs import RUNS, SearchRuns
from profiler.workload.traces import TracedArrival

BOX = Box("cuda", "made up", ("cuda", "cpu"), 4, MemorySize(2**34, 2**33), MemorySize(2**33, 2**32), ())
TRACE = (TracedArrival(0.0, "c0"), TracedArrival(0.1, "c0"))
EXECUTORS = (ExecutorSpec(0, "cuda", "device"), ExecutorSpec(1, "cpu", "host"))
POOLS = (PoolSpec("host", 1000, 100), PoolSpec("device", 2000, 200, "host"))


@pytest.fixture
def config(tmp_path):
    (tmp_path / "f.yaml").write_text("weight_bytes: 1000\n")
    expert = {"architecture": "fake", "weights": "f.yaml", "labels": ["ok"], "input": {"size": [8, 8]}}
    routes = {"c0": [{"expert": "cls/a", "pass": ["ok"]}]}
    document = {"line": "test", "state": "./state", "experts": {"cls/a": expert}, "routes": routes}
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(document))
    return read_line(tmp_path / "line.yaml", {})


@pytest.fixture
def draft(tmp_path):
    with ProfileDraft.open(tmp_path / "profile.db", "test", identity_of(BOX)) as draft:
        yield draft


@pytest.fixture
def profile():
    usage = UsageProfile({}, {}, "computed from quantities")
    packed, precisions = {("cls/a", "fp32"): "1"}, {("fake", "cuda"): "fp32"}
    allocation = casual_allocation(BOX, {})
    return StoredProfile("test", "now", identity_of(BOX), (), (), (), precisions, packed, usage, allocation)


class Engine:
    """A source of throughputs that counts how often it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, executors, pools):
        self.asked.append((executors, pools))
        return 10.0 + len(self.asked) / 3


def test_what_was_run_is_known_after_a_kill_and_only_that(config, draft, profile):
    first = Engine()
    known = SearchRuns(draft, config, BOX, profile, TRACE).remembered(first)(EXECUTORS, POOLS)
    engine = Engine()
    ask = SearchRuns(draft, config, BOX, profile, TRACE).remembered(engine)
    assert ask(EXECUTORS, POOLS) == known
    assert engine.asked == []
    others = [(EXECUTORS[:1], POOLS), (EXECUTORS, (replace(POOLS[0], expert_bytes=1001), POOLS[1]))]
    for executors, pools in others:
        ask(executors, pools)
    assert engine.asked == others


@pytest.mark.parametrize("changed", ["weights", "precision", "requests", "images", "policy", "usage", "times"])
def test_nothing_is_known_of_another_situation(config, draft, profile, changed):
    SearchRuns(draft, config, BOX, profile, TRACE).remembered(Engine())(EXECUTORS, POOLS)
    trace = TRACE[:1] if changed == "requests" else TRACE
    if changed == "weights":
        profile = replace(profile, packed={("cls/a", "fp32"): "2"})
    if changed == "precision":
        profile = replace(profile, precisions={("fake", "cuda"): "bf16"})
    if changed == "images":
        trace = (replace(TRACE[0], image=Path("a.png")), TRACE[1])
    if changed == "usage":
        profile = replace(profile, usage=replace(profile.usage, probabilities={"cls/a": 0.5}))
    if changed == "times":
        profile = replace(profile, speedups={"cuda": (1.0, 1.8)})
    if changed == "policy":
        config = replace(config, policy="samba")
    engine = Engine()
    SearchRuns(draft, config, BOX, profile, trace).remembered(engine)(EXECUTORS, POOLS)
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda note: "{",
        lambda note: "[]",
        lambda note: "7",
        lambda note: note.replace('"device": ', '"other": '),
        lambda note: note.replace(str(2**33), '"a"'),
        lambda note: note.replace(str(2**33), "-1"),
    ],
)
def test_a_run_of_which_it_is_not_known_under_what_it_was_made_is_made_again(config, draft, profile, spoil):
    SearchRuns(draft, config, BOX, profile, TRACE).remembered(Engine())(EXECUTORS, POOLS)
    (kept,) = draft.trials(RUNS)
    assert spoil(kept.note) != kept.note
    draft.save_trials(RUNS, [replace(kept, note=spoil(kept.note))])
    engine = Engine()
    SearchRuns(draft, config, BOX, profile, TRACE).remembered(engine)(EXECUTORS, POOLS)
    assert len(engine.asked) == 1


def with_free(fraction):
    host, device = (
        replace(size, available_bytes=int(size.available_bytes * fraction)) for size in (BOX.host, BOX.device)
    )
    return replace(BOX, host=host, device=device)


@pytest.mark.parametrize(("fraction", "is_taken_up"), [(0.95, True), (1.05, True), (0.5, False), (1.5, False)])
def test_automatic_budgets_are_those_that_the_search_began_with_while_they_are_near(
    config, draft, profile, fraction, is_taken_up
):
    SearchRuns(draft, config, BOX, profile, TRACE).remembered(Engine())(EXECUTORS, POOLS)
    later = with_free(fraction)
    runs = SearchRuns(draft, config, later, profile, TRACE)
    assert pool_budgets(config, runs.box) == pool_budgets(config, BOX if is_taken_up else later)
    engine = Engine()
    runs.remembered(engine)(EXECUTORS, POOLS)
    assert len(engine.asked) == (not is_taken_up)
