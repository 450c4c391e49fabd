"""Who comes into a memory, from where, and who leaves for it: the Engine's claims to room, one decision after another.

Executor 0 alone runs experts a to h, executor 1 alone u to z: so a test says which queue a request goes to.
"""

from __future__ import annotations

import pytest

from agent.core import events
from agent.core.effects import Evict, EvictionDecision
from agent.core.eviction import EvictionCandidate
from agent.core.performance import (
    Footprint,
    PoolSpec,
    SharedTensors,
)
from tests.agent.core.worlds import Line, of, split, unified

TRUNK = SharedTensors("trunk", 5)


# -- demand: the head of a queue --


def test_a_head_takes_the_room_of_what_is_least_wanted():
    line = unified(host=3, usage={"a": 0.5, "b": 0.25, "c": 0.75})
    line.bring("a", "b", "c")
    assert line.ask("d") == ["evict b host stage 2", "load d ssd>host"]


def test_a_claim_leaves_what_stands_at_another_queues_head():
    line = unified(host=2)
    line.bring("a")
    line.run("b")
    line.ask("a")  # the left queue's head, resident, waits for b to end
    assert line.ask("x") == []
    assert line.resident() == "ab"
    assert line.finished("b") == ["run a", "evict b host stage 2", "load x ssd>host"]


def test_a_claim_may_take_what_stands_further_back_in_another_queue():
    line = unified(host=3)
    line.bring("a", "c")
    line.run("b")
    line.ask("c")
    line.ask("a")
    assert line.ask("x") == ["evict a host stage 3", "load x ssd>host"]


def test_without_overlapping_a_head_is_loaded_when_its_executor_is_idle():
    line = unified(policy="paper")
    line.run("a")
    assert line.ask("b") == []
    assert line.ask("x") == ["load x ssd>host"]
    assert line.finished("a") == ["load b ssd>host"]
    assert line.ask("c") == []
    assert line.loaded("b") == ["run b"]


def test_without_overlapping_nobody_runs_before_the_head():
    line = unified(policy="paper")
    line.bring("a")
    line.ask("b")
    assert line.ask("a") == []


def test_a_head_that_finds_no_room_keeps_none_from_what_fits_beside_until_it_is_overdue():
    line = unified(host=6, sizes={"b": 6}, max_overtake_s=5.0)
    line.run("a")
    assert line.ask("b", at=1.0) == []  # not while a runs
    assert line.ask("x", at=2.0) == ["load x ssd>host"]  # another queue's head
    assert line.ask("c", at=2.0) == ["load c ssd>host"]  # a later group, into free room
    line.loaded("c", at=3.0)
    line.loaded("x", at=3.0)
    line.ask("y", at=3.0)
    assert line.ask("d", at=7.0) == ["evict c host stage 3"]  # b gathers its room now, and d has to wait


def test_a_later_group_takes_free_room_only_where_a_head_lacks_some():
    line = unified(host=3, sizes={"b": 3})
    line.bring("d", "e")
    line.run("a")
    line.ask("b")
    assert line.ask("c") == []
    line = unified(host=3)
    line.bring("d", "e")
    line.run("a")
    line.ask("b")
    assert line.ask("c") == ["evict e host stage 2", "load c ssd>host"]


# -- overdue: a head for longer than the bound --


def test_an_overdue_head_takes_the_room_of_a_younger_head_and_not_that_of_an_older_one():
    for head_since_s, effects in ((2.0, ["evict a host stage 3", "load x ssd>host"]), (1.0, ["run a"])):
        line = unified(host=1, max_overtake_s=5.0)
        line.run("a")
        line.ask("x", at=1.0)
        line.ask("a", at=head_since_s)
        assert line.finished("a", at=6.0) == effects


def test_a_head_is_overdue_from_the_bound_on():
    for at_s, effects in ((5.875, ["run a"]), (6.0, ["evict a host stage 3", "load x ssd>host"])):
        line = unified(host=1, max_overtake_s=5.0)
        line.run("a")
        line.ask("x", at=1.0)
        line.ask("a", at=2.0)
        assert line.finished("a", at=at_s) == effects


def test_an_overdue_head_gathers_its_room_bit_by_bit_and_nobody_younger_takes_it():
    line = unified(host=4, sizes={"x": 3, "b": 2}, max_overtake_s=5.0)
    line.bring("a")
    line.run("b")
    assert line.ask("x", at=0.0) == []  # a's byte would not be enough: it may stay
    assert line.handle(events.Tick(), at=5.0) == ["evict a host stage 2"]
    assert line.ask("c", at=5.0) == []  # a byte would do
    assert line.finished("b", at=6.0) == ["evict b host stage 2", "load x ssd>host", "load c ssd>host"]


def test_an_overdue_head_keeps_its_place_on_the_link_until_it_has_room():
    processors = {"left": ("ab", "one"), "right": ("uv", "two"), "other": ("yz", "three")}
    pools = tuple(PoolSpec(name, 1, 16) for name in ("one", "two", "three"))

    def line(loads_in_flight):
        made = Line(pools, processors, loads_in_flight=loads_in_flight)
        for expert in "auy":
            made.run(expert)
        made.ask("b", at=0.0)
        made.ask("v", at=0.0)
        made.ask("z", at=4.0)
        made.handle(events.Tick(), at=6.0)
        return made

    # b and v are overdue and wait for a and u to end, each with a place of the SSD's link
    assert line(loads_in_flight=2).finished("y", at=6.0) == []
    assert line(loads_in_flight=3).finished("y", at=6.0) == ["evict y three stage 2", "load z ssd>three"]
    assert line(loads_in_flight=2).finished("a", at=6.0) == ["evict a one stage 2", "load b ssd>one"]


def test_an_overdue_heads_place_is_kept_on_the_link_that_it_needs():
    line = split(device=1, loads_in_flight=1, max_overtake_s=5.0)
    line.run("a")
    line.ask("b", at=0.0)
    line.loaded("b", at=1.0)  # into the host: the device is in use
    line.run("x")
    assert line.ask("y", at=1.0) == ["load y ssd>host"]
    line.loaded("y")
    line.handle(events.Tick(), at=6.0)
    line.finished("x", at=6.0)
    assert line.ask("z", at=6.0) == ["load z ssd>host"]  # b waits for the host's link, not for the SSD's


# -- prefetch: the groups behind the head --


def test_a_later_group_takes_the_room_of_what_is_not_queued():
    line = unified(host=3)
    line.bring("b")
    line.run("a")
    assert line.ask("c") == ["load c ssd>host"]
    assert line.ask("d") == ["evict b host stage 2", "load d ssd>host"]


@pytest.mark.parametrize(
    ("queued", "effects"), [("cdb", ["evict b host stage 3", "load d ssd>host"]), ("cbd", []), ("bcd", [])]
)
def test_a_later_group_takes_the_room_of_what_is_used_after_it_and_not_of_what_is_used_before(queued, effects):
    line = unified(host=3, loads_in_flight=1)
    line.bring("b")
    line.run("a")
    for expert in queued:  # d has to wait for the link: c is on its way
        line.ask(expert)
    assert line.loaded("c") == effects


def test_a_later_group_leaves_what_is_used_at_the_same_time():
    line = unified(host=5, loads_in_flight=3)
    line.bring("u")
    line.run("a")
    line.run("v")
    for expert in "wu":
        line.ask(expert)
    for expert in "cd":
        line.ask(expert)
    assert line.loaded("w") == []  # d is predicted when u is: 13 s after what runs now
    assert line.resident() == "uavw"


def test_only_so_many_groups_are_loaded_ahead():
    line = unified(host=9, prefetch_groups=2, loads_in_flight=9)
    line.run("a")
    loads = [each for expert in "bcdef" for each in line.ask(expert)]
    assert loads == ["load b ssd>host", "load c ssd>host", "load d ssd>host"]


def test_only_so_many_loads_are_under_way_from_one_source():
    line = unified(host=9, loads_in_flight=2)
    assert [line.ask(expert) for expert in "abc"] == [["load a ssd>host"], ["load b ssd>host"], []]
    assert line.loaded("a") == ["run a", "load c ssd>host"]
    assert line.ask("d") == []
    assert line.load_failed("b") == ["load d ssd>host"]
    assert line.loaded("c") == []


# -- who leaves, and what is told of it --


def test_an_eviction_tells_for_whom_how_many_bytes_short_and_who_was_weighed():
    line = unified(host=4, policy="samba", sizes={"b": 2, "d": 2}, usage={"a": 0.5})
    line.bring("a", "b", "a", "c")
    line.ask("d")
    assert line.loads["d"].size_bytes == 2
    weighed = (
        EvictionCandidate("b@fp32", "b", Footprint(2), 0.0, None, False, 3, 4),
        EvictionCandidate("a@fp32", "a", Footprint(1), 0.5, None, False, 1, 5),
        EvictionCandidate("c@fp32", "c", Footprint(1), 0.0, None, False, 6, 7),
    )
    decision = EvictionDecision("d@fp32", 2, weighed)
    assert of(Evict, line.effects) == [Evict("b", "b@fp32", "host", 2, 0, decision)]


def test_an_expert_of_unknown_usage_counts_as_never_used():
    line = unified(host=2, usage={"a": 0.0625})
    line.bring("a", "b")
    assert line.ask("c") == ["evict b host stage 2", "load c ssd>host"]


def preliminary_line(policy="paper", **changes):
    """d comes before e on a route; e is the most used of all that may leave."""
    return unified(policy=policy, usage={"e": 0.9, "a": 0.1}, routes={"d": "de"}, **changes)


def test_a_subsequent_expert_whose_preliminary_one_is_nowhere_leaves_first():
    line = preliminary_line(host=2)
    line.bring("a", "e")
    assert line.ask("x") == ["evict e host stage 1", "load x ssd>host"]


def test_a_subsequent_expert_whose_preliminary_one_is_resident_leaves_by_its_usage():
    line = preliminary_line(host=3)
    line.bring("a", "e", "d")
    line.run("d")
    assert line.ask("x") == ["evict a host stage 2", "load x ssd>host"]


def test_a_subsequent_expert_whose_preliminary_one_waits_in_a_queue_leaves_by_its_usage():
    line = preliminary_line(host=3)
    line.bring("a", "e")
    line.run("b")
    line.ask("d")  # not loaded: b runs
    assert line.ask("x") == ["evict a host stage 2", "load x ssd>host"]


def test_a_preliminary_expert_that_left_or_that_did_not_come_is_nowhere():
    line = preliminary_line(host=3)
    line.bring("d", "a", "e")
    line.ask("b")  # evicts d, of no known usage
    assert line.resident() == "ae"
    line.loaded("b")
    assert line.ask("x") == ["evict e host stage 1", "load x ssd>host"]
    line = preliminary_line(host=3, load_attempts=1)
    line.bring("a", "e")
    line.ask("d")
    line.load_failed("d")  # given up: in quarantine, and its request with it
    line.run("x")
    assert line.ask("b") == ["evict e host stage 1", "load b ssd>host"]


def test_a_preliminary_expert_that_came_at_the_second_try_is_there():
    line = preliminary_line(host=3, load_backoff_s=1.0)
    line.bring("a", "e")
    line.ask("d")
    line.load_failed("d")
    line.handle(events.Tick(), at=1.0)
    line.loaded("d")
    assert line.ask("x") == ["evict a host stage 2", "load x ssd>host"]


def test_a_preliminary_expert_that_left_one_of_two_memories_is_still_somewhere():
    line = split(host=1, device=2, policy="paper", usage={"e": 0.9, "d": 0.5, "a": 0.1}, routes={"d": "de"})
    line.bring("d")  # a copy in each memory
    assert (line.resident("host"), line.resident("device")) == ("d", "d")
    line.bring("x")
    assert (line.resident("host"), line.resident("device")) == ("x", "d")
    line.bring("e")
    assert line.ask("a") == ["evict d device stage 2", "load a ssd>device"]


def test_shared_parts_count_once_and_stay_for_the_newcomer_that_needs_them():
    line = unified(
        host=9,
        shared=dict.fromkeys("abd", (TRUNK,)),
        sizes={"a": 1, "b": 1, "c": 2, "d": 2},
        usage={"a": 0.1, "b": 0.2, "c": 0.3},
    )
    line.bring("a", "b", "c")  # 5 + 1 + 1 + 2 bytes
    assert line.ask("d") == ["evict a host stage 2", "evict b host stage 2", "load d ssd>host"]
    line = unified(
        host=9, shared=dict.fromkeys("ab", (TRUNK,)), sizes={"c": 2, "d": 3}, usage={"a": 0.1, "b": 0.2, "c": 0.3}
    )
    line.bring("a", "b", "c")
    assert line.ask("d") == ["evict a host stage 2", "evict b host stage 2", "load d ssd>host"]
    assert line.pools()[0].used_bytes == 5


# -- failed loads --


def away_until(line, until_s):
    """The file of "a" is away; it is looked for whenever the Engine asks. Everything that was told."""
    told = []
    while True:
        told += line.load_failed("a", is_away=True)
        if line.engine.next_wakeup_s() > until_s:
            return told
        told += line.handle(events.Tick(), at=line.engine.next_wakeup_s())


@pytest.mark.parametrize("make", [lambda **limits: unified(**limits), lambda **limits: split(**limits)])
def test_a_file_that_is_away_is_waited_for_and_costs_nobody_anything(make):
    line = make(away_s=30.0, longest_away_pause_s=4.0)
    for _ in range(2):  # the second absence, long after, is waited for as the first was
        line.ask("a")
        began_s = line.now
        told = away_until(line, began_s + 20.0)
        assert {each.split()[0] for each in told} <= {"load"}
        assert line.engine.next_wakeup_s() - line.now <= 4.0
        line.handle(events.Tick(), at=line.engine.next_wakeup_s())
        line.run("a")
        line.finished("a")
        assert line.engine.statistics().failed == 0
        line.handle(events.Unwanted("a"), at=line.now + 1000.0)


def test_a_file_that_stays_away_puts_its_expert_on_probation_which_ends_soon_after_it_is_back():
    line = unified(away_s=30.0, longest_away_pause_s=4.0)
    line.ask("a", at=100.0)
    away_until(line, 145.0)
    statistics = line.engine.statistics()
    assert (statistics.failed, list(statistics.on_probation), statistics.quarantined) == (1, ["a"], {})
    assert line.engine.next_wakeup_s() - line.now <= 4.0
    line.handle(events.Tick(), at=line.engine.next_wakeup_s())
    line.loaded("a")
    assert line.engine.statistics().on_probation == {}


def test_whatever_happens_at_the_moment_of_a_retry_brings_it_about():
    line = unified(load_backoff_s=1.0)
    line.ask("a")
    line.load_failed("a")
    assert line.handle(events.Cancelled(99), at=0.5) == []
    assert line.handle(events.Cancelled(99), at=1.0) == ["load a ssd>host"]


def test_of_several_failed_loads_the_next_one_is_waited_for():
    line = unified(load_backoff_s=1.0)
    line.ask("a")
    line.ask("x")
    line.load_failed("x", at=0.0)
    line.load_failed("a", at=0.5)
    assert line.engine.next_wakeup_s() == 1.0
    line.handle(events.Tick(), at=1.0)
    assert line.engine.next_wakeup_s() == 1.5


def test_weights_that_fail_on_their_way_to_the_device_leave_the_host_too():
    line = split()
    line.ask("a")
    assert line.loaded("a") == ["load a host>device"]
    broken = events.LoadFailed(line.loads["a"].load, "wrong sha256", permanent=True)
    assert line.handle(broken) == ["evict a host stage 0"]


def test_a_quarantined_copy_that_a_failed_load_was_copying_leaves_then():
    line = split()
    line.ask("a")
    line.loaded("a")  # on to the device
    assert line.handle(events.Quarantined("a", "bad")) == []
    assert line.load_failed("a") == ["evict a host stage 0"]


# -- what is pinned, and what is placed before the first request --


def test_a_pinned_experts_failed_load_is_tried_again_though_nobody_asks_for_it():
    line = unified(policy="samba", pinned=frozenset("a"), load_backoff_s=1.0)
    assert line.handle(events.Started()) == ["load a ssd>host"]
    assert line.load_failed("a") == []
    assert line.handle(events.Tick(), at=1.0) == ["load a ssd>host"]
    assert line.loaded("a") == []
    assert line.resident() == "a"


def test_a_pinned_expert_takes_the_room_of_what_nobody_waits_for():
    line = unified(host=2, policy="samba", pinned=frozenset("a"), loads_in_flight=3)
    assert line.handle(events.Started()) == ["load a ssd>host"]
    line.load_failed("a", at=0.0)
    line.bring("b")
    line.run("c")
    assert line.handle(events.Tick(), at=0.25) == ["evict b host stage 0", "load a ssd>host"]
    line.loaded("a")
    line.finished("c")
    line.bring("b")
    assert line.resident() == "ab"


def test_a_pinned_expert_stays_in_the_memory_it_runs_in_and_may_leave_the_one_in_front():
    line = split(host=2, device=2, policy="samba", pinned=frozenset("a"))
    line.handle(events.Started())
    line.loaded("a")
    line.bring("b", "c", "d")
    assert line.resident("device") == "ad"
    assert "a" not in line.resident("host")


def test_experts_are_placed_in_descending_usage_as_the_link_allows_and_not_beyond_the_room():
    line = unified(host=3, usage={"a": 0.5, "b": 0.25, "c": 0.75, "d": 0.125}, loads_in_flight=1)
    assert line.handle(events.Started()) == ["load c ssd>host"]
    assert line.loaded("c") == ["load a ssd>host"]
    assert line.loaded("a") == ["load b ssd>host"]
    assert line.loaded("b") == []
    assert line.resident() == "cab"
    assert line.engine.statistics().switches == 0


def test_a_head_comes_before_the_initial_placement():
    line = unified(host=9, usage={"a": 0.5, "b": 0.25}, loads_in_flight=1)
    line.handle(events.Started())
    line.ask("h")
    assert line.loaded("a") == ["load h ssd>host"]
    assert line.loaded("h") == ["run h", "load b ssd>host"]


def test_what_found_no_room_at_first_is_not_placed_later():
    line = unified(host=1, usage={"a": 0.5, "b": 0.25})
    line.handle(events.Started())
    line.loaded("a")
    assert line.handle(events.Quarantined("a", "bad")) == ["evict a host stage 0"]


def test_the_initial_placement_leaves_the_room_that_a_head_waits_for():
    line = unified(host=3, sizes={"a": 2, "x": 2}, usage={"b": 0.5})
    line.run("a")
    line.ask("x")  # waits for a's room beside the byte that is free
    assert line.handle(events.Started()) == []
    assert line.finished("a") == ["evict a host stage 2", "load x ssd>host"]


# -- speculation: what may follow what runs --


def test_what_may_follow_a_running_expert_is_loaded_into_free_room_and_takes_nobodys():
    line = unified(host=3, routes={"a": "ad"})
    line.bring("b")
    line.ask("a")
    assert line.loaded("a") == ["run a", "load d ssd>host"]
    line = unified(host=2, routes={"a": "ad"})
    line.bring("b")
    line.ask("a")
    assert line.loaded("a") == ["run a"]


def test_without_overlapping_nothing_is_loaded_in_advance():
    line = unified(policy="paper", routes={"a": "ad"})
    line.ask("a")
    assert line.loaded("a") == ["run a"]


def test_nothing_is_loaded_in_advance_into_the_room_that_a_head_waits_for():
    line = unified(host=4, sizes={"a": 2, "x": 3}, routes={"a": "ad"})
    line.ask("a")
    line.ask("x")
    assert line.loaded("a") == ["run a"]


def test_a_load_that_a_head_waited_for_while_others_overtook_it_is_a_switch():
    line = unified(host=3)
    line.bring("a")
    line.ask("b")
    line.ask("a")  # runs while b is on its way
    line.loaded("b")
    assert line.engine.statistics().switches == 2


# -- split memory: the host in front of the device --


def test_a_copy_goes_through_the_host_to_the_device():
    line = split()
    assert line.ask("a") == ["load a ssd>host"]
    assert line.handle(events.Tick()) == []  # it is on its way to the host
    assert line.loaded("a") == ["load a host>device"]
    assert line.loaded("a") == ["run a"]
    statistics = line.engine.statistics()
    assert (statistics.loads, statistics.bytes_read) == ({"host_device": 1, "ssd_device": 0, "ssd_host": 1}, 1)
    assert (statistics.switches, statistics.evictions) == (1, 0)


def test_a_load_from_the_host_is_predicted_when_a_copy_is_there():
    line = split(device=1)
    line.bring("a", "b")  # b replaces a on the device, both are in the host
    for expert, load_s in (("a", 2.0), ("c", 10.0)):
        line.ask(expert)
        assert line.assigned.candidates[0].addition_s == 3.0 + load_s


@pytest.mark.parametrize(
    ("usage", "effects"),
    [
        ({"a": 0.5, "x": 0.25}, ["evict x host stage 2", "load a ssd>host"]),
        ({"a": 0.5, "x": 0.5}, ["load a ssd>device"]),
        ({"a": 0.25}, ["evict x host stage 2", "load a ssd>host"]),
        ({"x": 0.25}, ["load a ssd>device"]),
        ({}, ["load a ssd>device"]),
    ],
)
def test_a_copy_on_its_way_to_the_device_takes_the_hosts_room_only_from_what_is_used_less(usage, effects):
    line = split(host=1, usage=usage)
    line.bring("x")
    assert line.ask("a") == effects


def test_a_copy_on_its_way_to_the_device_leaves_what_is_queued_in_the_host():
    line = split(host=2, usage={"a": 0.5})
    line.bring("x")
    line.run("y")
    line.ask("x")
    assert line.ask("a") == ["load a ssd>device"]


def test_the_baselines_pass_every_copy_through_the_host():
    line = split(host=1, policy="samba", usage={"b": 0.5})
    line.bring("b", "c")
    assert line.resident("host") == "c"


def test_what_is_queued_behind_a_full_device_is_staged_in_the_host():
    line = split(host=3, device=1, loads_in_flight=9)
    line.run("a")
    assert [line.ask(expert) for expert in "bcd"] == [["load b ssd>host"], ["load c ssd>host"], []]
    assert line.loaded("b") == ["evict a host stage 2", "load d ssd>host"]  # a runs on the device from its copy there
    assert line.ask("e") == []  # all that lies in the host is queued
    assert line.loaded("c") == []
    assert line.finished("a") == ["evict a device stage 2", "load b host>device"]


def test_several_are_staged_at_once_and_none_for_what_the_host_itself_has_queued():
    line = split(host=5, device=1, usage={"u": 0.9, "v": 0.9}, loads_in_flight=9)
    line.run("a")
    line.bring("u", "v", "w")
    line.ask("b")
    line.run("v")
    line.ask("u")  # v runs in the host, u waits there
    for expert in "cde":
        line.ask(expert)
    assert line.resident("host") == "uv"
    assert line.loaded("b") == []


def test_a_copy_in_the_host_is_not_wanted_there_while_the_device_holds_it_too():
    line = split(host=3, device=1, loads_in_flight=9)
    line.run("a")
    for expert in "bca":
        line.ask(expert)
    line.ask("d")  # the last of all, behind a
    assert line.loaded("b") == ["evict a host stage 2", "load d ssd>host"]


def test_a_busy_ssd_does_not_keep_what_lies_in_the_host_from_the_device():
    line = split(device=2, usage={"g": 0.5}, loads_in_flight=1)
    line.bring("c", "g")
    line.run("a")  # for which c leaves the device
    line.handle(events.Quarantined("g", "bad"))
    line.ask("x")  # from the SSD
    line.ask("b")
    line.ask("d")
    assert line.ask("c") == ["load c host>device"]  # though b and d, before it, wait for the SSD


def test_a_busy_link_to_the_device_does_not_keep_the_next_groups_from_the_host():
    line = split(host=9, device=3, sizes={"a": 3}, loads_in_flight=1)
    line.run("a")
    for expert in "bc":
        line.ask(expert)
    assert [line.loaded("b"), line.loaded("c")] == [["load c ssd>host"], []]
    assert line.finished("a") == ["evict a device stage 2", "load b host>device"]
    assert line.ask("d") == ["load d ssd>host"]  # though c, before it, waits for b's load to end


def test_an_overdue_head_that_waits_for_the_link_keeps_the_room_that_is_free():
    line = split(device=2, usage={"g": 0.5}, loads_in_flight=1, max_overtake_s=5.0)
    line.bring("c", "g")
    line.run("a")  # for which c leaves the device
    line.handle(events.Quarantined("g", "bad"))
    line.ask("x", at=0.0)  # from the SSD
    line.ask("b", at=0.0)
    assert line.ask("c", at=6.0) == []


def test_a_copy_that_no_head_runs_on_makes_room_though_its_expert_is_at_the_head_of_a_queue():
    """Two processors of different precisions in one memory: a head spares its copy, not its expert's other one."""
    processors, sizes = {"cpu": ("ab", "host"), "gpu": ("a", "host")}, {"a": 8, "b": 8, "a@fp16": 4}
    line = Line((PoolSpec("host", 9, 8),), processors, forms={"gpu": "fp16"}, sizes=sizes, usage={"a": 1.0})
    line.handle(events.Started())
    line.ask("b")  # only the cpu runs it
    line.ask("a")  # shorter on the gpu
    line.loads["a"] = next(iter(line.engine._state.loads))
    assert [each.split()[0] for each in line.handle(events.Loaded(line.loads["a"]))] == ["evict", "load"]


def test_an_overdue_head_whose_copy_is_there_keeps_no_place_on_the_link():
    pools = (PoolSpec("host", 2, 16), PoolSpec("other", 2, 16))
    processors = {"left": ("abc", "host"), "middle": ("uv", "host"), "right": ("z", "other")}
    line = Line(pools, processors, loads_in_flight=2, max_overtake_s=5.0)
    line.run("a")
    line.run("u")
    line.ask("b", at=1.0)
    line.ask("u", at=1.0)
    assert "load z ssd>other" in line.ask("z", at=9.0)


def test_only_the_copy_that_a_pinned_expert_runs_on_is_pinned():
    pools, processors = (
        (PoolSpec("host", 5, 8), PoolSpec("device", 2, 8, cache="host")),
        {"cpu": ("a", "host"), "gpu": ("ab", "device")},
    )
    line = Line(pools, processors, forms={"gpu": "fp16"}, sizes={"a": 2, "b": 2}, pinned=frozenset("a"))
    for _ in range(6):
        for expert in "ab":
            line.ask(expert)
            while line.loads or line.batches:
                line.loaded(*list(line.loads)[:1]) if line.loads else line.finished(*list(line.batches)[:1])
    held = {entry.copy for pool in line.engine._state.pools.values() for entry in pool.entries() if entry.pinned}
    assert held <= {"a@fp32"}


def test_who_passes_one_that_waits_for_a_busy_link_takes_no_room_from_what_is_queued_later():
    line = split(host=7, device=3, loads_in_flight=1)
    line.bring(*"abcd")  # a leaves the device for d, and stays in the host
    for expert in "befg":
        line.ask(expert)
    assert line.loaded("e") == ["evict c device stage 2", "load e host>device", "load f ssd>host"]
    assert [line.ask(expert) for expert in "ad"] == [[], []]
    # g waits for the SSD, the host's link is idle now, and only d, which is queued behind a, could leave for a
    assert line.loaded("e") == []


# -- a short queue, whose victims are chosen late --

B_FIRST = {"a": 0.3, "b": 0.1, "d": 0.2, "c": 0.5}
D_FIRST = {"a": 0.3, "b": 0.2, "d": 0.1, "c": 0.5}


def unhurried(usage, max_overtake_s=100.0):
    """a, b and d lie in a memory for three; a runs, b is queued, and c, which is not there, behind it."""
    line = unified(host=3, usage=usage, max_overtake_s=max_overtake_s, long_queue_s=100.0)
    line.bring(*"abd")
    told = [line.ask(expert, at=1.0) for expert in "abc"]
    assert told[:2] == [["run a"], []]
    return line, told[2]


def test_a_short_queue_takes_free_room_only_while_it_has_other_work_and_a_longer_one_loads_ahead():
    line, told = unhurried(D_FIRST)
    assert told == []
    assert line.finished("a", at=2.0) == ["run b", "evict d host stage 2", "load c ssd>host"]  # nothing else could run
    assert unhurried(D_FIRST, max_overtake_s=15.0)[1] == ["evict d host stage 2", "load c ssd>host"]


def test_a_short_queue_waits_for_what_runs_where_that_would_go_first():
    line, told = unhurried(B_FIRST)
    assert told == []
    assert line.finished("a", at=2.0) == ["run b"]
    assert line.finished("b", at=3.0) == ["evict b host stage 2", "load c ssd>host"]


def test_what_runs_is_not_waited_for_where_it_is_queued_again():
    line, _ = unhurried(B_FIRST)
    line.finished("a", at=2.0)
    assert line.ask("b", at=2.5) == []  # b has work behind c, so that c takes free room only ...
    assert line.finished("b", at=3.0)[0] == "run b"  # ... until b runs again
    assert "c" in line.loads or "load c ssd>host" in line.finished("b", at=4.0)


@pytest.mark.parametrize(("at_s", "loaded"), [(50.9, False), (51.0, True)])
def test_a_head_that_has_waited_for_half_the_bound_has_no_time_left(at_s, loaded):
    line, _ = unhurried(B_FIRST)
    assert ("load c ssd>host" in line.finished("a", at=at_s)) is loaded


def test_a_head_that_waits_on_purpose_keeps_no_other_executor_from_loading():
    line = unified(host=3, usage={"a": 0.1, "u": 0.8, "v": 0.9}, max_overtake_s=100.0, long_queue_s=100.0)
    line.bring("u", "v")
    line.run("a")  # executor 0 works; u and v lie there, used, and nobody asks for them
    assert line.ask("b") == []  # waits for a, which would go first
    assert line.ask("w") == ["evict u host stage 2", "load w ssd>host"]
