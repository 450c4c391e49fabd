"""Scheduler on known cases: executor and group of a request, and the candidates of each decision."""

import pytest

from agent.core.effects import Assigned, AssignmentCandidate
from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, Limits, Performance, PerformanceMatrix
from agent.core.policy import PRESETS
from agent.core.scheduler import Placing, Scheduler, shortest_makespan

LOAD_S = {"host": 10.0, "device": 1.0}


def row(expert, K_s, B_s):
    return ExpertProfile(f"{expert}@fp32", Performance(K_s, B_s, 8, workspace_bytes=0), Footprint(1), {})


CPU = {"a": row("a", 4.0, 2.0), "b": row("b", 4.0, 2.0), "c": row("c", 4.0, 2.0)}
GPU = {"a": row("a", 0.5, 0.25), "b": row("b", 0.5, 0.25)}  # c runs on the CPU alone


def build(policy="coserve", processors=("cpu", "gpu"), max_overtake_s=5.0):
    """A CPU executor (K 4 s, B 2 s, a load 10 s) and one of a GPU (K 0.5 s, B 0.25 s, a load 1 s)."""
    executors = [
        ExecutorSpec(number, processor, "device" if processor == "gpu" else "host")
        for number, processor in enumerate(processors)
    ]
    profile = PerformanceMatrix({"cpu": CPU, "gpu": GPU})
    return Scheduler(
        executors, profile, PRESETS[policy], Limits((), max_overtake_s), lambda spec, row: LOAD_S[spec.pool]
    )


def test_placement_reports_every_weighed_executor():
    scheduler = build()
    group, assigned = scheduler.place(Placing(7, "a"), 0.0)
    weighed = (AssignmentCandidate(0, 0.0, 16.0), AssignmentCandidate(1, 0.0, 1.75))
    assert assigned == Assigned(7, "a", executor=1, joined=False, candidates=weighed)
    assert group is scheduler.queues[1].head
    assert (tuple(group.requests), group.profile, group.fixed_s) == ((7,), GPU["a"], 1.25)
    group, assigned = scheduler.place(Placing(8, "a"), 0.0)
    weighed = (AssignmentCandidate(0, 0.0, 16.0), AssignmentCandidate(1, 1.75, 0.5))
    assert assigned == Assigned(8, "a", executor=1, joined=True, candidates=weighed)
    assert tuple(group.requests) == (7, 8)
    assert scheduler.queues[1].length_s(0.0) == 2.25
    scheduler.place(Placing(9, "a"), 0.5)
    assert group.requests == {7: 0.0, 8: 0.0, 9: 0.5}


def test_only_executors_that_can_run_the_expert_are_candidates():
    scheduler = build()
    _, assigned = scheduler.place(Placing(0, "c"), 0.0)
    assert assigned.candidates == (AssignmentCandidate(0, 0.0, 16.0),)
    assert build(processors=("gpu",)).place(Placing(0, "c"), 0.0) is None


def test_group_of_an_expert_already_awaited_is_costed_without_a_switch():
    scheduler = build(policy="none", processors=("cpu",))  # first come, first served
    for number, expert in enumerate("ab"):
        scheduler.place(Placing(number, expert), 0.0)
    group, assigned = scheduler.place(Placing(2, "a"), 0.0)
    assert assigned == Assigned(2, "a", 0, joined=False, candidates=(AssignmentCandidate(0, 32.0, 6.0),))
    assert group.fixed_s == 2.0
    assert [each.expert for each in scheduler.queues[0].groups()] == ["a", "b", "a"]


def test_round_robin_ignores_queue_lengths():
    scheduler = build(policy="none", processors=("cpu", "gpu", "gpu"))
    taken = [scheduler.place(Placing(number, "a"), 0.0)[1].executor for number in range(5)]
    assert taken == [0, 1, 2, 0, 1]


def test_policy_of_one_executor_has_one_queue():
    scheduler = build(policy="samba", processors=("gpu", "cpu"))
    assert [queue.spec.id for queue in scheduler.queues] == [0]
    assert [scheduler.place(Placing(number, "a"), 0.0)[1].executor for number in range(3)] == [0, 0, 0]


def test_no_request_joins_a_group_given_back_to_run_alone():
    scheduler = build(processors=("cpu",))
    scheduler.queues[0].give_back("a", CPU["a"], {1: 0.0, 2: 0.0}, now=0.0)
    group, assigned = scheduler.place(Placing(3, "a"), 0.0)
    assert not assigned.joined
    assert [tuple(each.requests) for each in scheduler.queues[0].groups()] == [(1, 2), (3,)]
    assert group.fixed_s == 2.0


@pytest.mark.parametrize(("policy", "joins"), [("none", False), ("em-ra", True), ("paper", True), ("coserve", True)])
def test_only_arranging_policies_let_a_request_join_ahead_of_others(policy, joins):
    scheduler = build(policy, processors=("cpu",))
    for number, expert in enumerate("ab"):
        scheduler.place(Placing(number, expert), 0.0)
    assert scheduler.place(Placing(2, "a"), 4.9)[1].joined is joins


def test_overtaking_bound_counts_from_the_opening_of_the_next_group():
    scheduler = build(processors=("cpu",), max_overtake_s=5.0)
    for number, (expert, at_s) in enumerate([("a", 0.0), ("b", 3.0), ("c", 3.5)]):
        scheduler.place(Placing(number, expert), at_s)
    assert scheduler.place(Placing(3, "a"), 7.75)[1].joined
    assert not scheduler.place(Placing(4, "a"), 8.0)[1].joined


def test_tail_group_may_always_grow():
    scheduler = build(processors=("cpu",), max_overtake_s=5.0)
    scheduler.place(Placing(0, "a"), 0.0)
    assert scheduler.place(Placing(1, "a"), 1000.0)[1].joined


@pytest.mark.parametrize(
    ("queues", "chosen"),
    [
        ([(5.0, 1.0), (4.0, 1.0), (0.0, 3.0)], 1),  # two leave the longest as it is: the smallest addition wins
        ([(3.0, 2.0), (1.0, 3.0), (2.0, 1.5)], 2),  # none does: the shortest end wins
        ([(0.25, 0.5), (0.5, 0.125)], 1),  # nor here: 0.75 s against 0.625 s
        ([(2.0, 1.0), (2.0, 1.0)], 0),
        ([(4.0, 9.0)], 0),
    ],
)
def test_shortest_makespan_decides_and_then_the_smallest_addition(queues, chosen):
    candidates = [AssignmentCandidate(number, *queue) for number, queue in enumerate(queues)]
    assert shortest_makespan(candidates) == chosen


def test_full_tie_goes_to_the_lowest_executor():
    assert shortest_makespan([AssignmentCandidate(4, 1.0, 1.0), AssignmentCandidate(2, 1.0, 1.0)]) == 1
