"""ExecutorQueue on known cases: what stands where, who runs next, and how long the queue says that it is."""

from __future__ import annotations

import pytest

from agent.core.performance import ExecutorSpec, ExpertProfile, Footprint, Performance
from agent.core.queue import ExecutorQueue


def row(expert, K_s=1.0, B_s=4.0):
    return ExpertProfile(f"{expert}@fp32", Performance(K_s, B_s, max_batch=8, workspace_bytes=0), Footprint(1), {})


A, B, C = row("a"), row("b", K_s=2.0, B_s=16.0), row("c", K_s=0.5, B_s=0.25)


@pytest.fixture
def queue():
    return ExecutorQueue(ExecutorSpec(3, "cpu", "host"))


def standing(queue):
    """What stands in the queue, read in both directions: a link that is wrong in one of them shows."""
    forth = list(queue.groups())
    back = []
    group = queue.tail
    while group is not None:
        back.insert(0, group)
        group = group.previous
    assert forth == back
    orders = [group.order for group in forth]
    assert orders == sorted(set(orders))
    assert queue.request_count == sum(len(group.requests) for group in forth)
    return [(group.expert, tuple(group.requests)) for group in forth]


def test_a_new_queue_holds_nothing_and_takes_no_time(queue):
    assert standing(queue) == []
    assert (queue.head, queue.tail, queue.running_until_s, queue.is_overtaken) == (None, None, None, False)
    assert (queue.spec.id, queue.request_count, queue.length_s(5.0), set(queue.awaited)) == (3, 0, 0.0, set())
    assert (queue.first_group("a"), queue.last_group("a")) == (None, None)


def test_a_group_opens_at_the_tail_and_costs_its_load_its_b_and_a_k(queue):
    group = queue.open("a", A, 7, now=3.0, load_s=10.0)
    assert (group.expert, group.profile, group.alone, group.order) == ("a", A, False, 0)
    assert (group.opened_s, group.starts_s, group.fixed_s) == (3.0, 3.0, 14.0)
    assert (queue.head, queue.tail) == (group, group)
    assert queue.length_s(3.0) == 15.0
    second = queue.open("b", B, 8, now=4.0, load_s=0.0)
    assert (second.opened_s, second.starts_s, second.fixed_s, second.order) == (4.0, 19.0, 16.0, 1)
    assert standing(queue) == [("a", (7,)), ("b", (8,))]
    assert queue.length_s(4.0) == 15.0 + 18.0


def test_each_request_that_joins_adds_its_experts_k(queue):
    group = queue.open("a", A, 0, now=0.0, load_s=0.0)
    queue.join(group, 1, queued_s=0.0)
    queue.join(queue.open("b", B, 2, now=0.0, load_s=0.0), 3, queued_s=0.0)
    assert standing(queue) == [("a", (0, 1)), ("b", (2, 3))]
    assert queue.length_s(0.0) == (4.0 + 2 * 1.0) + (16.0 + 2 * 2.0)


def test_what_runs_counts_until_it_should_have_ended_and_never_less_than_nothing(queue):
    queue.open("a", A, 0, now=0.0, load_s=0.0)
    queue.running_until_s = 7.0
    assert [queue.length_s(now) for now in (5.0, 7.0, 9.0)] == [7.0, 5.0, 5.0]


def test_a_group_is_predicted_to_start_after_what_runs_and_what_stands_before_it(queue):
    queue.running_until_s = 6.0
    assert queue.open("a", A, 0, now=4.0, load_s=0.0).starts_s == 6.0
    assert queue.open("b", B, 1, now=4.0, load_s=0.0).starts_s == 6.0 + 5.0


def test_no_group_is_predicted_to_start_before_the_one_in_front_of_it(queue):
    first = queue.open("a", A, 0, now=0.0, load_s=0.0)
    for request in range(1, 30):
        queue.join(first, request, queued_s=0.0)
    assert queue.open("c", C, 30, now=0.0, load_s=0.0).starts_s == 34.0
    for request in range(1, 30):
        queue.remove(first, request)
    assert queue.length_s(0.0) == 5.0 + 0.75
    assert queue.open("b", B, 31, now=0.0, load_s=0.0).starts_s == 34.0


def test_the_first_and_the_last_group_of_an_expert_are_told_apart(queue):
    groups = [queue.open(expert, row(expert), number, 0.0, 0.0) for number, expert in enumerate("abaca")]
    assert queue.first_group("a") is groups[0]
    assert queue.last_group("a") is groups[4]
    assert queue.first_group("c") is queue.last_group("c") is groups[3]
    assert set(queue.awaited) == {"a", "b", "c"}


def test_the_first_requests_leave_to_run_and_the_rest_keeps_its_place(queue):
    group = queue.open("a", A, 0, now=0.0, load_s=0.0)
    for request in (1, 2):
        queue.join(group, request, queued_s=0.0)
    queue.open("b", B, 3, now=0.0, load_s=0.0)
    assert queue.take(group, 2) == (0, 1)
    assert standing(queue) == [("a", (2,)), ("b", (3,))]


def test_a_taken_groups_fixed_cost_leaves_the_queue_with_its_first_batch(queue):
    """B and the switch are paid once: by the batch that runs, not by the requests that wait for the next one."""
    group = queue.open("b", B, 0, now=0.0, load_s=10.0)
    for request in range(1, 5):
        queue.join(group, request, queued_s=0.0)
    assert queue.length_s(0.0) == 26.0 + 5 * 2.0
    queue.take(group, 2)
    assert queue.length_s(0.0) == 3 * 2.0
    queue.take(group, 2)
    assert queue.length_s(0.0) == 2.0
    assert group.fixed_s == 0.0


def test_a_group_that_was_taken_whole_leaves_its_neighbours_side_by_side(queue):
    groups = [queue.open(expert, row(expert), number, 0.0, 0.0) for number, expert in enumerate("abc")]
    assert queue.take(groups[1], 1) == (1,)
    assert standing(queue) == [("a", (0,)), ("c", (2,))]
    assert set(queue.awaited) == {"a", "c"}
    assert queue.length_s(0.0) == 5.0 + 5.0
    queue.take(groups[0], 1)
    assert standing(queue) == [("c", (2,))]
    queue.take(groups[2], 1)
    assert standing(queue) == []
    assert set(queue.awaited) == set()


def test_an_expert_is_awaited_until_its_last_group_leaves(queue):
    groups = [queue.open(expert, row(expert), number, 0.0, 0.0) for number, expert in enumerate("aba")]
    queue.take(groups[0], 1)
    assert queue.first_group("a") is queue.last_group("a") is groups[2]
    queue.take(groups[2], 1)
    assert queue.first_group("a") is None
    assert standing(queue) == [("b", (1,))]


def test_a_request_that_is_withdrawn_takes_its_k_along(queue):
    group = queue.open("b", B, 0, now=0.0, load_s=10.0)
    queue.join(group, 1, queued_s=0.0)
    queue.join(group, 2, queued_s=0.0)
    queue.remove(group, 1)
    assert standing(queue) == [("b", (0, 2))]
    assert queue.length_s(0.0) == 26.0 + 2 * 2.0


def test_the_last_request_of_a_group_that_is_withdrawn_takes_the_fixed_cost_along(queue):
    queue.open("a", A, 0, now=0.0, load_s=0.0)
    group = queue.open("b", B, 1, now=0.0, load_s=10.0)
    queue.remove(group, 1)
    assert standing(queue) == [("a", (0,))]
    assert queue.length_s(0.0) == 5.0


def test_no_rounding_error_outlives_an_empty_queue(queue):
    uneven = row("a", K_s=0.1, B_s=0.0)
    group = queue.open("a", uneven, 0, now=0.0, load_s=0.0)
    for request in (1, 2):
        queue.join(group, request, queued_s=0.0)
    for _ in range(3):
        queue.take(group, 1)
    assert queue.length_s(0.0) == 0.0


def test_what_failed_is_given_back_in_front_of_all_others_to_run_alone(queue):
    later = queue.open("a", A, 5, now=0.0, load_s=0.0)
    group = queue.give_back("b", B, {8: 0.5, 9: 1.5}, now=2.0)
    assert (group.expert, group.profile, group.alone, group.order) == ("b", B, True, -1)
    assert (group.opened_s, group.starts_s, group.fixed_s) == (2.0, 2.0, 16.0)
    assert (queue.head, queue.tail) == (group, later)
    assert standing(queue) == [("b", (8, 9)), ("a", (5,))]
    assert queue.length_s(2.0) == (16.0 + 2 * 2.0) + 5.0


def test_a_group_is_as_old_as_its_oldest_remaining_request(queue):
    group = queue.open("a", A, 0, now=1.0, load_s=0.0)
    queue.join(group, 1, queued_s=2.0)
    queue.join(group, 2, queued_s=4.0)
    assert (group.opened_s, group.oldest_s) == (1.0, 1.0)
    queue.take(group, 1)
    assert (group.opened_s, group.oldest_s) == (1.0, 2.0)
    queue.remove(group, 1)
    assert (group.opened_s, group.oldest_s) == (1.0, 4.0)


def test_what_is_given_back_is_as_old_as_it_was(queue):
    given = queue.give_back("a", A, {1: 0.5, 2: 3.0}, now=7.0)
    assert (given.opened_s, given.oldest_s, dict(given.requests)) == (7.0, 0.5, {1: 0.5, 2: 3.0})


def test_what_is_given_back_to_an_empty_queue_is_head_and_tail(queue):
    group = queue.give_back("b", B, {8: 0.5, 9: 1.5}, now=2.0)
    assert (queue.head, queue.tail, group.order) == (group, group, 0)
    assert standing(queue) == [("b", (8, 9))]


def test_what_is_given_back_is_the_first_group_of_its_expert(queue):
    waiting = queue.open("a", A, 5, now=0.0, load_s=0.0)
    given = queue.give_back("a", A, {1: 0.0}, now=0.0)
    assert queue.first_group("a") is given
    assert queue.last_group("a") is waiting
    assert queue.take(given, 1) == (1,)
    assert queue.first_group("a") is waiting


def test_tokens_count_for_those_who_have_any(queue):
    group = queue.open("a", A, 0, now=0.0, load_s=0.0, tokens_s=8.0)
    queue.join(group, 1, queued_s=0.0)
    queue.join(group, 2, queued_s=0.0, tokens_s=2.0)
    assert queue.length_s(0.0) == 4.0 + 3 * 1.0 + 10.0
    queue.take(group, 1)
    assert queue.length_s(0.0) == 2 * 1.0 + 2.0
    queue.remove(group, 2)
    assert queue.length_s(0.0) == 1.0


def test_what_is_left_after_a_quantum_counts_in_full(queue):
    queue.running_until_s, queue.unfinished_s = 7.0, 3.0
    assert [queue.length_s(now) for now in (5.0, 9.0)] == [5.0, 3.0]


def test_those_who_go_on_stand_at_the_tail_and_nobody_joins_them(queue):
    queue.open("b", B, 0, now=0.0, load_s=0.0)
    group = queue.go_on("a", A, {1: 2.0, 2: 0.5}, now=3.0)
    assert standing(queue) == [("b", (0,)), ("a", (1, 2))]
    assert (group.is_ongoing, group.opened_s, group.starts_s, group.oldest_s) == (True, 3.0, 3.0, 3.0)
    assert queue.length_s(3.0) == (16.0 + 2.0) + (4.0 + 2 * 1.0 + 2.5)
    assert (queue.first_group("a"), queue.first_to_begin("a"), queue.last_group("a")) == (group, None, None)
    assert set(queue.awaited) == {"a", "b"}
    queue.take(group, 2)
    assert (queue.ongoing, set(queue.awaited), queue.length_s(3.0)) == ({}, {"b"}, 18.0)


def test_there_is_one_ongoing_group_of_a_copy_and_each_quantum_takes_it_to_the_tail(queue):
    group = queue.go_on("a", A, {0: 0.0, 1: 0.0, 2: 1.0}, now=3.0)
    queue.open("b", B, 3, now=4.0, load_s=0.0)
    assert queue.take(group, 2) == (0, 1)
    assert queue.go_on("a", A, {1: 0.5}, now=5.0) is group
    assert standing(queue) == [("b", (3,)), ("a", (2, 1))]
    assert (group.opened_s, group.oldest_s, group.newest_s) == (5.0, 3.0, 5.0)
    assert queue.length_s(5.0) == 18.0 + (4.0 + 2 * 1.0 + 1.5)


def test_the_front_is_the_first_group_that_is_not_passed_over(queue):
    first, second = (queue.open(expert, row(expert), number, 0.0, 0.0) for number, expert in enumerate("ab"))
    assert queue.front is first
    first.is_passed_over = True
    assert queue.front is second
    second.is_passed_over = True
    assert queue.front is None


def test_groups_whose_requests_take_leases_are_known_until_they_have_begun(queue):
    text = ExpertProfile("t@fp32", Performance(1.0, 1.0, 8, 0, lease_bytes=1), Footprint(1), {})
    group = queue.open("t", text, 0, now=0.0, load_s=0.0)
    queue.open("a", A, 1, now=0.0, load_s=0.0)
    assert list(queue.begins) == [group]
    queue.take(group, 1)
    assert not queue.begins
    queue.go_on("t", text, {0: 0.0}, now=1.0)
    assert not queue.begins
    given = queue.give_back("t", text, {2: 0.0, 3: 0.5}, now=2.0, tokens_s={2: 1.0, 3: 0.0})
    assert (list(queue.begins), queue.head, given.alone) == ([given], given, True)
