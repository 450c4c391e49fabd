"""Predict, assign, arrange, split: the paper's figures 8 and 9, and our bound, on known cases."""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import Assigned, AssignmentCandidate, Complete, Evict, Fail, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Performance,
    PerformanceMatrix,
    PoolSpec,
)
from agent.core.policy import PRESETS
from agent.core.scheduler import FIRST_PATIENCE, BatchSplitter, shortest_makespan
from experts.errors import MemoryExceeded
from experts.expert import Prediction, Verdict
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core import worlds

OK = frozenset({"ok"})


def build_engine(
    policy="coserve",
    experts="abcdef",
    capacity=2,
    executors=1,
    max_batch=4,
    followed_by=None,
    usage=None,
    placed=True,
    **limits,
):
    """An Engine over experts of one byte each; K = 1 s, B = 2 s, a load 10 s; component X runs on expert x."""
    routes = {name.upper(): (RouteStep(name, OK),) for name in experts}
    for first, then in (followed_by or {}).items():
        routes[first.upper()] = (RouteStep(first, OK), RouteStep(then, OK))
    performance = Performance(1.0, 2.0, max_batch, workspace_bytes=1)
    column = {name: ExpertProfile(name, performance, Footprint(1), {SSD: 10.0}) for name in experts}
    profile = PerformanceMatrix({"cpu": column}, usage or dict.fromkeys(experts, 0.0))
    specs = [ExecutorSpec(number, "cpu", "host") for number in range(executors)]
    pool = PoolSpec("host", expert_bytes=capacity, workspace_bytes=executors * max_batch)
    engine = Engine(ExpertGraph(experts, routes), profile, specs, PRESETS[policy], worlds.limits((pool,), **limits))
    if placed:
        engine.handle(events.Started(), 0.0)
    return engine


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def settle_loads(engine, effects, now):
    """Answer every load until none is asked for; all effects on the way."""
    everything = list(effects)
    loads = of(StartLoad, effects)
    while loads:
        assert len(everything) < 1000, "loads go on for ever"
        more = engine.handle(events.Loaded(loads.pop(0).load), now)
        everything += more
        loads += of(StartLoad, more)
    return everything


def answer(batch, label="ok"):
    return events.Finished(batch.id, tuple(Prediction(label, 1.0) for _ in batch.requests))


def run_to_the_end(engine, effects):
    """Answer every load and every batch; the requests of each batch, in the order they ran."""
    ran = []
    while effects:
        effects = settle_loads(engine, effects, 0.0)
        batches = of(StartBatch, effects)
        ran += [started.batch.requests for started in batches]
        effects = [effect for started in batches for effect in engine.handle(answer(started.batch), 1.0)]
    return ran


def test_a_request_goes_where_it_adds_least_among_queues_that_do_not_become_the_longest():
    figure_8 = (AssignmentCandidate(0, 3.0, 3.0), AssignmentCandidate(1, 4.0, 1.0), AssignmentCandidate(2, 8.0, 1.0))
    assert shortest_makespan(figure_8) == 1


def test_a_tie_goes_to_the_lowest_executor():
    assert shortest_makespan([AssignmentCandidate(0, 1.0, 1.0), AssignmentCandidate(1, 1.0, 1.0)]) == 0


def test_the_longest_queue_is_kept_shortest_even_at_a_larger_addition():
    assert shortest_makespan([AssignmentCandidate(0, 5.0, 1.0), AssignmentCandidate(1, 0.0, 4.0)]) == 1


def test_a_request_that_joins_a_group_adds_k_and_one_that_opens_one_adds_k_and_b_and_the_load():
    engine = build_engine(policy="paper", placed=False)
    additions = []
    for number in range(3):
        (assigned,) = of(Assigned, engine.handle(events.Arrived(number, "AAB"[number]), 0.0))
        additions.append(assigned.candidates[0].addition_s)
    assert additions == [13.0, 1.0, 13.0]


def test_requests_of_one_expert_run_together_and_split_at_the_maximum_batch():
    """Figure 9: a b a b a a, with a maximum of 3."""
    engine = build_engine(policy="paper", max_batch=3, capacity=1, placed=False)
    effects = []
    for number, component in enumerate("ABABAA"):
        effects += engine.handle(events.Arrived(number, component), 0.0)
    assert run_to_the_end(engine, effects) == [(0, 2, 4), (5,), (1, 3)]


def test_first_come_first_served_batches_only_neighbours():
    engine = build_engine(policy="samba", capacity=2, placed=False)
    effects = []
    for number, component in enumerate("AABA"):
        effects += engine.handle(events.Arrived(number, component), 0.0)
    assert run_to_the_end(engine, effects) == [(0, 1), (2,), (3,)]


def test_a_group_stops_growing_once_a_request_behind_it_has_waited_for_the_bound():
    engine = build_engine(capacity=2, max_overtake_s=5.0, placed=False)
    joined = []
    for number, (component, at_s) in enumerate([("A", 0.0), ("B", 1.0), ("A", 5.9), ("A", 6.0), ("A", 6.1)]):
        (assigned,) = of(Assigned, engine.handle(events.Arrived(number, component), at_s))
        joined.append(assigned.joined)
    assert joined == [False, False, True, False, True]


def test_the_paper_has_no_such_bound():
    engine = build_engine(policy="paper", max_overtake_s=5.0, placed=False)
    for number, component in enumerate("AB"):
        engine.handle(events.Arrived(number, component), 0.0)
    (assigned,) = of(Assigned, engine.handle(events.Arrived(2, "A"), 1000.0))
    assert assigned.joined


def test_a_resident_group_runs_while_the_head_is_on_its_way():
    engine = build_engine(capacity=2, placed=False)
    loads = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    (started,) = of(StartBatch, engine.handle(events.Loaded(loads[0].load), 0.0))
    engine.handle(events.Arrived(1, "B"), 0.0)
    engine.handle(events.Arrived(2, "A"), 0.0)
    (meanwhile,) = of(StartBatch, engine.handle(answer(started.batch), 1.0))
    assert meanwhile.batch.expert == "a"


def test_a_head_that_waited_too_long_gets_the_room_of_whoever_stops():
    engine = build_engine(capacity=1, max_overtake_s=5.0, placed=False)
    loads = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    (started,) = of(StartBatch, engine.handle(events.Loaded(loads[0].load), 0.0))
    engine.handle(events.Arrived(1, "B"), 0.0)
    engine.handle(events.Arrived(2, "A"), 0.0)
    effects = engine.handle(answer(started.batch), 5.0)
    assert [effect.expert for effect in of(Evict, effects)] == ["a"]
    assert [effect.expert for effect in of(StartLoad, effects)] == ["b"]
    assert not of(StartBatch, effects)


def build_engine_of(columns, capacity=1, **limits):
    """One memory, an executor for each processor, batches of one: ``columns`` names what each processor can run."""
    experts = sorted(set().union(*columns.values()))
    performance = Performance(1.0, 2.0, 1, workspace_bytes=1)
    profiles = {
        processor: {name: ExpertProfile(name, performance, Footprint(1), {SSD: 10.0}) for name in names}
        for processor, names in columns.items()
    }
    executors = [ExecutorSpec(number, processor, "host") for number, processor in enumerate(columns)]
    graph = ExpertGraph(experts, {name.upper(): (RouteStep(name, OK),) for name in experts})
    every_limit = worlds.limits((PoolSpec("host", capacity, len(executors)),), **limits)
    return Engine(graph, PerformanceMatrix(profiles), executors, PRESETS["coserve"], every_limit)


def arrive(engine, number, component, at_s):
    """A request comes, and every load that it causes is done at once; the batches that start."""
    effects = engine.handle(events.Arrived(number, component), at_s)
    return [started.batch for started in of(StartBatch, settle_loads(engine, effects, at_s))]


def test_a_group_that_never_empties_is_no_older_than_its_oldest_request():
    """x's executor always has work, and the memory holds one expert: y's turn comes when x's older requests ran."""
    engine = build_engine_of({"one": "x", "other": "y"}, max_overtake_s=5.0)
    (first,) = arrive(engine, 0, "X", 0.0)
    arrive(engine, 1, "X", 0.0)
    arrive(engine, 2, "Y", 0.5)
    arrive(engine, 3, "X", 2.0)
    (second,) = of(StartBatch, engine.handle(answer(first), 3.0))  # y is not overdue yet
    assert second.batch.requests == (1,)
    effects = engine.handle(answer(second.batch), 6.0)
    assert [effect.expert for effect in of(Evict, effects)] == ["x"]
    assert [effect.expert for effect in of(StartLoad, effects)] == ["y"]


def test_an_overdue_head_leaves_what_an_older_head_waits_to_run_on():
    engine = build_engine_of({"one": "x", "other": "y"}, max_overtake_s=5.0)
    (first,) = arrive(engine, 0, "X", 0.0)
    arrive(engine, 1, "X", 0.4)
    arrive(engine, 2, "Y", 0.5)
    effects = engine.handle(answer(first), 6.0)
    assert of(Evict, effects) == []
    assert [started.batch.requests for started in of(StartBatch, effects)] == [(1,)]


def test_executors_that_take_turns_on_one_copy_do_not_keep_it_from_an_overdue_head():
    engine = build_engine_of({"one": "x", "two": "x", "other": "y"}, max_overtake_s=5.0)
    (first,) = arrive(engine, 0, "X", 0.0)
    (second,) = arrive(engine, 1, "X", 0.0)
    assert (first.executor, second.executor) == (0, 1)
    arrive(engine, 2, "Y", 0.5)
    for number in range(3, 7):
        arrive(engine, number, "X", 1.0)
    assert of(StartBatch, engine.handle(answer(first), 6.0)) == []  # held for y, as the second still runs on x
    effects = engine.handle(answer(second), 7.0)
    assert [effect.expert for effect in of(Evict, effects)] == ["x"]
    assert [effect.expert for effect in of(StartLoad, effects)] == ["y"]


def test_who_waits_longer_than_an_overdue_head_runs_on_a_copy_that_others_use():
    engine = build_engine_of({"one": "x", "two": "x", "other": "y"}, max_overtake_s=5.0)
    (first,) = arrive(engine, 0, "X", 0.0)
    arrive(engine, 1, "X", 0.0)
    arrive(engine, 2, "X", 0.4)  # behind the first
    arrive(engine, 3, "Y", 0.5)
    (started,) = of(StartBatch, engine.handle(answer(first), 6.0))
    assert started.batch.requests == (2,)


def test_requests_that_were_given_back_are_as_old_as_they_were():
    engine = build_engine_of({"one": "x", "other": "y"}, max_overtake_s=5.0)
    (first,) = arrive(engine, 0, "X", 0.0)
    arrive(engine, 1, "Y", 0.5)
    effects = engine.handle(events.BatchFailed(first.id, "no memory", out_of_memory=True), 6.0)
    assert [started.batch.requests for started in of(StartBatch, effects)] == [(0,)]


def test_the_next_groups_are_loaded_while_the_first_runs():
    engine = build_engine(capacity=3, placed=False)
    effects = []
    for number, component in enumerate("ABC"):
        effects += engine.handle(events.Arrived(number, component), 0.0)
    loads = of(StartLoad, effects)
    assert [load.expert for load in loads] == ["a", "b"]  # two in flight
    effects = engine.handle(events.Loaded(loads[0].load), 0.0)
    assert [type(effect) for effect in effects] == [StartBatch, StartLoad]
    assert of(StartLoad, effects)[0].expert == "c"


def test_experts_are_placed_by_usage_probability_until_the_memory_is_full():
    usage = {"a": 0.1, "b": 0.5, "c": 0.3, "d": 0.05}
    engine = build_engine(experts="abcd", capacity=2, usage=usage, placed=False)
    effects = settle_loads(engine, engine.handle(events.Started(), 0.0), 0.0)
    assert [load.expert for load in of(StartLoad, effects)] == ["b", "c"]
    assert engine.statistics().switches == 0


def test_a_pinned_expert_is_placed_whatever_the_policy_and_never_leaves():
    engine = build_engine(policy="samba", capacity=2, pinned=frozenset({"f"}), placed=False)
    effects = settle_loads(engine, engine.handle(events.Started(), 0.0), 0.0)
    assert [load.expert for load in of(StartLoad, effects)] == ["f"]
    left = []
    for number, component in enumerate("ABCDE"):
        effects = settle_loads(engine, engine.handle(events.Arrived(number, component), 0.0), 0.0)
        left += [evict.expert for evict in of(Evict, effects)]
        for started in of(StartBatch, effects):
            engine.handle(answer(started.batch), 1.0)
    assert left == ["a", "b", "c", "d"]


def test_a_route_goes_on_to_its_subsequent_expert_and_ends_at_a_label_that_does_not_pass():
    engine = build_engine(followed_by={"a": "d"}, placed=False)
    effects = settle_loads(engine, engine.handle(events.Arrived(0, "A"), 0.0), 0.0)
    (started,) = of(StartBatch, effects)
    effects = settle_loads(engine, engine.handle(answer(started.batch), 0.0), 0.0)
    (subsequent,) = of(StartBatch, effects)
    assert subsequent.batch.expert == "d"
    (complete,) = of(Complete, engine.handle(answer(subsequent.batch, "bad"), 0.0))
    assert complete.outcome.verdict is Verdict.NG
    assert [step.expert for step in complete.outcome.steps] == ["a", "d"]


def test_what_follows_a_running_expert_is_loaded_when_there_is_room():
    engine = build_engine(followed_by={"a": "d"}, capacity=2, placed=False)
    loads = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    effects = engine.handle(events.Loaded(loads[0].load), 0.0)
    assert [load.expert for load in of(StartLoad, effects)] == ["d"]


def test_bad_weights_quarantine_the_expert_and_end_its_requests_with_the_reason():
    engine = build_engine(placed=False)
    (load,) = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    engine.handle(events.Arrived(1, "A"), 0.0)
    fails = of(Fail, engine.handle(events.LoadFailed(load.load, "wrong sha256", permanent=True), 0.0))
    assert [fail.request for fail in fails] == [0, 1]
    assert all("wrong sha256" in fail.outcome.reason for fail in fails)
    (later,) = of(Fail, engine.handle(events.Arrived(2, "A"), 0.0))
    assert later.outcome.verdict is Verdict.UNKNOWN
    assert engine.statistics().quarantined == {"a": "wrong sha256"}


def test_a_passing_load_failure_is_tried_again_after_a_pause():
    engine = build_engine(placed=False, load_backoff_s=1.0)
    (load,) = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    assert not of(StartLoad, engine.handle(events.LoadFailed(load.load, "I/O error", permanent=False), 0.0))
    assert engine.next_wakeup_s() == 1.0
    assert of(StartLoad, engine.handle(events.Tick(), 1.0))


def test_a_failed_batch_is_run_again_one_by_one():
    engine = build_engine(placed=False)
    (load,) = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    engine.handle(events.Arrived(1, "A"), 0.0)
    (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), 0.0))
    assert started.batch.requests == (0, 1)
    (first,) = of(StartBatch, engine.handle(events.BatchFailed(started.batch.id, "broke"), 0.0))
    assert first.batch.requests == (0,)
    effects = engine.handle(events.BatchFailed(first.batch.id, "broke"), 0.0)
    assert [fail.request for fail in of(Fail, effects)] == [0]
    assert [started.batch.requests for started in of(StartBatch, effects)] == [(1,)]


def test_a_batch_too_large_for_the_memory_is_halved():
    engine = build_engine(placed=False)
    (load,) = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    for number in range(1, 4):
        engine.handle(events.Arrived(number, "A"), 0.0)
    (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), 0.0))
    assert len(started.batch.requests) == 4
    (single,) = of(StartBatch, engine.handle(events.BatchFailed(started.batch.id, "oom", out_of_memory=True), 0.0))
    effects = [single]
    sizes = []
    for number in range(4, 12):
        engine.handle(events.Arrived(number, "A"), 0.0)
    while batches := of(StartBatch, effects):
        sizes.append(len(batches[0].batch.requests))
        effects = engine.handle(answer(batches[0].batch), 0.0)
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2]


def test_batches_grow_again_once_halved_ones_have_been_good_for_long():
    engine = build_engine(placed=False, capacity=1)
    (load,) = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
    for number in range(1, 4 + 2 * FIRST_PATIENCE + 4):
        engine.handle(events.Arrived(number, "A"), 0.0)
    (started,) = of(StartBatch, engine.handle(events.Loaded(load.load), 0.0))
    effects = engine.handle(events.BatchFailed(started.batch.id, "oom", out_of_memory=True), 0.0)
    sizes = []
    while batches := of(StartBatch, effects):
        sizes.append(len(batches[0].batch.requests))
        effects = engine.handle(answer(batches[0].batch), 0.0)
    assert sizes == [1] * 4 + [2] * FIRST_PATIENCE + [4]


MAX_8 = Performance(1, 1, 8, 0)


def size_after(splitter, good_batches, of_size, max_batch=8):
    """The size of the next batch, were many requests waiting, after so many good ones."""
    for _ in range(good_batches):
        splitter.ran("a", 0, of_size, max_batch)
    return splitter.batch_size("a", 0, MAX_8, waiting=99, free_bytes=0)


def test_only_batches_as_large_as_the_limit_count_and_it_doubles_up_to_the_profiled_maximum():
    splitter = BatchSplitter()
    splitter.ran_out_of_memory("a", 0, 5)
    assert size_after(splitter, 10 * FIRST_PATIENCE, of_size=1) == 2
    assert size_after(splitter, FIRST_PATIENCE - 1, of_size=2) == 2
    assert size_after(splitter, 1, of_size=2) == 4
    assert size_after(splitter, FIRST_PATIENCE - 1, of_size=4) == 4
    assert size_after(splitter, 1, of_size=4) == 8
    assert size_after(splitter, 10 * FIRST_PATIENCE, of_size=8) == 8


def test_a_limit_that_doubles_stops_at_a_maximum_that_is_no_multiple_of_it():
    splitter = BatchSplitter()
    splitter.ran_out_of_memory("a", 0, 6)
    for _ in range(FIRST_PATIENCE):
        splitter.ran("a", 0, 3, 5)
    assert splitter.batch_size("a", 0, MAX_8, waiting=99, free_bytes=0) == 5


def test_memory_that_is_too_small_again_and_again_is_tried_less_and_less_often():
    splitter, patience = BatchSplitter(), []
    for _ in range(9):
        splitter.ran_out_of_memory("a", 0, 8)
        good = 0
        while size_after(splitter, 1, of_size=4) == 4:
            good += 1
        patience.append(good + 1)
    assert patience == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_an_out_of_memory_is_forgotten_once_the_largest_batches_have_been_good_for_long():
    splitter = BatchSplitter()
    splitter.ran_out_of_memory("a", 0, 8)
    splitter.ran_out_of_memory("a", 0, 8)
    assert size_after(splitter, 2 * FIRST_PATIENCE, of_size=4) == 8
    size_after(splitter, 2 * FIRST_PATIENCE, of_size=8)
    splitter.ran_out_of_memory("a", 0, 8)
    assert size_after(splitter, FIRST_PATIENCE - 1, of_size=4) == 4
    assert size_after(splitter, 1, of_size=4) == 8


def test_good_batches_are_in_a_row_and_of_one_expert_on_one_executor():
    splitter = BatchSplitter()
    splitter.ran_out_of_memory("a", 0, 8)
    assert size_after(splitter, FIRST_PATIENCE - 1, of_size=4) == 4
    for expert, executor in (("b", 0), ("a", 1)):
        assert splitter.batch_size(expert, executor, MAX_8, waiting=99, free_bytes=0) == 8
        splitter.ran(expert, executor, 4, 8)
    assert size_after(splitter, 0, of_size=4) == 4
    splitter.ran_out_of_memory("a", 0, 4)
    assert size_after(splitter, 0, of_size=2) == 2
    splitter.ran_out_of_memory("a", 0, 1)
    assert size_after(splitter, 0, of_size=1) == 1


def test_a_batch_takes_no_more_workspace_than_is_free():
    assert BatchSplitter().batch_size("a", 0, Performance(1, 1, 8, 10, 5), waiting=8, free_bytes=36) == 3


def test_draining_refuses_new_work_and_finishes_the_old():
    engine = build_engine(placed=False)
    effects = settle_loads(engine, engine.handle(events.Arrived(0, "A"), 0.0), 0.0)
    engine.handle(events.Drain(), 0.0)
    (refused,) = of(Fail, engine.handle(events.Arrived(1, "A"), 0.0))
    assert "stopping" in refused.outcome.reason
    (started,) = of(StartBatch, effects)
    assert [complete.request for complete in of(Complete, engine.handle(answer(started.batch), 0.0))] == [0]


def test_cancelling_removes_a_queued_request_and_lets_a_running_one_finish_its_last_step():
    engine = build_engine(placed=False)
    effects = settle_loads(engine, engine.handle(events.Arrived(0, "A"), 0.0), 0.0)
    engine.handle(events.Arrived(1, "A"), 0.0)
    (gone,) = of(Fail, engine.handle(events.Cancelled(1), 0.0))
    assert gone.request == 1
    assert engine.handle(events.Cancelled(0), 0.0) == []
    (started,) = of(StartBatch, effects)
    (complete,) = of(Complete, engine.handle(answer(started.batch), 0.0))
    assert complete.outcome.verdict is Verdict.OK


def test_an_unknown_component_is_unknown_with_its_name():
    (fail,) = of(Fail, build_engine().handle(events.Arrived(0, "resistor"), 0.0))
    assert fail.outcome.verdict is Verdict.UNKNOWN
    assert "resistor" in fail.outcome.reason


def test_an_expert_larger_than_its_memory_is_refused_at_construction():
    with pytest.raises(MemoryExceeded, match="1 bytes wanted, 0 free"):
        build_engine(capacity=0)


def test_a_retry_is_not_forgotten_when_other_events_pass_its_moment():
    for event in (events.Arrived(1, "nobody"), events.Drain(), events.Cancelled(99)):
        engine = build_engine(placed=False, load_backoff_s=1.0)
        (load,) = of(StartLoad, engine.handle(events.Arrived(0, "A"), 0.0))
        engine.handle(events.LoadFailed(load.load, "I/O error", permanent=False), 0.0)
        assert of(StartLoad, engine.handle(event, 1.5)), event


def build_split_engine(policy="coserve", host=6, device=1, on_device="abcdef", **limits):
    """Experts a to f on a device of its own memory, and x0 to x9 on the CPU; one executor each."""
    on_device, on_cpu = list(on_device), [f"x{number}" for number in range(10)]
    routes = {name.upper(): (RouteStep(name, OK),) for name in on_device + on_cpu}
    performance = Performance(0.01, 0.02, 4, workspace_bytes=1)
    columns = {
        "gpu": {n: ExpertProfile(n, performance, Footprint(1), {SSD: 0.1, "host": 0.02}) for n in on_device},
        "cpu": {n: ExpertProfile(n, performance, Footprint(1), {SSD: 0.1}) for n in on_cpu},
    }
    executors = [ExecutorSpec(0, "gpu", "device"), ExecutorSpec(1, "cpu", "host")]
    pools = (PoolSpec("host", host, 8), PoolSpec("device", device, 8, cache="host"))
    graph = ExpertGraph(on_device + on_cpu, routes)
    return Engine(graph, PerformanceMatrix(columns), executors, PRESETS[policy], worlds.limits(pools, **limits))


def test_what_is_queued_is_staged_in_the_host_while_the_device_is_full():
    engine = build_split_engine(host=6, device=2)
    effects = []
    for number, component in enumerate("ABCDEF"):
        effects += engine.handle(events.Arrived(number, component), 0.0)
    effects = settle_loads(engine, effects, 0.0)
    host = next(pool for pool in engine.statistics().pools if pool.name == "host")
    assert set(host.resident) == set("abcdef")


def pool_named(engine, name):
    return next(pool for pool in engine.statistics().pools if pool.name == name)


def run_one(engine, number, component):
    """A request comes, and everything is answered until nothing is under way."""
    run_to_the_end(engine, engine.handle(events.Arrived(number, component), 0.0))


def test_a_busy_link_does_not_keep_a_later_group_from_one_that_is_idle():
    engine = build_split_engine(host=6, device=3, loads_in_flight=1)
    for number, component in enumerate("ABCD"):  # a leaves the device for d, and stays in the host
        run_one(engine, number, component)
    assert set(pool_named(engine, "device").resident) == set("bcd")
    effects = engine.handle(events.Arrived(10, "B"), 0.0)
    for number, component in enumerate("EFA", start=11):  # e is on its way from the SSD, and f waits for that
        effects += engine.handle(events.Arrived(number, component), 0.0)
    assert [(load.expert, load.source, load.pool) for load in of(StartLoad, effects)] == [
        ("e", SSD, "host"),
        ("a", "host", "device"),
    ]
    assert [evict.expert for evict in of(Evict, effects)] == ["c"]


def test_who_passes_one_that_waits_for_a_busy_link_takes_no_room_from_what_is_queued_later():
    engine = build_split_engine(host=7, device=3, on_device="abcdefg", loads_in_flight=1)
    for number, component in enumerate("ABCD"):
        run_one(engine, number, component)
    effects = []
    for number, component in enumerate("BEFG", start=10):
        effects += engine.handle(events.Arrived(number, component), 0.0)
    (to_host,) = of(StartLoad, effects)
    effects = engine.handle(events.Loaded(to_host.load), 0.0)
    to_device, next_to_host = of(StartLoad, effects)
    assert [(load.expert, load.pool) for load in (to_device, next_to_host)] == [("e", "device"), ("f", "host")]
    for number, component in enumerate("AD", start=14):
        assert of(StartLoad, engine.handle(events.Arrived(number, component), 0.0)) == []
    # g waits for the SSD, the host's link is idle now, and only d, which is queued behind a, could leave for a
    assert engine.handle(events.Loaded(to_device.load), 0.0) == []


def build_unhurried_engine(usage, **limits):
    """a, b and d lie in a memory for three; a runs, b is queued, and c, which is not there, behind it."""
    engine = build_engine(capacity=3, usage=dict.fromkeys("ef", 0.0) | usage, placed=False, **limits)
    for number, component in enumerate("ABD"):
        run_one(engine, number, component)
    effects = []
    for number, component in enumerate("ABC", start=10):
        effects += engine.handle(events.Arrived(number, component), 1.0)
    return engine, effects


B_FIRST = {"a": 0.3, "b": 0.1, "d": 0.2, "c": 0.5}
D_FIRST = {"a": 0.3, "b": 0.2, "d": 0.1, "c": 0.5}


def test_a_pinned_expert_stays_where_it_can_run_also_when_two_processors_share_a_memory():
    performance = Performance(0.01, 0.02, 4, workspace_bytes=1)
    row = ExpertProfile("a", performance, Footprint(1), {SSD: 0.1})
    profile = PerformanceMatrix({"gpu": {}, "cpu": {"a": row}})
    executors = [ExecutorSpec(0, "gpu", "host"), ExecutorSpec(1, "cpu", "host")]
    limits = worlds.limits((PoolSpec("host", 2, 8),), pinned=frozenset({"a"}))
    engine = Engine(ExpertGraph("a", {"A": (RouteStep("a", OK),)}), profile, executors, PRESETS["samba"], limits)
    assert of(StartLoad, engine.handle(events.Started(), 0.0)) == []  # Samba-CoE uses the first executor alone
    engine = Engine(ExpertGraph("a", {"A": (RouteStep("a", OK),)}), profile, executors, PRESETS["coserve"], limits)
    assert [load.expert for load in of(StartLoad, engine.handle(events.Started(), 0.0))] == ["a"]


def test_a_switch_is_a_load_that_a_request_had_to_wait_for():
    engine = build_engine(capacity=3, placed=False)
    effects = []
    for number, component in enumerate("AB"):
        effects += engine.handle(events.Arrived(number, component), 0.0)
    first, second = of(StartLoad, effects)
    engine.handle(events.Loaded(first.load), 0.0)  # a's head waited for it
    engine.handle(events.Loaded(second.load), 0.0)  # b's turn had not come: a runs
    assert engine.statistics().switches == 1


def test_a_short_queue_takes_free_room_only_while_it_has_other_work():
    engine, effects = build_unhurried_engine(D_FIRST, max_overtake_s=100.0, long_queue_s=100.0)
    (running,) = of(StartBatch, effects)
    assert of(StartLoad, effects) == []
    effects = engine.handle(answer(running.batch), 2.0)  # b runs now, and nothing else could
    assert [evict.expert for evict in of(Evict, effects)] == ["d"]
    assert [load.expert for load in of(StartLoad, effects)] == ["c"]


def test_a_short_queue_waits_for_what_runs_where_that_would_go_first():
    engine, effects = build_unhurried_engine(B_FIRST, max_overtake_s=100.0, long_queue_s=100.0)
    (running,) = of(StartBatch, effects)
    effects = engine.handle(answer(running.batch), 2.0)
    (running,) = of(StartBatch, effects)
    assert running.batch.expert == "b"
    assert of(StartLoad, effects) == []
    effects = engine.handle(answer(running.batch), 3.0)
    assert [evict.expert for evict in of(Evict, effects)] == ["b"]
    assert [load.expert for load in of(StartLoad, effects)] == ["c"]


def test_what_runs_is_not_waited_for_where_it_is_queued_again():
    engine, effects = build_unhurried_engine(B_FIRST, max_overtake_s=100.0, long_queue_s=100.0)
    (running,) = of(StartBatch, effects)
    (running,) = of(StartBatch, engine.handle(answer(running.batch), 2.0))
    assert running.batch.expert == "b"
    effects = engine.handle(events.Arrived(20, "B"), 2.5)  # b has work behind c, so that c takes free room only ...
    assert of(StartLoad, effects) == []
    effects = engine.handle(answer(running.batch), 3.0)  # ... until b runs again
    (running,) = of(StartBatch, effects)
    effects += engine.handle(answer(running.batch), 4.0)
    assert [load.expert for load in of(StartLoad, effects)] == ["c"]


def test_a_short_queue_takes_what_room_is_free_at_once():
    engine = build_engine(capacity=3, placed=False, max_overtake_s=100.0, long_queue_s=100.0)
    for number, component in enumerate("AB"):
        run_one(engine, number, component)
    effects = []
    for number, component in enumerate("ABC", start=10):
        effects += engine.handle(events.Arrived(number, component), 1.0)
    assert [load.expert for load in of(StartLoad, effects)] == ["c"]


def test_a_queue_longer_than_the_bound_loads_ahead():
    _, effects = build_unhurried_engine(D_FIRST, max_overtake_s=15.0, long_queue_s=100.0)
    assert [evict.expert for evict in of(Evict, effects)] == ["d"]
    assert [load.expert for load in of(StartLoad, effects)] == ["c"]


def test_a_head_that_has_waited_for_half_the_bound_has_no_time_left():
    for at_s, loaded in ((50.9, []), (51.0, ["c"])):
        engine, effects = build_unhurried_engine(B_FIRST, max_overtake_s=100.0, long_queue_s=100.0)
        (running,) = of(StartBatch, effects)
        effects = engine.handle(answer(running.batch), at_s)
        assert [load.expert for load in of(StartLoad, effects)] == loaded
