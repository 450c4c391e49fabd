"""Advice: each limit on a line made for it, remedies that do what they say, and sentences with sizes."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.performance import SSD, Performance, PoolSpec
from agent.deployment.deployment import Overrides, planned, profiled_box
from agent.device_profile.records import Allocation, LinkSpeed, PoolAllocation
from agent.runtime.weights.drive import staging_bytes
from experts.sizes import size_text
from profiler.planning.advice import FASTEST_SSD, REMOVED, Advice, DecodingLoad, Limit, speed_text
from profiler.planning.limits import STEP, advise
from profiler.simulation.core_time import CoreTime
from profiler.simulation.forecast import forecast, scenario_of, with_expert_bytes, with_ssd
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import SLOT_BYTES, PackedFakes, box_of, graph_of, kind_of, profile_of, row, setup_of

MIB = 2**20
EXPERT_BYTES = 100 * MIB
WORKSPACE_BYTES = 64 * MIB
EXPERTS = 20
NAMES = tuple(f"e{number:02d}" for number in range(EXPERTS))
GRAPH = graph_of({name: [name] for name in NAMES})
PERFORMANCE = Performance(K_s=0.02, B_s=0.01, max_batch=4, workspace_bytes=MIB)
BOX = replace(box_of(4096 * MIB, cores=2), host_bytes=1024 * MIB)


def stored(ssd_bytes_per_s):
    return profile_of(box=BOX, links=(LinkSpeed(SSD, ssd_bytes_per_s), LinkSpeed("host", 1e10)))


def rows_of(ssd_bytes_per_s, parts=()):
    load_s = {SSD: EXPERT_BYTES / ssd_bytes_per_s, "host": 0.005}
    return {name: row(name, PERFORMANCE, EXPERT_BYTES, load_s, shared=parts) for name in NAMES}


def setting(places, ssd_bytes_per_s, policy="paper", parts=(), *, split=False):
    """One memory with room for so many experts, or a device with as many and a host behind it."""
    room_bytes = places * EXPERT_BYTES + sum(part.size_bytes for part in parts)
    host = PoolSpec("host", room_bytes, WORKSPACE_BYTES)
    pools = (host, PoolSpec("device", room_bytes, WORKSPACE_BYTES, cache="host")) if split else (host,)
    return setup_of(rows_of(ssd_bytes_per_s, parts), ["cuda" if split else "cpu"], pools, policy=policy, routes=GRAPH)


def even_trace(requests=200, every_s=0.004, seed=1):
    rng = random.Random(seed)
    return [TracedArrival(every_s * number, rng.choice(NAMES)) for number in range(requests)]


def beside_workspaces(setup):
    """Workspaces stay as they are, and experts get the rest."""
    workspaces = {pool.name: pool.workspace_bytes for pool in setup.pools}
    return lambda budgets: with_expert_bytes(setup, {pool: size - workspaces[pool] for pool, size in budgets.items()})


def advised(trace, places, ssd_bytes_per_s, required=None, **more):
    plain = setting(places, ssd_bytes_per_s, **more)
    scenario = scenario_of(GRAPH, stored(ssd_bytes_per_s), trace)
    return scenario, plain, advise(scenario, plain, BOX, required, beside_workspaces(plain))


@pytest.mark.parametrize(
    ("every_s", "limit", "said"),
    [
        (0.004, Limit.COMPUTE, "Compute is the limit: no memory and no SSD would gain more than 5%."),
        (0.5, Limit.ARRIVALS, "Arrivals are the limit: the last images are judged about as soon as possible after"),
    ],
)
def test_compute_or_arrivals_are_the_limit_with_everything_in_memory(every_s, limit, said):
    _, _, advice = advised(even_trace(every_s=every_s), places=EXPERTS, ssd_bytes_per_s=1e8, required=1.9)
    assert (advice.limit, advice.memory, advice.ssd) == (limit, None, None)
    assert advice.images_per_s == pytest.approx(advice.unlimited_images_per_s)
    assert advice.sentences[1].startswith(said)
    assert advice.sentences[2] == "The takt requires 1.90 images/s: met."


@pytest.mark.parametrize("split", [False, True])
def test_too_little_memory_is_reported_with_the_size_that_would_do(split):
    scenario, plain, advice = advised(even_trace(), places=5, ssd_bytes_per_s=1e9, split=split)
    assert advice.limit is Limit.MEMORY
    memory, ssd = advice.memory, advice.ssd
    target = REMOVED * advice.unlimited_images_per_s
    assert advice.images_per_s < target <= min(memory.images_per_s, ssd.images_per_s)
    pool = "device" if split else "host"
    assert memory.box_bytes == {pool: 4096 * MIB if split else 1024 * MIB}
    assert memory.now_bytes == {pool: 5 * EXPERT_BYTES + WORKSPACE_BYTES}

    def with_room(expert_bytes):
        return forecast(scenario, with_expert_bytes(plain, {pool: int(expert_bytes)})).images_per_s

    assert with_room(memory.budget_bytes[pool] - WORKSPACE_BYTES) == memory.images_per_s
    assert with_room(memory.budget_bytes[pool] / STEP - WORKSPACE_BYTES) < target
    faster = forecast(*with_ssd(scenario, plain, ssd.bytes_per_s)).images_per_s
    assert faster == ssd.images_per_s
    assert forecast(*with_ssd(scenario, plain, ssd.bytes_per_s / STEP)).images_per_s < target


def test_all_memories_grow_in_the_advice_if_one_is_not_enough():
    """Half of the experts are placed with the CPU, and its memory has room for two: the device's alone is no help."""
    host = PoolSpec("host", 2 * EXPERT_BYTES, WORKSPACE_BYTES)
    pools = (host, PoolSpec("device", 4 * EXPERT_BYTES, WORKSPACE_BYTES, cache="host"))
    plain = setup_of(rows_of(5e8), ("cuda", "cpu"), pools, policy="paper", routes=GRAPH)
    advice = advise(
        scenario_of(GRAPH, stored(5e8), even_trace(100, seed=2)), plain, BOX, None, beside_workspaces(plain)
    )
    assert list(advice.memory.budget_bytes) == ["host", "device"]
    assert advice.memory.images_per_s >= REMOVED * advice.unlimited_images_per_s
    assert "of host memory (now 264.0 MiB" in advice.sentences[2]
    assert "of device memory (now 464.0 MiB" in advice.sentences[2]


class AutoLine(PackedFakes):
    """Eight packed fakes, no memory given, and a profile whose search found room for six of them.

    A batch at its maximum takes as much as two experts.
    """

    def __init__(self, folder, policy="paper"):
        super().__init__(folder, 8, memory={}, policy=policy)
        searched = PoolAllocation("host", 6 * SLOT_BYTES, 2 * SLOT_BYTES, 6)
        self.profile = replace(
            self.profile,
            box=BOX,
            kinds=(kind_of(self.kind, max_batch=8, workspace_bytes=SLOT_BYTES // 4),),
            allocation=Allocation("searched", {"host": 8 * SLOT_BYTES}, (searched,), {"cpu": 1}),
        )


@pytest.mark.parametrize("policy", ["paper", "coserve"])
def test_plan_with_the_advised_memory_reaches_the_stated_rate(policy, tmp_path):
    """Batches get their part of more memory, too: experts need more than their own bytes beside today's batches."""
    line = AutoLine(tmp_path, policy)
    rng = random.Random(3)
    trace = [TracedArrival(0.02 * number, f"c{rng.randrange(8)}") for number in range(120)]
    scenario = scenario_of(line.config.catalog.graph, line.profile, trace)
    small = line.split({"host": 3 * SLOT_BYTES})
    assert small.pools[0].workspace_bytes == (3 * SLOT_BYTES - staging_bytes(3 * SLOT_BYTES)) // 4
    advice = advise(scenario, small, line.profile.box, None, line.split)
    target = REMOVED * advice.unlimited_images_per_s
    followed = line.split(advice.memory.budget_bytes)
    assert forecast(scenario, followed).images_per_s == advice.memory.images_per_s >= target
    less = line.split({"host": int(advice.memory.budget_bytes["host"] / STEP)})
    assert forecast(scenario, less).images_per_s < target
    kept = beside_workspaces(small)  # workspaces as they are, which they do not stay
    beside = advise(scenario, small, line.profile.box, None, kept).memory
    assert forecast(scenario, line.split(beside.budget_bytes)).images_per_s < beside.images_per_s


def test_memory_for_batches_counts_as_memory(tmp_path):
    line = AutoLine(tmp_path)
    overrides = Overrides(pools=(PoolSpec("host", 8 * SLOT_BYTES, SLOT_BYTES // 2),))
    small = planned(line.config, profiled_box(line.profile), line.profile, overrides)
    scenario = scenario_of(line.config.catalog.graph, line.profile, [TracedArrival(0.0, "c0")] * 64)
    advice = advise(scenario, small, line.profile.box, None, line.split)
    assert (advice.limit, advice.switches, advice.ssd) == (Limit.MEMORY, 0, None)
    assert advice.sentences[1] == "Memory is the limit: batches get less memory than they can use."
    followed = forecast(scenario, line.split(advice.memory.budget_bytes))
    assert followed.images_per_s == advice.memory.images_per_s


def test_sentences_name_sizes_and_what_the_box_has():
    _, _, advice = advised(even_trace(), places=5, ssd_bytes_per_s=1e9, required=40.0)
    first, second, third, takt = advice.sentences
    now, best = advice.images_per_s, advice.unlimited_images_per_s
    assert first == (
        f"paper with 564.0 MiB of host memory reaches {now:.1f} of the {best:.1f} images/s that unlimited memory gives."
    )
    assert second == f"Memory is the limit: requests wait for {advice.switches} switches."
    size, speed = size_text(advice.memory.budget_bytes["host"]), speed_text(advice.ssd.bytes_per_s)
    assert third == (
        f"With {size} of host memory (now 564.0 MiB, this box has 1.0 GiB) it reaches "
        f"{advice.memory.images_per_s:.1f} images/s, or with an SSD of {speed} (now 1.0 GB/s) it reaches "
        f"{advice.ssd.images_per_s:.1f} images/s."
    )
    assert takt == "The takt requires 40.00 images/s: missed now, met with unlimited memory."


def test_first_reads_of_experts_are_not_a_limit_of_memory():
    _, _, advice = advised(even_trace(), places=EXPERTS, ssd_bytes_per_s=5e8, policy="samba")
    assert (advice.limit, advice.switches, advice.memory) == (Limit.SSD, EXPERTS, None)
    assert advice.sentences[2].endswith("; more memory does not do as much.")


def test_ssd_that_no_speedup_saves_is_reported_as_such():
    """Even 64 times as fast it needs 3 s for one expert; only memory helps."""
    slow = EXPERT_BYTES / (3.0 * FASTEST_SSD)
    _, _, advice = advised(even_trace(requests=60), places=5, ssd_bytes_per_s=slow, required=1000.0, policy="coserve")
    assert (advice.limit, advice.ssd) == (Limit.SSD, None)
    busy = f"and it is busy {advice.ssd_busy_fraction:.0%} of the time."
    assert advice.sentences[1] == f"The SSD is the limit: requests wait for {advice.switches} switches, {busy}"
    assert "; no SSD up to 64 times as fast as this one does as much." in advice.sentences[2]
    assert advice.sentences[3] == "The takt requires 1000.00 images/s: missed with any memory."


@settings(max_examples=5)
@given(
    st.integers(1, EXPERTS),
    st.sampled_from([5e7, 5e8, 5e9]),
    st.sampled_from(["paper", "coserve", "samba"]),
    st.integers(0, 5),
    st.booleans(),
)
def test_advice_is_consistent_for_any_line(places, ssd_bytes_per_s, policy, seed, split):
    trace = even_trace(requests=60, seed=seed)
    _, _, advice = advised(trace, places, ssd_bytes_per_s, policy=policy, required=10.0, split=split)
    assert advice == advised(trace, places, ssd_bytes_per_s, policy=policy, required=10.0, split=split)[2]
    assert advice.images_per_s <= advice.unlimited_images_per_s
    is_free = advice.images_per_s >= REMOVED * advice.unlimited_images_per_s
    assert is_free == (advice.limit in (Limit.COMPUTE, Limit.ARRIVALS))
    for remedy in (advice.memory, advice.ssd):
        assert remedy is None or (not is_free and remedy.images_per_s >= REMOVED * advice.unlimited_images_per_s)
    assert len(advice.sentences) == (3 if is_free else 4)


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0), st.floats(0.1, 1000.0))
def test_decoding_is_the_limit_exactly_if_executors_wait_beyond_the_allowance(decoding_s, compute_s, rate):
    load = DecodingLoad(CoreTime(2, 10, decoding_s, compute_s), 10, rate)
    advice = Advice("p", {}, Limit.COMPUTE, rate, rate, 0, 0.0, None, None, None)
    is_limit = advice.with_decoding(load).limit is Limit.DECODING
    assert is_limit == (load.images_per_s < REMOVED * rate)
    assert 0.0 <= load.waiting_fraction <= 1.0
    assert not is_limit or load.waiting_fraction > 0.0
