"""The bounds: known cases by hand, and no schedule that a full search, or the Engine, finds is below one."""

import itertools
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.core.effects import Assigned, StartLoad
from agent.core.performance import SSD, ExecutorSpec, Performance, PerformanceMatrix, PoolSpec, SharedTensors
from agent.core.policy import PRESETS
from agent.core.request import IMAGE, Work
from experts.errors import MemoryExceeded
from experts.graph import ExpertGraph, RouteStep
from profiler.simulation.bounds import (
    RequestSteps,
    Resources,
    arrivals_s,
    belady_loads,
    bounds,
    compute_s,
    fewest_fcfs_switches,
    fewest_switches,
    tokens_of,
    unread_bytes,
)
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import IMAGES, OK, TEXTS, row, setup_of, simulator
from tests.profiler.lines import resources as resources_of

SSD_BYTES_PER_S = 10.0


def sized(name, size, shared=(), performance=IMAGES):
    return row(name, performance, size, {SSD: size / SSD_BYTES_PER_S, "host": 0.1}, shared=shared)


def resources(columns, pools, executors=None, speedups=None):
    """``columns[processor]``: rows by expert. One executor of each processor, on the memory of the same place."""
    if executors is None:
        names = list(columns)
        executors = [ExecutorSpec(n, name, pools[min(n, len(pools) - 1)].name) for n, name in enumerate(names)]
    return Resources(tuple(executors), tuple(pools), PerformanceMatrix(columns), SSD_BYTES_PER_S, speedups or {})


def one_memory(sizes, capacity, parts=None, **more):
    """One CPU, and one memory; ``parts[expert]``: what it shares."""
    column = {name: sized(name, size, (parts or {}).get(name, ())) for name, size in sizes.items()}
    return resources({"cpu": column}, [PoolSpec("host", capacity, 0)], **more)


# -- switches --


def test_shared_part_counts_once():
    """Four experts of 1 byte over a part of 8: 12 bytes hold all, 11 hold three; without sharing they would be 36."""
    part = SharedTensors("backbone", 8)
    sizes = dict.fromkeys("abcd", 1)
    parts = dict.fromkeys("abcd", (part,))
    assert [fewest_switches(sizes, one_memory(sizes, capacity, parts)) for capacity in (12, 11)] == [0, 1]


def test_memory_that_runs_nothing_prevents_no_switch():
    """Device for two of three experts; the host caches the third, but it has to come to the device all the same."""
    column = {name: sized(name, 1) for name in "abc"}
    pools = [PoolSpec("host", 100, 0), PoolSpec("device", 2, 0, cache="host")]
    executors = [ExecutorSpec(0, "cuda", "device")]
    assert fewest_switches("abc", resources({"cuda": column}, pools, executors)) == 1
    with_cpu = [*executors, ExecutorSpec(1, "cpu", "host")]
    assert fewest_switches("abc", resources({"cuda": column, "cpu": column}, pools, with_cpu)) == 0


def test_expert_in_two_memories_counts_once():
    """Two memories with room for two each, three small experts and a large one: three can be there, not four."""
    column = {name: sized(name, 9 if name == "d" else 1) for name in "abcd"}
    pools = [PoolSpec("host", 2, 0), PoolSpec("device", 2, 0, cache="host")]
    plant = resources({"cpu": column, "cuda": column}, pools)
    assert fewest_switches("abcd", plant) == 1


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(lambda sizes: dict(zip("abcde", sizes, strict=False)))


@given(SIZES, st.integers(1, 20), st.integers(0, 12))
def test_more_memory_never_raises_the_bound(sizes, capacity, more):
    uses = [*sizes, *reversed(sizes), *sizes]
    small, large = one_memory(sizes, capacity), one_memory(sizes, capacity + more)
    assert fewest_switches(sizes, large) <= fewest_switches(sizes, small)
    assert fewest_fcfs_switches(uses, large) <= fewest_fcfs_switches(uses, small)
    assert unread_bytes(sizes, large) <= unread_bytes(sizes, small)


PARTS = (SharedTensors("p", 2), SharedTensors("q", 5))


def held_bytes(experts, sizes, parts):
    shared = {part for name in experts for part in parts.get(name, ())}
    return sum(sizes[name] for name in experts) + sum(part.size_bytes for part in shared)


def fitting(sizes, parts, capacity):
    subsets = itertools.chain.from_iterable(itertools.combinations(sorted(sizes), n) for n in range(len(sizes) + 1))
    return [frozenset(subset) for subset in subsets if held_bytes(subset, sizes, parts) <= capacity]


@given(SIZES, st.integers(1, 20), st.lists(st.sampled_from([(), PARTS[:1], PARTS[1:], PARTS]), min_size=5, max_size=5))
def test_no_initial_placement_saves_more_switches_than_the_bound_allows(sizes, capacity, drawn):
    """Every set that fits is tried as the start; in any order, what is not there has to be loaded once."""
    parts = dict(zip(sizes, drawn, strict=False))
    assume(all(held_bytes([name], sizes, parts) <= capacity for name in sizes))
    optimum = min(len(sizes) - len(start) for start in fitting(sizes, parts, capacity))
    bound = fewest_switches(sizes, one_memory(sizes, capacity, parts))
    assert bound <= optimum
    assert bound == optimum or any(parts.values())


# -- first come, first served --


def test_belady_needs_a_place():
    with pytest.raises(ValueError, match="0 places"):
        belady_loads("ab", 0)


def least_loads(uses, sizes, capacity, start):
    """By trying every eviction: the fewest loads that serve ``uses`` in order, from the best of the sets ``start``."""
    sets = fitting(sizes, {}, capacity)

    @cache
    def from_here(at, held):
        if at == len(uses):
            return 0
        if uses[at] in held:
            return from_here(at + 1, held)
        room = [kept for kept in sets if kept <= held | {uses[at]} and uses[at] in kept]
        return 1 + min(from_here(at + 1, kept) for kept in room)

    return min(from_here(0, held) for held in start)


USES = st.text(alphabet="abcde", min_size=1, max_size=10)


@given(USES, st.integers(1, 4))
def test_belady_is_the_optimum_for_equal_sizes(uses, places):
    sizes = dict.fromkeys(uses, 1)
    assert belady_loads(uses, places) == least_loads(uses, sizes, places, [frozenset()])
    optimum = least_loads(uses, sizes, places, fitting(sizes, {}, places))
    assert fewest_fcfs_switches(uses, one_memory(sizes, places)) == optimum


@given(USES, st.lists(st.integers(1, 6), min_size=5, max_size=5), st.integers(6, 14))
def test_no_eviction_beats_the_bound_for_mixed_sizes(uses, drawn, capacity):
    sizes = {name: size for name, size in zip("abcde", drawn, strict=True) if name in uses}
    bound = fewest_fcfs_switches(uses, one_memory(sizes, capacity))
    assert bound <= least_loads(uses, sizes, capacity, fitting(sizes, {}, capacity))


def test_experts_of_one_size_are_bounded_separately_among_small_ones():
    """Large ones of 10 take turns in 15 bytes: each of their uses loads, whatever the small ones do."""
    sizes = {"A": 10, "B": 10, "c": 1}
    assert fewest_fcfs_switches("AcBcAcBc", one_memory(sizes, 15)) == 3


# -- bytes --


def test_bytes_beyond_what_all_memories_hold_are_read():
    sizes = {"a": 4, "b": 2, "c": 3}
    assert unread_bytes(sizes, one_memory(sizes, 7)) == 2
    assert unread_bytes(sizes, one_memory(sizes, 9)) == 0
    assert unread_bytes(sizes, one_memory(sizes, 7), resident={"b", "x"}) == 7


def test_bytes_of_a_resident_part_are_not_read_again():
    sizes, part = {"a": 1, "b": 1, "c": 1}, SharedTensors("backbone", 8)
    plant = one_memory(sizes, 9, dict.fromkeys("ab", (part,)))
    assert unread_bytes(sizes, plant, resident=()) == 11
    assert unread_bytes(sizes, plant, resident={"a"}) == 2
    assert unread_bytes(sizes, plant, resident={"c"}) == 10


# -- time --


def test_work_is_split_into_the_largest_batches():
    """Nine images in batches of four: 9 K and 3 B; two executors share them."""
    sizes = {"a": 1}
    assert compute_s({"a": 9}, one_memory(sizes, 1)) == pytest.approx(0.09 + 0.06)
    two = [ExecutorSpec(0, "cpu", "host"), ExecutorSpec(1, "cpu", "host")]
    assert compute_s({"a": 9}, one_memory(sizes, 1, executors=two)) == pytest.approx(0.15 / 2)
    sharing = one_memory(sizes, 1, executors=two, speedups={"cpu": (1.0, 1.2, 3.0)})
    assert compute_s({"a": 9}, sharing) == pytest.approx(0.15 / 1.2)
    assert compute_s({}, sharing) == 0.0


def test_each_processor_gets_what_it_is_best_at():
    """a: 1 s on the first, 9 s on the second; b the other way round: six of each take 6 s, not 12 / (1 + 1/9)."""
    fast, slow = Performance(1.0, 0.0, 1, 0), Performance(9.0, 0.0, 1, 0)
    columns = {
        "cuda": {"a": sized("a", 1, performance=fast), "b": sized("b", 1, performance=slow)},
        "cpu": {"a": sized("a", 1, performance=slow), "b": sized("b", 1, performance=fast)},
    }
    plant = resources(columns, [PoolSpec("device", 9, 0), PoolSpec("host", 9, 0)])
    assert compute_s({"a": 6, "b": 6}, plant) == pytest.approx(6.0)
    only_first = resources({"cuda": columns["cuda"], "cpu": {}}, [PoolSpec("device", 9, 0), PoolSpec("host", 9, 0)])
    assert compute_s({"a": 6, "b": 6}, only_first) == pytest.approx(60.0)


def test_no_work_is_done_before_it_arrives():
    """0.03 s for one image of one step after 5 s; forty that come at 5 s take 40 K + 10 B from then on."""
    sizes = {"a": 1, "b": 1}
    assert arrivals_s(
        [RequestSteps(0.0, ("a",)), RequestSteps(5.0, ("a", "b"))], one_memory(sizes, 2)
    ) == pytest.approx(5.06)
    burst = [RequestSteps(0.0, ("a",)), *[RequestSteps(5.0, ("a",))] * 40]
    assert arrivals_s(burst, one_memory(sizes, 2)) == pytest.approx(5.0 + 0.4 + 0.2)
    assert arrivals_s([], one_memory(sizes, 2)) == 0.0


def test_roofline_is_the_largest_of_the_three_bounds():
    sizes = {"a": 1, "b": 20}
    found = bounds(
        [RequestSteps(0.0, ("a",)), RequestSteps(0.5, ("b",)), RequestSteps(0.5, ("a",))], one_memory(sizes, 11)
    )
    assert (found.switches, found.fcfs_switches) == (1, 1)
    assert found.compute_s == pytest.approx(2 * 0.01 + 0.02 + 0.03)
    assert found.io_s == pytest.approx((21 - 11) / SSD_BYTES_PER_S)
    assert found.arrivals_s == pytest.approx(0.5 + 0.06)
    assert found.seconds == found.io_s


COSTS = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 3))


def batches_s(count, per_image_s, per_batch_s, max_batch):
    return per_image_s * count + per_batch_s * -(-count // max_batch)


def least_makespan(counts, columns):
    """By trying every way to share images out over the processors, one executor each."""
    experts = sorted(counts)
    splits = [
        [split for split in itertools.product(range(counts[e] + 1), repeat=len(columns)) if sum(split) == counts[e]]
        for e in experts
    ]
    best = float("inf")
    for chosen in itertools.product(*splits):
        work = [
            sum(batches_s(split[at], *column[expert]) for expert, split in zip(experts, chosen, strict=True))
            for at, column in enumerate(columns)
        ]
        best = min(best, max(work))
    return best


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
    st.lists(st.fixed_dictionaries(dict.fromkeys("abc", COSTS)), min_size=1, max_size=2),
)
def test_no_assignment_beats_the_time_bound(counts, columns):
    rows = {
        f"p{at}": {name: sized(name, 1, performance=Performance(*costs, 0)) for name, costs in column.items()}
        for at, column in enumerate(columns)
    }
    bound = compute_s(counts, resources(rows, [PoolSpec("host", 9, 0)]))
    optimum = least_makespan(counts, columns)
    assert bound <= optimum * (1 + 1e-9)
    if len(columns) == 1:
        assert bound == pytest.approx(optimum)


# -- against the Engine --


def simulated(policy, sizes, parts, capacity, routes, trace, executors):
    rows = {name: sized(name, size, parts.get(name, ())) for name, size in sizes.items()}
    steps = {name: tuple(RouteStep(expert, OK) for expert in experts) for name, experts in routes.items()}
    setup = setup_of(rows, ["cpu"] * executors, capacity, policy=policy, routes=ExpertGraph(sizes, steps))
    run = simulator(setup, link_bytes_per_s={SSD: SSD_BYTES_PER_S}, check_every_step=False)
    return run.run(trace), resources_of(setup, SSD_BYTES_PER_S)


@given(
    st.sampled_from([*sorted(PRESETS), "samba", "samba-fifo"]),
    st.lists(st.integers(1, 6), min_size=5, max_size=5),
    st.lists(st.sampled_from([(), PARTS[:1], PARTS]), min_size=5, max_size=5),
    st.integers(6, 25),
    st.lists(st.tuples(st.sampled_from("uvwxyz"), st.sampled_from([0.0, 0.1, 2.0])), min_size=1, max_size=25),
    st.integers(1, 3),
)
def test_no_policy_beats_the_bounds(policy, drawn, drawn_parts, capacity, arrivals, executors):
    sizes, parts = dict(zip("abcde", drawn, strict=True)), dict(zip("abcde", drawn_parts, strict=True))
    routes = {"u": ("a", "b"), "v": ("b", "e"), "w": ("c", "a"), "x": ("d", "b", "e"), "y": ("c",), "z": ("e",)}
    times = itertools.accumulate(pause_s for _, pause_s in arrivals)
    trace = [TracedArrival(at_s, component) for at_s, (component, _) in zip(times, arrivals, strict=True)]
    try:
        simulation, plant = simulated(policy, sizes, parts, capacity, routes, trace, executors)
    except MemoryExceeded:
        assume(False)
    found = bounds([RequestSteps(arrival.at_s, routes[arrival.component]) for arrival in trace], plant)
    effects = [effect for _, effect in simulation.effects]
    first = next(at for at, effect in enumerate(effects) if isinstance(effect, Assigned))
    loads = [effect for effect in effects[first:] if isinstance(effect, StartLoad)]
    ended_s = max(simulation.finished_s.values())
    assert found.switches <= len(loads)
    if policy in ("samba", "samba-fifo"):  # of one executor, first come first served
        assert found.switches <= found.fcfs_switches <= len(loads)
    assert found.io_s <= sum(load.size_bytes for load in loads) / SSD_BYTES_PER_S + 1e-9
    assert found.seconds <= ended_s + 1e-9


# -- texts --

FASTER = Performance(0.001, 0.004, 4, 0, K_prompt_s=0.0001, K_output_s=0.002, lease_bytes=1)


def text_line(*columns, leases=10_000, **more):
    """``columns``: performance by expert, of a processor each."""
    rows = {f"p{at}": {name: row(name, each) for name, each in column.items()} for at, column in enumerate(columns)}
    return setup_of(rows, tuple(rows), [PoolSpec("host", 100, 0, lease_bytes=leases)], **more)


def text_resources(*columns):
    return resources_of(text_line(*columns))


def test_tokens_of_all_requests_are_added_up():
    requests = [RequestSteps(0.0, ("r", "t"), Work(3, 4, 7)), RequestSteps(0.0, ("t",), Work(1, 2, 3))]
    assert tokens_of([*requests, RequestSteps(0.0, ("i",))]) == {"r": Work(3, 4), "t": Work(4, 6)}


def test_time_of_tokens_adds_to_batches_and_is_shared_by_processors():
    plant = text_resources({"t": TEXTS})
    assert compute_s({"t": 5}, plant, {"t": Work(100, 20)}) == pytest.approx(5 * 0.001 + 2 * 0.004 + 0.05 + 0.06)
    assert compute_s({"t": 5}, plant) == pytest.approx(0.013)
    assert compute_s({"t": 1}, text_resources({"t": TEXTS}, {"t": TEXTS}), {"t": Work(0, 1000)}) == pytest.approx(
        1.5, rel=0.01
    )


def test_lone_text_takes_its_tokens_where_they_are_fastest():
    request = RequestSteps(2.0, ("t",), Work(10, 100, 110))
    found = arrivals_s([request], text_resources({"t": TEXTS}, {"t": FASTER}))
    assert found == pytest.approx(2.0 + 0.005 + 0.001 + 0.2)


WORK = st.one_of(
    st.none(), st.builds(lambda read, write: Work(read, write, read + write), st.integers(1, 40), st.integers(0, 60))
)
TEXT_ROUTES = {"image": ("i",), "asked": ("t",), "routed": ("r", "t")}
TEXT_GRAPH = ExpertGraph(
    "irt",
    {
        "image": (RouteStep("i", OK),),
        "asked": (RouteStep("t", OK),),
        "routed": (RouteStep("r", frozenset(), then={"ok": "t"}),),
    },
)


@given(
    st.sampled_from(["coserve", "paper", "samba", "none"]),
    st.lists(st.tuples(WORK, st.booleans(), st.sampled_from([0.0, 0.05, 1.0])), min_size=1, max_size=15),
    st.integers(100, 400),
    st.integers(1, 2),
)
def test_no_policy_beats_the_bounds_of_texts_beside_images(policy, drawn, leases, processors):
    column = {"i": IMAGES, "t": TEXTS, "r": TEXTS}
    setup = text_line(*[column] * processors, leases=leases, policy=policy, routes=TEXT_GRAPH, quantum_s=0.02)
    times = itertools.accumulate(pause_s for _, _, pause_s in drawn)
    trace = [
        TracedArrival(at_s, "image" if work is None else "routed" if routed else "asked", work=work or IMAGE)
        for at_s, (work, routed, _) in zip(times, drawn, strict=True)
    ]
    simulation = simulator(setup, check_every_step=False).run(trace)
    requests = [RequestSteps(each.at_s, TEXT_ROUTES[each.component], each.work) for each in trace]
    assert bounds(requests, resources_of(setup)).seconds <= max(simulation.finished_s.values()) + 1e-9
