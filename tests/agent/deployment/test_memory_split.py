"""Split of the memories: the line file first, then the profile, then the casual rule."""

from dataclasses import replace
from itertools import pairwise

import pytest

from agent.config import read_line
from agent.core.performance import ExpertProfile, Footprint, Performance, PerformanceMatrix, PoolSpec
from agent.deployment.executors import GRAPHS_BYTES, LEAST_GAIN, executor_specs
from agent.deployment.memory_split import (
    MOST_PREPARED_BYTES,
    available_for,
    casual_allocation,
    limits_of,
    pool_budgets,
    pool_specs,
)
from agent.device_profile.records import Allocation, PoolAllocation
from agent.runtime.machine.box import Box, MemorySize
from agent.runtime.weights.drive import staging_bytes
from experts.backends.capabilities import cuda_capabilities, supposed
from experts.errors import ConfigError
from tests.agent.line_files import LineFile, expert, route

MIB = 2**20
CPU = Box("cpu", "Xeon", ("cpu",), 8, MemorySize(1000 * MIB, 1000 * MIB), None, ())
RTX = replace(CPU, name="cuda", processors=("cuda", "cpu"), device=MemorySize(500 * MIB, 400 * MIB))
JETSON = replace(CPU, name="jetson", processors=("cuda", "cpu"))
APPLE = replace(CPU, name="mps", processors=("mps",))
EMULATED = replace(RTX, name="emulated", processors=("emulated", "cpu"))
PERFORMANCE = Performance(K_s=0.01, B_s=0.001, max_batch=4, workspace_bytes=2 * MIB)


@pytest.fixture(autouse=True)
def without_libraries():
    """These memories are too small for what cuBLAS keeps."""
    with supposed({"cuda": replace(cuda_capabilities((8, 6)), products_bytes=0)}):
        yield


@pytest.fixture
def line(tmp_path):
    """A line of three experts; a test adds keys."""

    made = LineFile(
        tmp_path,
        experts={f"cls/{name}": expert("w.safetensors", "resnet18", 64) for name in "abc"},
        routes={"r": route("cls/a")},
    )

    def read(**keys):
        return read_line(made.write(**keys), {})

    return read


def profile(box, mib=30):
    rows = {
        f"cls/{name}": ExpertProfile(f"cls/{name}@fp32", PERFORMANCE, Footprint(mib * MIB), {"ssd": 1.0})
        for name in "abc"
    }
    return PerformanceMatrix(dict.fromkeys(box.processors, rows))


def searched(**workspaces_mib):
    pools = tuple(PoolAllocation(pool, 1, size * MIB, 1) for pool, size in workspaces_mib.items())
    return Allocation("searched in simulation", {}, pools, {"cuda": 4, "cpu": 0})


def shares(specs):
    return {spec.name: (spec.expert_bytes // MIB, spec.workspace_bytes // MIB) for spec in specs}


@pytest.mark.parametrize(
    ("box", "executors"),
    [
        (RTX, {"cuda": 3, "cpu": 1}),
        (JETSON, {"cuda": 2, "cpu": 1}),
        (APPLE, {"mps": 1}),
        (CPU, {"cpu": 1}),
        (EMULATED, {"emulated": 3, "cpu": 1}),
    ],
)
def test_casual_split_is_the_papers(box, executors):
    budgets = dict.fromkeys(box.pools, 100 * MIB + 1)
    found = casual_allocation(box, budgets)
    assert (found.origin, found.executors, found.budget_bytes) == ("casual", executors, budgets)
    assert found.pools == tuple(PoolAllocation(pool, 75 * MIB + 1, 25 * MIB, 0) for pool in box.pools)


def test_executors_come_from_the_line_then_the_profile_then_the_rule(line):
    def counts(config, box, allocation):
        return [spec.processor for spec in executor_specs(config, box, allocation)]

    assert counts(line(executors={"cuda": 1}), RTX, searched()) == ["cuda"]
    assert counts(line(), RTX, searched()) == ["cuda"] * 4
    assert counts(line(), RTX, None) == ["cuda", "cuda", "cuda", "cpu"]
    assert counts(line(), JETSON, None) == ["cuda", "cuda", "cpu"]
    assert counts(line(), EMULATED, None) == ["emulated", "cpu"]
    assert counts(line(), CPU, None) == ["cpu", "cpu"]
    assert counts(line(policy="samba"), RTX, searched()) == ["cuda"]
    with pytest.raises(ConfigError, match="this box has no 'cuda'"):
        executor_specs(line(), CPU, searched())
    with pytest.raises(ConfigError, match=r"executors\.mps: give 1: Metal ends a process"):
        executor_specs(line(executors={"mps": 2}), APPLE)
    assert counts(line(), APPLE, replace(searched(), executors={"mps": 2})) == ["mps"]


def test_searched_workspace_stays_and_experts_get_the_rest_of_the_budget(line):
    config = line(memory={"host": "200MiB"})
    executors = executor_specs(config, RTX, searched())
    found = pool_specs(config, RTX, executors, profile(RTX), searched(host=0, device=20))
    assert shares(found) == {"host": (187, 0), "device": (340, 20)}
    smaller = replace(RTX, device=MemorySize(500 * MIB, 300 * MIB))
    assert shares(pool_specs(config, smaller, executors, profile(RTX), searched(device=20)))["device"] == (250, 20)
    assert pool_budgets(config, RTX) == {"host": 200 * MIB - staging_bytes(200 * MIB), "device": 360 * MIB}


@pytest.mark.parametrize("host_bytes", [1 * MIB, 20 * MIB, 777 * MIB + 5, 2000 * MIB])
def test_buffers_of_loads_into_a_device_are_part_of_the_host_memory(line, host_bytes):
    def shares(box):
        budgets = pool_budgets(config, box)
        return budgets["host"], available_for("host", budgets) * 0.6

    config = line(memory={"host": f"{host_bytes}B"})
    kept_bytes, given_bytes = shares(RTX)
    assert kept_bytes + staging_bytes(kept_bytes) <= host_bytes
    assert given_bytes == pytest.approx(host_bytes, abs=64 * 1024)
    assert shares(CPU)[0] == host_bytes


def test_smaller_budget_keeps_the_searched_experts_down_to_the_casual_share(line):
    """Searched in 100 MiB: 70 for experts and 30 for batches, more than a quarter."""
    allocation = replace(searched(), pools=(PoolAllocation("device", 70 * MIB, 30 * MIB, 2),))
    found = {}
    for budget_mib in range(60, 140, 4):
        config = line(memory={"device": f"{budget_mib}MiB"})
        executors = executor_specs(config, RTX, allocation)
        found[budget_mib] = shares(pool_specs(config, RTX, executors, profile(RTX), allocation))["device"]
    assert (found[60], found[92], found[96]) == ((45, 15), (69, 23), (70, 26))
    assert (found[100], found[120]) == ((70, 30), (90, 30))
    for less, more in pairwise(found.values()):
        assert less[0] <= more[0] <= less[0] + 4, "no step: of 4 MiB more, experts get 0 to 4"


def test_searched_workspace_without_room_for_the_largest_expert_is_dropped_and_logged(line, caplog):
    config = line(memory={"device": "48MiB"})
    executors = executor_specs(config, RTX)
    assert shares(pool_specs(config, RTX, executors, profile(RTX), searched(device=18)))["device"] == (30, 18)
    assert caplog.text == ""
    assert shares(pool_specs(config, RTX, executors, profile(RTX), searched(device=19)))["device"] == (36, 12)
    assert "searched_workspace_left_out pool=device" in caplog.text


def test_given_workspace_that_leaves_too_little_is_named(line):
    config = line(memory={"device": "60MiB", "workspace": "50MiB"})
    with pytest.raises(
        ConfigError, match=r"raise memory.device, lower memory.workspace, which takes 50.0 MiB, or take"
    ):
        pool_specs(config, RTX, executor_specs(config, RTX), profile(RTX))


def test_images_ahead_have_a_twentieth_of_host_memory_or_the_lines_share(line):
    host, device = PoolSpec("host", 300, 100, lease_bytes=200), PoolSpec("device", 10_000, 100, cache="host")
    assert limits_of(line(), (host, device)).prepared_bytes == 30
    large = PoolSpec("host", 2**40, 2**30)
    assert limits_of(line(), (large,)).prepared_bytes == MOST_PREPARED_BYTES
    assert limits_of(line(memory={"images": "7MiB"}), (host,)).prepared_bytes == 7 * 2**20


@pytest.mark.parametrize(("compute", "stream_bytes"), [((8, 6), 8320 * 1024), ((9, 0), 32 * MIB)])
@pytest.mark.parametrize(("box", "memory"), [(RTX, "device"), (JETSON, "host")])
def test_libraries_keep_bytes_of_the_budget_for_each_executor_of_a_gpu(line, box, memory, compute, stream_bytes):
    config = line(executors={"cuda": 3, "cpu": 1}, memory={"workspace": "20MiB"})

    def planned(row):
        with supposed({"cuda": row}):
            pools = pool_specs(config, box, executor_specs(config, box), profile(box))
        return {pool.name: pool.expert_bytes for pool in pools}

    plain = planned(replace(cuda_capabilities(compute), products_bytes=0))
    assert planned(cuda_capabilities(compute)) == {**plain, memory: plain[memory] - 3 * stream_bytes}


def test_graphs_that_pay_by_the_profile_get_bytes_of_the_budget(line):
    def planned(gain):
        executors = executor_specs(config, box, None, {"cuda": gain})
        (pool,) = (pool for pool in pool_specs(config, box, executors, profile(box)) if pool.name == "device")
        return [spec.graphs_bytes for spec in executors], pool.expert_bytes

    config, box = line(executors={"cuda": 2, "cpu": 1}), replace(RTX, device=MemorySize(2000 * MIB, 2000 * MIB))
    (without, all_bytes), (given, left_bytes) = planned(LEAST_GAIN - 0.01), planned(LEAST_GAIN)
    assert (without, given) == ([0, 0, 0], [GRAPHS_BYTES, GRAPHS_BYTES, 0])
    assert all_bytes - left_bytes > GRAPHS_BYTES, "casual workspaces shrink, too"
