"""The search over made-up throughputs: what is run, found and remembered, and that an Engine accepts it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import read_line
from agent.core.engine import Engine
from agent.core.performance import SSD, ExecutorSpec, Limits, Performance, PerformanceMatrix, PoolSpec
from agent.core.performance import PoolSpec as Pool
from agent.core.policy import PRESETS
from agent.deployment.memory_split import casual_allocation, pool_budgets
from agent.device_profile.identity import identity_of
from agent.device_profile.records import PoolAllocation
from agent.device_profile.store import ProfileDraft
from agent.runtime.machine.box import Box, MemorySize
from agent.runtime.weights.drive import staging_bytes
from experts.errors import ConfigError
from profiler.allocation.search import DEFAULTS, SearchOptions, search_allocation
from profiler.allocation.step import SearchRuns
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import fakes, profile_of, row, write_line

MIB = 2**20
SIZE = MemorySize(10**12, 10**12)
SPLIT = Box("cuda", "made up", ("cuda", "cpu"), 4, SIZE, SIZE, ())
UNIFIED = Box("jetson", "made up", ("cuda", "cpu"), 4, SIZE, None, ())
CPU_ONLY = Box("cpu", "made up", ("cpu",), 4, SIZE, None, ())
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


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lines")


def line_of(folder, experts, pinned=(), **changes):
    document = fakes(experts) | changes
    for number in set(pinned) & set(range(experts)):
        document["experts"][f"cls/f{number}"] = document["experts"][f"cls/f{number}"] | {"pin": True}
    file = folder / "line.yaml"
    file.write_text(json.dumps(document))
    return read_line(file, {})


def constant(executors, pools):
    return 1.0


def searched(config, box, matrix, throughput=constant, *, options=DEFAULTS, **budgets):
    """``budgets``: bytes by memory."""
    return search_allocation(config.having(memory=budgets), box, matrix, throughput, "made up", options)


def device_of(experts, processors=("cuda", "cpu"), own_bytes=MIB, workspace_bytes=MIB, max_batch=4, larger=None):
    """Experts of one size, each half as likely as the one before it."""
    performance = Performance(0.01, 0.02, max_batch, workspace_bytes)
    column = {
        f"cls/f{n}": row(f"cls/f{n}@fp32", performance, (larger or {}).get(n, own_bytes), {SSD: 0.1, "host": 0.02})
        for n in range(experts)
    }
    return PerformanceMatrix(dict.fromkeys(processors, column), {f"cls/f{n}": 2.0**-n for n in range(experts)})


def count_of(executors, processor):
    return sum(spec.processor == processor for spec in executors)


def pool_of(pools, name):
    return next(pool for pool in pools if pool.name == name)


def peaked(executors, pools):
    """Best with 3 executors of the device and 1 of the CPU, and with 34 MiB of experts on the device."""
    rates = {1: 10.0, 2: 14.0, 3: 16.0, 4: 15.0, 5: 14.0}
    aside = abs(count_of(executors, "cpu") - 1)
    experts = pool_of(pools, "device").expert_bytes / MIB
    return rates[count_of(executors, "cuda")] - aside + (experts if experts <= 34 else 68 - 2 * (experts - 17)) / 10


def test_split_box_searches_executors_first_and_then_device_memory_by_windows(folder):
    asked = []

    def throughput(executors, pools):
        asked.append((tuple(executors), tuple(pools)))
        return peaked(executors, pools)

    config, matrix = line_of(folder, 80), device_of(80, max_batch=16)
    found = searched(config, SPLIT, matrix, throughput, host=400 * MIB, device=64 * MIB)
    assert (found.allocation.origin, dict(found.allocation.executors)) == ("made up", {"cuda": 3, "cpu": 1})
    assert dict(found.allocation.budget_bytes) == {"host": 400 * MIB - staging_bytes(400 * MIB), "device": 64 * MIB}
    assert found.allocation.pools == (
        PoolAllocation("host", 384 * MIB - staging_bytes(400 * MIB), 16 * MIB, 80),
        PoolAllocation("device", 34 * MIB, 30 * MIB, 34),
    )
    assert found.images_per_s == pytest.approx(19.4)
    assert len(asked) == len(set(asked))
    executors = [trial for trial in found.trials if trial.search == "executors"]
    assert [trial.setting for trial in executors] == [
        *(f"{count} cuda + 1 cpu" for count in (1, 2, 3, 4, 5)),
        *(f"3 cuda + {count} cpu" for count in (0, 2, 3)),
    ]
    assert [trial.number for trial in executors if trial.note == "best"] == [3]
    memory = [trial for trial in found.trials if trial.search != "executors"]
    assert [(trial.search, trial.number) for trial in memory] == [("memory:device", n) for n in (1, 2, 3, 4, 5)]
    assert [(trial.setting, round(trial.images_per_s, 2), trial.note) for trial in memory] == [
        ("15 experts", 17.5, "window 0-15"),
        ("28 experts", 18.8, "window 15-28"),
        ("39 experts", 18.4, "window 28-39, 8.5% short of the line's 20.10"),
        ("34 experts", 19.4, "the middle of window 28-39, chosen"),
        ("48 experts", 16.6, "the casual split, a quarter for workspaces"),
    ]


def by_workspace(executors, pools):
    return 50.0 - abs(pool_of(pools, "host").workspace_bytes / MIB - 20)


def by_useful_workspace(executors, pools):
    pool = pool_of(pools, "host")
    return min(pool.workspace_bytes / MIB, 12) * 10 + pool.expert_bytes / MIB / 1000


def by_chance(executors, pools):
    return 10.1 if pool_of(pools, "host").expert_bytes == 15 * MIB else 10.0


@pytest.mark.parametrize(
    ("box", "executors", "experts", "max_batch", "throughput", "host_mib", "found_mib", "chosen"),
    [
        pytest.param(
            CPU_ONLY, {"cpu": 2}, 9, 4, constant, 100, (92, 8), "", id="small maximum batches are given in full"
        ),
        pytest.param(UNIFIED, {"cuda": 2, "cpu": 1}, 40, 20, by_workspace, 48, (28, 20), "28 experts", id="one memory"),
        pytest.param(
            CPU_ONLY, {"cpu": 3}, 60, 4, by_useful_workspace, 60, (48, 12), "", id="no more than batches can use"
        ),
        pytest.param(  # 15 experts seem a little better than 45, and leave 45 MiB, of which batches can use 15
            CPU_ONLY, {"cpu": 1}, 60, 15, by_chance, 60, (45, 15), "15 experts", id="even against chance"
        ),
    ],
)
def test_experts_and_batches_share_a_memory(
    folder, box, executors, experts, max_batch, throughput, host_mib, found_mib, chosen
):
    matrix = device_of(experts, box.processors, max_batch=max_batch)
    config = line_of(folder, experts, executors=executors)
    found = searched(config, box, matrix, throughput, host=host_mib * MIB)
    of_experts, of_batches = found_mib
    held = min(of_experts, experts)
    assert found.allocation.pools == (PoolAllocation("host", of_experts * MIB, of_batches * MIB, held),)
    assert {name: count for name, count in found.allocation.executors.items() if count} == executors
    assert {trial.setting for trial in found.trials if trial.note.endswith("chosen")} >= {chosen} - {""}


def test_values_of_the_line_file_are_not_searched(folder):
    config = line_of(folder, 60, executors={"cuda": 2}, memory={"workspace": "7MiB"})
    found = searched(config, SPLIT, device_of(60), constant, host=50 * MIB, device=20 * MIB)
    assert dict(found.allocation.executors) == {"cuda": 2, "cpu": 0}
    assert [(pool.pool, pool.workspace_bytes) for pool in found.allocation.pools] == [
        ("host", 7 * MIB),
        ("device", 7 * MIB),
    ]
    assert found.trials == ()


def test_executors_that_cannot_run_every_expert_or_do_not_fit_are_skipped(folder):
    """e1 runs on the CPU only, and the device has workspace for two images beside its largest expert."""
    everything = device_of(2)
    device = PerformanceMatrix(
        {"cuda": {"cls/f0": everything.experts["cuda"]["cls/f0"]}, "cpu": everything.experts["cpu"]}
    )
    by_count = lambda executors, pools: float(len(executors))  # noqa: E731
    found = searched(line_of(folder, 2), SPLIT, device, by_count, host=90 * MIB, device=3 * MIB)
    notes = {trial.setting: trial.note for trial in found.trials if trial.search == "executors"}
    assert notes["3 cuda + 1 cpu"] == notes["2 cuda + 0 cpu"] == "does not fit"
    assert dict(found.allocation.executors) == {"cuda": 2, "cpu": 4}


def test_budget_below_the_largest_expert_names_it_and_its_place(folder):
    config = line_of(folder, 3, memory={"host": "10MiB"})
    with pytest.raises(ConfigError) as caught:
        searched(config, CPU_ONLY, device_of(3, ("cpu",), larger={1: 12 * MIB}), host=10 * MIB)
    assert caught.value.place.key == "memory.host"
    assert caught.value.message == (
        "10.0 MiB are too little: cls/f1 needs 12.0 MiB beside what is pinned, and batches 1.0 MiB for one image on "
        "each of its executors - raise memory.host, or take a smaller model"
    )


@pytest.mark.parametrize(
    ("workspace", "told"), [("1MiB", "1.0 MiB is not between 2.0 MiB"), ("9MiB", "and the 8.0 MiB")]
)
def test_impossible_workspace_is_refused(folder, workspace, told):
    config = line_of(folder, 2, executors={"cpu": 2}, memory={"workspace": workspace})
    with pytest.raises(ConfigError, match=r"memory\.workspace: ") as caught:
        searched(config, CPU_ONLY, device_of(2, ("cpu",), own_bytes=2 * MIB), host=10 * MIB)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("processors", "cores", "most"),
    [(("cpu",), 2, 4), (("cpu",), 16, 4), (("cpu",), 64, 16), (("cuda", "cpu"), 64, 4), (("emulated", "cpu"), 64, 4)],
)
def test_large_cpu_box_tries_more_executors(processors, cores, most):
    box = Box(processors[0], "made up", processors, cores, SIZE, None, ())
    assert SearchOptions().on(box) == SearchOptions(most_cpu_executors=most)


@given(
    st.sampled_from([SPLIT, UNIFIED, CPU_ONLY]),
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(0, 20),
    st.integers(1, 12),
    st.integers(10, 600),
    st.integers(10, 600),
    st.sets(st.integers(0, 11), max_size=2),
    st.randoms(use_true_random=False),
)
def test_found_allocation_fills_the_budget_and_is_accepted_by_an_engine(
    folder, box, sizes, workspace, max_batch, host_bytes, device_bytes, pinned, random
):
    config = line_of(folder, len(sizes), pinned)
    device = device_of(len(sizes), box.processors, 1, workspace, max_batch, dict(enumerate(sizes)))
    budgets = {"host": host_bytes, "device": device_bytes} if box.is_split else {"host": host_bytes}
    pins = frozenset(name for name, expert in config.catalog.experts.items() if expert.pin)

    def engine_of(executors, pools):
        return Engine(config.catalog.graph, device, executors, PRESETS["coserve"], Limits(tuple(pools), pinned=pins))

    def throughput(executors, pools):
        engine_of(executors, pools)
        return random.uniform(1, 100)

    refusal = ""
    try:
        found = searched(config, box, device, throughput, **budgets).allocation
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert "too little" in refusal
        return
    names = [name for name in box.processors for _ in range(found.executors[name])]
    executors = [ExecutorSpec(number, name, box.pool_of(name)) for number, name in enumerate(names)]
    pools = [
        Pool(each.pool, each.expert_bytes, each.workspace_bytes, "host" if each.pool == "device" else None)
        for each in found.pools
    ]
    engine_of(executors, pools).check_invariants()
    assert {pool.name: pool.expert_bytes + pool.workspace_bytes for pool in pools} == budgets


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


def test_finished_runs_are_known_after_a_kill(runs):
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
def test_runs_of_another_situation_are_not_reused(config, runs, config_changes, profile_changes, trace):
    _, ask, asked = runs(config.model_copy(update=config_changes), BOX, replace(PROFILE, **profile_changes), trace)
    ask(EXECUTORS, POOLS)
    assert len(asked) == 1


@pytest.mark.parametrize(("fraction", "is_taken_up"), [(0.95, True), (1.05, True), (0.5, False), (1.5, False)])
def test_automatic_budgets_are_reused_while_they_are_near(config, runs, fraction, is_taken_up):
    host, device = (
        replace(size, available_bytes=int(size.available_bytes * fraction)) for size in (BOX.host, BOX.device)
    )
    later = replace(BOX, host=host, device=device)
    search, ask, asked = runs(box=later)
    assert pool_budgets(config, search.box) == pool_budgets(config, BOX if is_taken_up else later)
    ask(EXECUTORS, POOLS)
    assert len(asked) == (not is_taken_up)
