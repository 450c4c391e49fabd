"""What memories keep for the keys and values of texts: only where texts run, and never what an expert needs."""

from __future__ import annotations

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
)
from agent.core.policy import PRESETS
from agent.deployment.memory_needs import LEAST_LEASED_TOKENS, memory_needs
from experts.graph import ExpertGraph

IMAGES = Performance(0.01, 0.01, 4, workspace_bytes=10)
TEXTS = replace(IMAGES, K_prompt_s=0.001, K_output_s=0.002, lease_bytes=2)
LEAST = LEAST_LEASED_TOKENS * TEXTS.lease_bytes
CPU = (ExecutorSpec(0, "cpu", "host"),)
SPLIT = (ExecutorSpec(0, "cuda", "device"), ExecutorSpec(1, "cpu", "host"))


def rows(**experts):
    """``experts``: bytes and performance by name."""
    return {
        name: ExpertProfile(name, performance, Footprint(size), {SSD: 0.1, "host": 0.1})
        for name, (size, performance) in experts.items()
    }


def needs_of(budget_bytes, column, kv_bytes=None):
    return memory_needs({"host": budget_bytes}, CPU, PerformanceMatrix({"cpu": column}), frozenset(), kv_bytes)["host"]


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
    found = memory_needs({"host": 1_000_000, "device": 2_000_000}, SPLIT, matrix, frozenset())
    assert {pool: needs.lease_bytes for pool, needs in found.items()} == expected


@given(
    st.integers(2000, 100_000),
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 1000)),
)
def test_every_share_that_is_enough_is_one_that_an_engine_accepts(budget_bytes, drawn, kv_bytes):
    column = rows(**{f"e{number}": (size, TEXTS if texts else IMAGES) for number, (size, texts) in enumerate(drawn)})
    needs = needs_of(budget_bytes, column, kv_bytes)
    assert needs.whole_bytes == budget_bytes
    if needs.is_enough:
        spec = needs.leaving(needs.casual_workspace_bytes)
        assert spec.expert_bytes + spec.workspace_bytes + spec.lease_bytes == budget_bytes
        matrix = PerformanceMatrix({"cpu": column})
        Engine(ExpertGraph(column, {}), matrix, CPU, PRESETS["coserve"], Limits((spec,))).check_invariants()
