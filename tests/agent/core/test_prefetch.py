"""What is wished for next, on known queues: the heads, the groups behind them, and the initial placement."""

from __future__ import annotations

from agent.core.demand import Wish, demands, initial_placement, overdue, upcoming
from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, Performance, PoolSpec
from agent.core.pool import ModelPool
from agent.core.queue import ExecutorQueue

ROWS = {
    name: ExpertProfile(f"{name}@fp32", Performance(1.0, 2.0, 4, workspace_bytes=0), Footprint(1), {})
    for name in "abcdefgh"
}


def queue_of(executor, experts, opened_s=0.0, pool="host"):
    """A queue with a group of one request on each expert, opened a second apart, that takes 3 s."""
    queue = ExecutorQueue(ExecutorSpec(executor, "cpu", pool))
    for number, expert in enumerate(experts):
        queue.open(expert, ROWS[expert], 100 * executor + number, opened_s + number, load_s=0.0)
    return queue


def pool_of(*experts, name="host"):
    pool = ModelPool(PoolSpec(name, 10, 0))
    for expert in experts:
        pool.start_load(f"{expert}@fp32", expert, Footprint(1), pinned=False)
    return pool


def test_the_head_that_has_stood_longest_is_asked_for_first():
    queues = [queue_of(0, "ab", opened_s=5.0), queue_of(1, "", opened_s=0.0), queue_of(2, "cd", opened_s=1.0)]
    assert demands(queues) == [
        Wish(queues[2].spec, "c", ROWS["c"], since_s=1.0, starts_s=1.0),
        Wish(queues[0].spec, "a", ROWS["a"], since_s=5.0, starts_s=5.0),
    ]


def test_of_heads_as_old_as_one_another_that_of_the_lowest_executor_is_first():
    queues = [queue_of(2, "a"), queue_of(0, "b"), queue_of(1, "c")]
    assert [wish.expert for wish in demands(queues)] == ["b", "c", "a"]


def test_a_head_is_overdue_by_its_oldest_remaining_request_the_oldest_first():
    queues = [queue_of(number, expert, opened_s=float(number)) for number, expert in enumerate("abcd")]
    queues.append(queue_of(4, ""))
    queues[0].join(queues[0].head, 9, queued_s=2.5)
    queues[0].take(queues[0].head, 1)  # what remains of a's group is younger than the group
    assert overdue(queues, 2.5) == [
        Wish(queues[1].spec, "b", ROWS["b"], since_s=1.0, starts_s=1.0),
        Wish(queues[2].spec, "c", ROWS["c"], since_s=2.0, starts_s=2.0),
        Wish(queues[0].spec, "a", ROWS["a"], since_s=2.5, starts_s=0.0),
    ]
    tied = [queue_of(1, "a"), queue_of(0, "b")]
    assert [wish.expert for wish in overdue(tied, 0.0)] == ["b", "a"]
    assert overdue(tied, -0.5) == []


def test_what_is_upcoming_is_told_by_place_then_by_executor():
    queues = [queue_of(0, "abc"), queue_of(1, ""), queue_of(2, "defg")]
    wishes = list(upcoming(queues, 16, {"host": pool_of()}))
    assert [wish.expert for wish in wishes] == ["b", "e", "c", "f", "g"]
    assert wishes[0] == Wish(queues[0].spec, "b", ROWS["b"], since_s=1.0, starts_s=4.0)
    assert wishes[1] == Wish(queues[2].spec, "e", ROWS["e"], since_s=1.0, starts_s=4.0)


def test_no_more_groups_than_the_depth_are_looked_at_behind_each_head():
    queues = [queue_of(0, "abcd"), queue_of(1, "efgh")]
    assert [wish.expert for wish in upcoming(queues, 2, {"host": pool_of()})] == ["b", "f", "c", "g"]


def test_what_is_there_or_on_its_way_is_passed_over_and_not_what_stands_behind_it():
    queues = [queue_of(0, "abc"), queue_of(1, "def", pool="device")]
    pools = {"host": pool_of("b", "e"), "device": pool_of("f", name="device")}
    assert [wish.expert for wish in upcoming(queues, 16, pools)] == ["e", "c"]


def placed(usage, executors, able):
    runs_on = {processor: {name: ROWS[name] for name in names} for processor, names in able.items()}
    return [(spec.id, expert) for spec, expert in initial_placement(usage, executors, runs_on)]


THREE_POOLS = [
    ExecutorSpec(0, "gpu", "device"),
    ExecutorSpec(1, "gpu", "device"),
    ExecutorSpec(2, "cpu", "host"),
    ExecutorSpec(3, "npu", "npu"),
]


def test_experts_are_dealt_to_one_pool_after_the_other_in_descending_usage():
    usage = {"a": 0.1, "b": 0.5, "c": 0.3, "d": 0.3, "e": 0.6, "f": 0.05, "g": 0.01}
    dealt = placed(usage, THREE_POOLS, dict.fromkeys(("gpu", "cpu", "npu"), "abcdefg"))
    assert dealt == [(0, "e"), (2, "b"), (3, "c"), (0, "d"), (2, "a"), (3, "f"), (0, "g")]


def test_an_expert_goes_to_the_next_pool_that_can_run_it_and_the_turn_goes_on_from_there():
    usage = dict.fromkeys("abcdefg", 0.5)
    dealt = placed(usage, THREE_POOLS, {"gpu": "bcefg", "cpu": "abcfg", "npu": "abcfg"})
    assert dealt == [(2, "a"), (3, "b"), (0, "c"), (0, "e"), (2, "f"), (3, "g")]  # nobody can run d
