"""Needs of one memory: bytes, and shares that an Engine accepts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    SharedTensors,
)
from agent.core.policy import PRESETS
from agent.deployment.memory_needs import memory_needs
from experts.errors import MemoryExceeded
from experts.graph import ExpertGraph, RouteStep

CPU = (ExecutorSpec(0, "cpu", "host"),)
IMAGES = Performance(0.01, 0.01, 4, workspace_bytes=10)
TEXTS = replace(IMAGES, K_prompt_s=0.001, K_output_s=0.002, lease_bytes=2)
SPLIT = (ExecutorSpec(0, "cuda", "device"), ExecutorSpec(1, "cuda", "device"), ExecutorSpec(2, "cpu", "host"))


def row(copy, own_bytes, shared=(), workspace_bytes=10, max_batch=4, base_bytes=0):
    performance = Performance(0.01, 0.01, max_batch, workspace_bytes, base_bytes)
    parts = tuple(SharedTensors(*part) for part in shared)
    return ExpertProfile(copy, performance, Footprint(own_bytes, parts), {SSD: 0.1, "host": 0.1})


def rows(**experts):
    """``experts``: bytes and performance by name."""
    return {
        name: ExpertProfile(name, performance, Footprint(size), {SSD: 0.1, "host": 0.1})
        for name, (size, performance) in experts.items()
    }


def one_memory(budget_bytes, column, usage=None, executors=CPU, pinned=()):
    profile = PerformanceMatrix({"cpu": column}, usage or {})
    return memory_needs({"host": budget_bytes}, executors, profile, frozenset(pinned))["host"]


def test_how_many_fit_leaves_one_image_to_each_executor():
    column = {name: row(name, 100, workspace_bytes=40, base_bytes=10) for name in "abcd"}
    executors = (ExecutorSpec(0, "cpu", "host"), ExecutorSpec(1, "cpu", "host"))
    needs = one_memory(400, column, executors=executors)
    assert (needs.one_image_bytes, needs.maximum_batch_bytes) == (2 * 50, 2 * 170)
    assert needs.most == 3
    assert [needs.count_in(size) for size in (99, 100, 399, 400)] == [0, 1, 3, 4]
    assert needs.keeping(2) == PoolSpec("host", 200, 200)
    assert needs.keeping(3) == needs.keeping(4) == PoolSpec("host", 300, 100)


def test_host_cache_of_a_device_holds_the_devices_experts():
    column = {"a": row("a", 10), "b": row("b", 20)}
    profile = PerformanceMatrix({"cuda": column}, {"a": 0.6, "b": 0.4})
    host, device = memory_needs({"host": 100, "device": 100}, SPLIT[:2], profile, frozenset()).values()
    assert (host.cache, host.held_bytes, host.largest_bytes, host.one_image_bytes) == (None, (10, 30), 0, 0)
    assert (device.cache, device.held_bytes, device.largest_bytes, device.one_image_bytes) == ("host", (10, 30), 20, 20)
    assert host.leaving(0) == PoolSpec("host", 100, 0)


@pytest.mark.parametrize(("budget_bytes", "is_limited"), [(399, False), (400, True)])
def test_maximum_batches_are_small_up_to_a_tenth_of_the_memory(budget_bytes, is_limited):
    assert one_memory(budget_bytes, {"a": row("a", 1)}).is_limited is is_limited


@given(
    st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 60),
    st.integers(1, 3),
    st.integers(1, 700),
    st.integers(0, 900),
    st.integers(1, 9),
)
def test_every_share_is_the_whole_budget_and_one_an_engine_accepts(
    drawn, workspace_bytes, cpus, budget_bytes, asked_bytes, count
):
    column = {
        f"e{number}": row(f"e{number}", own, [("trunk", 25)] if shares else [], workspace_bytes)
        for number, (own, shares, _) in enumerate(drawn)
    }
    pinned = frozenset(f"e{number}" for number, (_, _, is_pinned) in enumerate(drawn) if is_pinned)
    executors = tuple(ExecutorSpec(number, "cpu", "host") for number in range(cpus))
    profile = PerformanceMatrix({"cpu": column}, {})
    needs = memory_needs({"host": budget_bytes}, executors, profile, pinned)["host"]
    graph = ExpertGraph(column, {name: (RouteStep(name, frozenset({"ok"})),) for name in column})

    def engine_of(spec):
        return Engine(graph, profile, executors, PRESETS["coserve"], Limits((spec,), pinned=pinned))

    if needs.is_enough:
        assert needs.most >= max(needs.least, 1)
        for spec in (needs.leaving(asked_bytes), needs.keeping(count)):
            assert spec.expert_bytes + spec.workspace_bytes == budget_bytes
            engine_of(spec).check_invariants()
    else:
        for workspace in {0, needs.one_image_bytes, max(budget_bytes - needs.largest_bytes, 0), budget_bytes}:
            with pytest.raises(MemoryExceeded):
                engine_of(PoolSpec("host", budget_bytes - workspace, workspace))


def test_arena_is_one_piece():
    for processor in ("cpu", "mps"):
        matrix = PerformanceMatrix({processor: {"a": row("a", 10)}})
        needs = memory_needs({"host": 100}, (ExecutorSpec(0, processor, "host"),), matrix, frozenset())["host"]
        assert needs.leaving(10).is_one_piece is (processor == "mps")


@pytest.mark.parametrize("kv_bytes", [None, 600])
def test_two_devices_of_one_memory_have_a_share_each_and_no_more_together(kv_bytes):
    unified = (ExecutorSpec(0, "cuda", "host"), ExecutorSpec(1, "cuda", "host"), ExecutorSpec(2, "cpu", "host"))
    columns = {"cuda": rows(t=(100, TEXTS)), "cpu": rows(t=(100, TEXTS), i=(100, IMAGES))}
    both = memory_needs({"host": 10_000}, unified, PerformanceMatrix(columns), frozenset(), kv_bytes)["host"]
    assert both.arenas == 2
    assert both.lease_bytes == (1250 if kv_bytes is None else 300)
    assert (both.budget_bytes + 2 * both.lease_bytes, both.whole_bytes) == (10_000, 10_000)
    columns["cpu"] = rows(i=(100, IMAGES))
    one = memory_needs({"host": 10_000}, unified, PerformanceMatrix(columns), frozenset(), kv_bytes)["host"]
    assert (one.arenas, one.lease_bytes) == (1, 2500 if kv_bytes is None else 600)


@pytest.mark.parametrize(
    ("on_cpu", "expected"), [(TEXTS, {"host": 250_000, "device": 500_000}), (IMAGES, {"host": 0, "device": 500_000})]
)
def test_each_memory_that_texts_run_from_has_its_own(on_cpu, expected):
    matrix = PerformanceMatrix({"cuda": rows(t=(100, TEXTS)), "cpu": rows(t=(100, on_cpu))})
    found = memory_needs({"host": 1_000_000, "device": 2_000_000}, SPLIT[1:], matrix, frozenset())
    assert {pool: needs.lease_bytes for pool, needs in found.items()} == expected


@given(
    st.integers(2000, 100_000),
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 1000)),
)
def test_every_share_beside_texts_is_one_that_an_engine_accepts(budget_bytes, drawn, kv_bytes):
    column = rows(**{f"e{number}": (size, TEXTS if texts else IMAGES) for number, (size, texts) in enumerate(drawn)})
    needs = memory_needs({"host": budget_bytes}, CPU, PerformanceMatrix({"cpu": column}), frozenset(), kv_bytes)["host"]
    assert needs.whole_bytes == budget_bytes
    if needs.is_enough:
        spec = needs.leaving(needs.casual_workspace_bytes)
        assert spec.expert_bytes + spec.workspace_bytes + spec.lease_bytes == budget_bytes
        matrix = PerformanceMatrix({"cpu": column})
        Engine(ExpertGraph(column, {}), matrix, CPU, PRESETS["coserve"], Limits((spec,))).check_invariants()
