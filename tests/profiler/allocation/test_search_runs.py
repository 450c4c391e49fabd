"""Runs that a search remembers: by everything they were made with, and across budgets that differ a little."""

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


PROFILE = profile_of(
    box=identity_of(BOX),
    packed={("cls/a", "fp32"): "1"},
    precisions={("fake", "cuda"): "fp32"},
    allocation=casual_allocation(BOX, {}),
)


@pytest.fixture
def config(tmp_path):
    return write_line(tmp_path, fakes(1))


@pytest.fixture
def runs(config, tmp_path):
    """Remembered runs of a search, as after a kill, and the list of those that were run; the first one has run."""
    with ProfileDraft.open(tmp_path / "profile.db", "test", identity_of(BOX)) as draft:

        def found(config=config, box=BOX, profile=PROFILE, trace=TRACE):
            asked = []

            def throughput(executors, pools):
                asked.append((executors, pools))
                return 10.0 + len(asked) / 3

            remembered = SearchRuns(draft, config, box, profile, trace)
            return remembered, remembered.remembered(throughput), asked

        found()[1](EXECUTORS, POOLS)
        yield found


def test_what_was_run_is_known_after_a_kill_and_only_that(runs):
    _, ask, asked = runs()
    assert ask(EXECUTORS, POOLS) == 10.0 + 1 / 3
    assert asked == []
    others = [(EXECUTORS[:1], POOLS), (EXECUTORS, (replace(POOLS[0], expert_bytes=1001), POOLS[1]))]
    for executors, pools in others:
        ask(executors, pools)
    assert asked == others


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
def test_nothing_is_known_of_another_situation(config, runs, config_changes, profile_changes, trace):
    _, ask, asked = runs(config.model_copy(update=config_changes), BOX, replace(PROFILE, **profile_changes), trace)
    ask(EXECUTORS, POOLS)
    assert len(asked) == 1


@pytest.mark.parametrize(("fraction", "is_taken_up"), [(0.95, True), (1.05, True), (0.5, False), (1.5, False)])
def test_automatic_budgets_are_those_that_the_search_began_with_while_they_are_near(
    config, runs, fraction, is_taken_up
):
    host, device = (
        replace(size, available_bytes=int(size.available_bytes * fraction)) for size in (BOX.host, BOX.device)
    )
    later = replace(BOX, host=host, device=device)
    search, ask, asked = runs(box=later)
    assert pool_budgets(config, search.box) == pool_budgets(config, BOX if is_taken_up else later)
    ask(EXECUTORS, POOLS)
    assert len(asked) == (not is_taken_up)
