"""Placement of experts on workers: budgets, balance, relatives, copies; for any line and any memories."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Performance,
    PerformanceMatrix,
    PoolSpec,
    SharedTensors,
)
from agent.deployment.placement import SLACK, place_experts
from experts.graph import ExpertGraph, RouteStep

OK = frozenset({"ok"})
BACKBONE = SharedTensors("backbone", 5)
SLOW = {"cpu": 4.0, "gpu": 1.0}


def row(name, own_bytes=1, K_s=0.01, shared=()):
    return ExpertProfile(f"{name}@fp32", Performance(K_s, 0.01, 8, 0), Footprint(own_bytes, shared), {SSD: 0.1})


def workers_of(count, expert_bytes, executors=1):
    """Workers w1, w2, ... of one memory each, and their executors."""
    pools = [PoolSpec(f"w{n}/host", expert_bytes, 0) for n in range(1, count + 1)]
    places = [pool.name for pool in pools for _ in range(executors)]
    return pools, [ExecutorSpec(number, "cpu", pool) for number, pool in enumerate(places)]


def line(rows, usage, routes=()):
    """A route for each expert, unless given."""
    chains = routes or [(name,) for name in rows]
    steps = {str(number): tuple(RouteStep(name, OK) for name in chain) for number, chain in enumerate(chains)}
    return ExpertGraph(rows, steps), PerformanceMatrix({"cpu": rows}, usage)


def placed(count, expert_bytes, rows, usage, routes=(), pinned=()):
    pools, executors = workers_of(count, expert_bytes)
    return place_experts(*line(rows, usage, routes), executors, pools, frozenset(pinned))


def equal(names, own_bytes=1):
    return {name: row(name, own_bytes) for name in names}, dict.fromkeys(names, 1 / len(names))


# -- by hand --


def test_usage_times_compute_is_balanced():
    """One slow expert is as much work as four fast ones."""
    rows = {"slow": row("slow", 4, K_s=0.04), **{name: row(name) for name in "abcd"}}
    found = placed(2, 4, rows, dict.fromkeys(rows, 0.2))
    assert found.unplaced == ()
    assert sorted(share.experts for share in found.workers.values()) == [("a", "b", "c", "d"), ("slow",)]
    assert [share.load_s for share in found.workers.values()] == pytest.approx([0.008, 0.008])
    assert [share.used_bytes for share in found.workers.values()] == [4, 4]


def test_dependent_experts_lie_together():
    rows, usage = equal("abcdABCD")
    found = placed(2, 4, rows, usage, [("a", "A"), ("b", "B"), ("c", "C"), ("d", "D")])
    assert all(found.pools[name] == found.pools[name.upper()] for name in "abcd")
    assert {len(share.experts) for share in found.workers.values()} == {4}


def test_shared_detector_gets_copies_on_several_workers():
    names = [f"c{number}" for number in range(12)]
    rows, usage = equal(names)
    rows["detector"], usage["detector"] = row("detector", K_s=0.02), 1.0
    found = placed(3, 6, rows, usage, [(name, "detector") for name in names])
    assert len(found.pools["detector"]) > 1
    loads = [share.load_s for share in found.workers.values()]
    assert max(loads) <= (1 + SLACK) * sum(loads) / len(loads)


def test_memory_that_is_left_takes_further_copies_of_hot_experts_alone():
    rows = {name: row(name) for name in ("hot", *"abcdef")}
    usage = {"hot": 0.3, **dict.fromkeys("abcde", 0.15), "f": 0.0001}
    found = placed(2, 7, rows, usage)
    assert len(found.pools["hot"]) == 2
    assert len(found.pools["f"]) == 1


def test_pinned_expert_is_placed_at_its_home_only():
    rows, usage = equal("abc")
    found = placed(3, 3, rows, usage | {"c": 0.9}, pinned="c")
    assert found.pools["c"] == {"w1/host"}


def test_most_used_experts_have_a_place_if_not_all_fit():
    rows, usage = equal("abcdef")
    found = placed(2, 2, rows, usage | {"b": 0.1, "e": 0.05})
    assert found.unplaced == ("b", "e")
    assert found.pools.keys() == set("acdf")
    assert all(len(places) == 1 for places in found.pools.values())


def test_expert_is_placed_only_where_it_runs_and_shared_tensors_count_once():
    pools = [PoolSpec("w1/host", 7, 0), PoolSpec("w1/device", 8, 0, cache="w1/host")]
    executors = [ExecutorSpec(0, "gpu", "w1/device"), ExecutorSpec(1, "cpu", "w1/host")]
    shared = {name: row(name, 1, shared=(BACKBONE,)) for name in "abc"}
    matrix = PerformanceMatrix({"gpu": shared, "cpu": {"d": row("d", 7)}}, dict.fromkeys("abcd", 0.25))
    graph = ExpertGraph("abcdx", {name: (RouteStep(name, OK),) for name in "abcdx"})
    found = place_experts(graph, matrix, executors, pools)
    assert found.pools == {**dict.fromkeys("abc", frozenset({"w1/device"})), "d": {"w1/host"}}
    assert found.unplaced == ()  # no executor runs x anywhere
    assert found.workers["w1"].used_bytes == 8 + 7


def test_shadow_has_no_place():
    rows, usage = equal("ab")
    graph = ExpertGraph("ab", {"0": (RouteStep("a", OK),)}, shadows={"a": "b"})
    pools, executors = workers_of(2, 4)
    found = place_experts(graph, PerformanceMatrix({"cpu": rows}, usage), executors, pools)
    assert found.pools.keys() == {"a"}


# -- for any line --

SIZES = st.integers(1, 6)


@st.composite
def clusters(draw):
    """Workers of a split memory each, with executors on both processors, and a line with dependencies."""
    names = [f"e{number}" for number in range(draw(st.integers(1, 14)))]
    columns = {}
    for processor, slowness in SLOW.items():
        able = [name for name in names if draw(st.integers(0, 5))]
        columns[processor] = {
            name: row(
                f"{name}{processor}", draw(SIZES), slowness * draw(st.integers(0, 9)) / 1e3,
                draw(st.sampled_from([(), (BACKBONE,)])),
            )
            for name in able
        }  # fmt: skip
    usage = {name: draw(st.floats(0, 1)) for name in names if draw(st.integers(0, 5))}
    routes = draw(st.lists(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True).map(sorted)))
    graph = ExpertGraph(names, {str(n): tuple(RouteStep(name, OK) for name in each) for n, each in enumerate(routes)})
    pools, executors = [], []
    for worker in range(1, draw(st.integers(1, 4)) + 1):
        for memory, processor in (("host", "cpu"), ("device", "gpu")):
            pools.append(PoolSpec(f"w{worker}/{memory}", draw(st.integers(0, 30)), 0))
            count = draw(st.integers(0, 2))
            executors += [ExecutorSpec(len(executors) + n, processor, pools[-1].name) for n in range(count)]
    pinned = frozenset(draw(st.sets(st.sampled_from(names), max_size=2)))
    return graph, PerformanceMatrix(columns, usage), executors, pools, pinned


@given(clusters())
def test_placement_keeps_budgets_and_executors_for_any_line(cluster):
    graph, matrix, executors, pools, pinned = cluster
    if not executors:
        return
    found = place_experts(*cluster)
    used, shares = Counter(), defaultdict(set)
    able = {name for spec in executors for name in matrix.experts[spec.processor]} & graph.experts
    assert found.pools.keys() | set(found.unplaced) == able
    assert found.pools.keys().isdisjoint(found.unplaced)
    for pool in pools:
        processors = {spec.processor for spec in executors if spec.pool == pool.name}
        inside = [name for name, places in found.pools.items() if pool.name in places]
        rows = [matrix.experts[processor][name] for name in inside for processor in processors]
        has_backbone = any(each.footprint.shared for each in rows)
        size_bytes = sum(each.footprint.own_bytes for each in rows) + BACKBONE.size_bytes * has_backbone
        assert size_bytes <= pool.expert_bytes
        used[pool.worker] += size_bytes
        shares[pool.worker].update(inside)
    for worker, share in found.workers.items():
        assert (share.used_bytes, set(share.experts)) == (used[worker], shares[worker])
    assert all(len(found.pools.get(name, ())) <= 1 for name in pinned)
    assert place_experts(*cluster) == found


@given(
    st.lists(st.tuples(SIZES, st.integers(0, 100), st.integers(1, 9)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.data(),
)
def test_every_expert_has_a_place_and_loads_are_balanced_in_sufficient_memory(experts, workers, data):
    rows = {f"e{n}": row(f"e{n}", size, K_s=slow / 100) for n, (size, _, slow) in enumerate(experts)}
    usage = {f"e{n}": used / 100 for n, (_, used, _) in enumerate(experts)}
    largest, total = max(size for size, _, _ in experts), sum(size for size, _, _ in experts)
    chains = st.lists(st.sampled_from(sorted(rows)), min_size=1, max_size=3, unique=True).map(sorted)
    routes = data.draw(st.lists(chains, min_size=1))
    enough = -(-total // workers) + largest
    assert placed(workers, enough, rows, usage, routes).unplaced == ()
    found = placed(workers, total, rows, usage, routes)
    loads = [share.load_s for share in found.workers.values()]
    single = max(usage[name] * row.performance.K_s for name, row in rows.items())
    assert sum(loads) == pytest.approx(sum(usage[name] * row.performance.K_s for name, row in rows.items()))
    assert max(loads) <= sum(loads) / workers + single + 1e-9
