"""Copies that come and leave, from where and for which claim: the Engine's decisions about room, one after another.

Executor 0 alone runs experts a to h, executor 1 alone u to z: so a case says which queue a request goes to.
"""

import pytest

from agent.core import events
from agent.core.demand import initial_placement
from agent.core.effects import Evict, EvictionDecision
from agent.core.performance import ExecutorSpec, Footprint, PoolSpec, SharedTensors
from agent.core.policy import EvictionCandidate
from tests.agent.core.script import played
from tests.agent.core.worlds import Line, of, row, split, unified

TRUNK = SharedTensors("trunk", 5)
THREE_POOLS = [ExecutorSpec(n, *each) for n, each in enumerate([("gpu", "device"), ("gpu", "device"), ("cpu", "host"),
                                                                ("npu", "npu")])]  # fmt: skip


def preliminary_line(policy="paper", **changes):
    """d comes before e on a route; e is the most used of all that may leave."""
    return unified(policy=policy, usage={"e": 0.9, "a": 0.1}, routes={"d": "de"}, **changes)


def unhurried(usage, max_overtake_s=100.0):
    """A memory for three holds a, b and d; a runs, and b is queued."""
    line = unified(host=3, usage=usage, max_overtake_s=max_overtake_s, long_queue_s=100.0)
    line.play("bring abd; ask a @1.0 -> run a; ask b @1.0 -> nothing")
    return line


# Each case: a line, and what is played on it: see ``script``.
CASES = """
# the head of a queue
a head takes the room of what is least wanted | unified(host=3, usage={"a": 0.5, "b": 0.25, "c": 0.75}) |
    bring abc; ask d -> evict b host stage 2, load d ssd>host
an expert of unknown usage counts as never used | unified(host=2, usage={"a": 0.0625}) |
    bring ab; ask c -> evict b host stage 2, load c ssd>host
a claim leaves the copy of another queue's head, here a, which waits for b to end | unified(host=2) |
    bring a; run b; ask a; ask x -> nothing; holds host ab;
    finished b -> run a, evict b host stage 2, load x ssd>host
a claim may take a copy that stands further back in another queue | unified(host=3) |
    bring ac; run b; ask c; ask a; ask x -> evict a host stage 3, load x ssd>host
without overlapping a head is loaded when its executor is idle | unified(policy="paper") |
    run a; ask b -> nothing; ask x -> load x ssd>host; finished a -> load b ssd>host; ask c -> nothing;
    loaded b -> run b
without overlapping no group runs before the head | unified(policy="paper") |
    bring a; ask b; ask a -> nothing
a later group takes free room where a head lacks some | unified(host=3, sizes={"b": 3}) |
    bring de; run a; ask b; ask c -> nothing
a later group evicts where each head has its room | unified(host=3) |
    bring de; run a; ask b; ask c -> evict e host stage 2, load c ssd>host
# overdue: a head for longer than the bound
an overdue head takes the room of a younger head | unified(host=1, max_overtake_s=5.0) |
    run a; ask x @1.0; ask a @2.0; finished a @6.0 -> evict a host stage 3, load x ssd>host
an overdue head leaves the room of an older head | unified(host=1, max_overtake_s=5.0) |
    run a; ask x @1.0; ask a @1.0; finished a @6.0 -> run a
a head is overdue from the bound on | unified(host=1, max_overtake_s=5.0) |
    run a; ask x @1.0; ask a @2.0; finished a @5.875 -> run a
an overdue head gathers its room bit by bit and no younger claim takes it |
    unified(host=4, sizes={"x": 3, "b": 2}, max_overtake_s=5.0) |
    # a's byte would not be enough for x: it may stay; at 5 s a byte of b's would do
    bring a; run b; ask x @0.0 -> nothing; tick @5.0 -> evict a host stage 2; ask c @5.0 -> nothing;
    finished b @6.0 -> evict b host stage 2, load x ssd>host, load c ssd>host
an overdue head keeps its place on the link that it needs: b waits for the host's, not for the SSD's |
    split(device=1, loads_in_flight=1, max_overtake_s=5.0) | run a; ask b @0.0; loaded b @1.0; run x;
    ask y @1.0 -> load y ssd>host; loaded y; tick @6.0; finished x @6.0; ask z @6.0 -> load z ssd>host
# prefetch: the groups behind the head
a later group takes the room of what is not queued | unified(host=3) |
    bring b; run a; ask c -> load c ssd>host; ask d -> evict b host stage 2, load d ssd>host
a later group takes the room of what is used after it | unified(host=3, loads_in_flight=1) |
    # d has to wait for the link: c is on its way
    bring b; run a; ask c; ask d; ask b; loaded c -> evict b host stage 3, load d ssd>host
a later group leaves the room of what is used before it | unified(host=3, loads_in_flight=1) |
    bring b; run a; ask c; ask b; ask d; loaded c -> nothing
a later group leaves the room of what is used first | unified(host=3, loads_in_flight=1) |
    bring b; run a; ask b; ask c; ask d; loaded c -> nothing
a later group leaves what is used at the same time: d and u are predicted 13 s after what runs now |
    unified(host=5, loads_in_flight=3) | bring u; run a; run v; ask w; ask u; ask c; ask d; loaded w -> nothing;
    holds host uavw
only so many groups are loaded ahead | unified(host=9, prefetch_groups=2, loads_in_flight=9) |
    run a; ask b -> load b ssd>host; ask c -> load c ssd>host; ask d -> load d ssd>host; ask e -> nothing;
    ask f -> nothing
only so many loads are under way from one source | unified(host=9, loads_in_flight=2) |
    ask a -> load a ssd>host; ask b -> load b ssd>host; ask c -> nothing; loaded a -> run a, load c ssd>host;
    ask d -> nothing; load_failed b -> load d ssd>host; loaded c -> nothing
heads are asked for in the order in which they were opened | unified(host=9, usage={"h": 0.5}, loads_in_flight=1) |
    started; ask x @1.0; ask a @2.0; loaded h @2.0 -> load x ssd>host
of heads as old as one another that of the lowest executor is first |
    unified(host=9, usage={"h": 0.5}, loads_in_flight=1) | started; ask x; ask a; loaded h -> load a ssd>host
overdue heads are asked for in the order of their oldest requests |
    unified(host=9, usage={"h": 0.5}, loads_in_flight=1) | started; ask x @1.0; ask a @2.0;
    loaded h @9.0 -> load x ssd>host
of overdue heads as old as one another that of the lowest executor is first |
    unified(host=9, usage={"h": 0.5}, loads_in_flight=1) | started; ask x; ask a; loaded h @9.0 -> load a ssd>host
later groups are loaded by place, then by executor, and those that are there are passed over |
    unified(host=9, loads_in_flight=1) | bring g; run a; run u; ask b; ask c; ask g; ask d; ask v; ask w;
    loaded b -> load v ssd>host; loaded v -> load c ssd>host; loaded c -> load w ssd>host; loaded w -> load d ssd>host
# subsequent experts
a subsequent expert whose preliminary one is nowhere leaves first | preliminary_line(host=2) |
    bring ae; ask x -> evict e host stage 1, load x ssd>host
a subsequent expert whose preliminary one is resident leaves by its usage | preliminary_line(host=3) |
    bring aed; run d; ask x -> evict a host stage 2, load x ssd>host
a subsequent expert whose preliminary one waits in a queue leaves by its usage | preliminary_line(host=3) |
    # d is not loaded: b runs
    bring ae; run b; ask d; ask x -> evict a host stage 2, load x ssd>host
a preliminary expert that left is nowhere | preliminary_line(host=3) |
    bring dae; ask b; holds host ae; loaded b; ask x -> evict e host stage 1, load x ssd>host
a preliminary expert that did not come is nowhere | preliminary_line(host=3, load_attempts=1) |
    bring ae; ask d; load_failed d; run x; ask b -> evict e host stage 1, load b ssd>host
a preliminary expert that came at the second try is there | preliminary_line(host=3, load_backoff_s=1.0) |
    bring ae; ask d; load_failed d; tick @1.0; loaded d; ask x -> evict a host stage 2, load x ssd>host
a preliminary expert that left one of two memories is still somewhere |
    split(host=1, device=2, policy="paper", usage={"e": 0.9, "d": 0.5, "a": 0.1}, routes={"d": "de"}) | bring d;
    holds host d; holds device d; bring x; holds host x; bring e;
    ask a -> evict d device stage 2, load a ssd>device
shared parts count once |
    unified(host=9, shared=dict.fromkeys("abd", (TRUNK,)), sizes={"c": 2, "d": 2}, usage=BY_NAME) |
    # 5 + 1 + 1 + 2 bytes
    bring abc; ask d -> evict a host stage 2, evict b host stage 2, load d ssd>host
shared parts stay for the newcomer that needs them |
    unified(host=9, shared=dict.fromkeys("ab", (TRUNK,)), sizes={"c": 2, "d": 3}, usage=BY_NAME) | bring abc;
    ask d -> evict a host stage 2, evict b host stage 2, load d ssd>host
# failed loads
any event at the moment of a retry brings it about | unified(load_backoff_s=1.0) |
    ask a; load_failed a; cancelled 99 @0.5 -> nothing; cancelled 99 @1.0 -> load a ssd>host
bad weights that fail on their way to the device leave the host too | split() |
    ask a; loaded a -> load a host>device; bad a -> evict a host stage 0
a quarantined copy that a failed load was copying leaves then | split() |
    ask a; loaded a; quarantined a -> nothing; load_failed a -> evict a host stage 0
# pinned experts, and those that are placed before the first request
a pinned expert's failed load is tried again without a request |
    unified(policy="samba", pinned=frozenset("a"), load_backoff_s=1.0) | started -> load a ssd>host;
    load_failed a -> nothing; tick @1.0 -> load a ssd>host; loaded a -> nothing; holds host a
a pinned expert takes the room of what no request waits for |
    unified(host=2, policy="samba", pinned=frozenset("a"), loads_in_flight=3) | started -> load a ssd>host;
    load_failed a @0.0; bring b; run c; tick @0.25 -> evict b host stage 0, load a ssd>host; loaded a; finished c;
    bring b; holds host ab
a pinned expert stays in the memory it runs in and may leave the one in front |
    split(host=2, device=2, policy="samba", pinned=frozenset("a")) | started; loaded a; bring bcd; holds device ad;
    holds host cd
experts are placed in descending usage as the link allows and not beyond the room |
    unified(host=3, usage={"a": 0.5, "b": 0.25, "c": 0.75, "d": 0.125}, loads_in_flight=1) |
    started -> load c ssd>host; loaded c -> load a ssd>host; loaded a -> load b ssd>host; loaded b -> nothing;
    holds host cab
a head comes before the initial placement | unified(host=9, usage={"a": 0.5, "b": 0.25}, loads_in_flight=1) |
    started; ask h; loaded a -> load h ssd>host; loaded h -> run h, load b ssd>host
an expert that found no room at first is not placed later | unified(host=1, usage={"a": 0.5, "b": 0.25}) |
    started; loaded a; quarantined a -> evict a host stage 0
the initial placement leaves the room that a head waits for |
    unified(host=3, sizes={"a": 2, "x": 2}, usage={"b": 0.5}) |
    # x needs the byte that is free, too
    run a; ask x; started -> nothing; finished a -> evict a host stage 2, load x ssd>host
# speculation: experts that may follow
an expert that may follow is loaded into free room | unified(host=3, routes={"a": "ad"}) |
    bring b; ask a; loaded a -> run a, load d ssd>host
an expert that may follow takes the room of no other | unified(host=2, routes={"a": "ad"}) |
    bring b; ask a; loaded a -> run a
an expert in quarantine is not loaded on a guess | unified(host=3, routes={"a": "ad"}) |
    quarantined d; ask a; loaded a -> run a
without overlapping no expert is loaded in advance | unified(policy="paper", routes={"a": "ad"}) |
    ask a; loaded a -> run a
no expert is loaded in advance into the room that a head waits for |
    unified(host=4, sizes={"a": 2, "x": 3}, routes={"a": "ad"}) | ask a; ask x; loaded a -> run a
# split memory: the host in front of the device
a copy on its way to the device leaves what is queued in the host | split(host=2, usage={"a": 0.5}) |
    bring x; run y; ask x; ask a -> load a ssd>device
the baselines pass every copy through the host | split(host=1, policy="samba", usage={"b": 0.5}) |
    bring bc; holds host c
what is queued behind a full device is staged in the host | split(host=3, device=1, loads_in_flight=9) |
    # a runs on the device from its copy there; all that lies in the host is queued
    run a; ask b -> load b ssd>host; ask c -> load c ssd>host; ask d -> nothing;
    loaded b -> evict a host stage 2, load d ssd>host; ask e -> nothing; loaded c -> nothing;
    finished a -> evict a device stage 2, load b host>device
several are staged at once and none for what the host itself has queued |
    split(host=5, device=1, usage={"u": 0.9, "v": 0.9}, loads_in_flight=9) |
    # v runs in the host, u waits there
    run a; bring uvw; ask b; run v; ask u; ask c; ask d; ask e; holds host uv; loaded b -> nothing
a copy in the host is not wanted there while the device holds it too | split(host=3, device=1, loads_in_flight=9) |
    # d is the last of all, behind a
    run a; ask b; ask c; ask a; ask d; loaded b -> evict a host stage 2, load d ssd>host
a busy SSD does not keep from the device what lies in the host, though b and d before it wait for the SSD |
    split(device=2, usage={"g": 0.5}, loads_in_flight=1) | bring cg; run a; quarantined g; ask x; ask b; ask d;
    ask c -> load c host>device
a busy link to the device does not keep the next groups from the host |
    split(host=9, device=3, sizes={"a": 3}, loads_in_flight=1) |
    # though c, before it, waits for b's load to end
    run a; ask b; ask c; loaded b -> load c ssd>host; loaded c -> nothing;
    finished a -> evict a device stage 2, load b host>device; ask d -> load d ssd>host
an overdue head that waits for the link keeps the room that is free |
    split(device=2, usage={"g": 0.5}, loads_in_flight=1, max_overtake_s=5.0) | bring cg; run a; quarantined g;
    ask x @0.0; ask b @0.0; ask c @6.0 -> nothing
a group that passes one at a busy link takes no room from what is queued later |
    split(host=7, device=3, loads_in_flight=1) |
    # a leaves the device for d, and stays in the host; g waits for the SSD, the host's link is idle, and only d,
    # queued behind a, could leave
    bring abcd; ask b; ask e; ask f; ask g; loaded e -> evict c device stage 2, load e host>device, load f ssd>host;
    ask a -> nothing; ask d -> nothing; loaded e -> nothing
# a short queue, whose victims are chosen late: a runs, b is queued, and c, which is not there, behind it
a short queue takes free room only while it has other work | unhurried(D_FIRST) |
    # at 2 s no other could run
    ask c @1.0 -> nothing; finished a @2.0 -> run b, evict d host stage 2, load c ssd>host
a longer queue loads ahead | unhurried(D_FIRST, max_overtake_s=15.0) |
    ask c @1.0 -> evict d host stage 2, load c ssd>host
a short queue waits for a copy in use that would go first | unhurried(B_FIRST) |
    ask c @1.0 -> nothing; finished a @2.0 -> run b; finished b @3.0 -> evict b host stage 2, load c ssd>host
a copy in use is waited for where another executor has to use what it loaded |
    unified(host=4, usage={"a": 0.1, "d": 0.2}, max_overtake_s=100.0, long_queue_s=100.0) |
    # v is not unused: it waits for u to end
    bring d; run a; run u; ask v; loaded v; ask b -> nothing; finished a -> evict a host stage 2, load b ssd>host
a copy in use is not waited for where it is queued again | unhurried(B_FIRST) |
    # b has work behind c, so that c takes free room only until b runs again
    ask c @1.0; finished a @2.0; ask b @2.5 -> nothing; finished b @3.0 -> run b;
    finished b @4.0 -> evict b host stage 2, load c ssd>host
a head has time until it has waited for half the bound | unhurried(B_FIRST) |
    ask c @1.0; finished a @50.9 -> run b
a head that has waited for half the bound has no time left | unhurried(B_FIRST) |
    ask c @1.0; finished a @51.0 -> run b, evict d host stage 2, load c ssd>host
a head that waits on purpose keeps no other executor from loading |
    unified(host=3, usage={"a": 0.1, "u": 0.8, "v": 0.9}, max_overtake_s=100.0, long_queue_s=100.0) |
    # executor 0 works; u and v were used, and no request waits for them; b waits for a, which would go first
    bring uv; run a; ask b -> nothing; ask w -> evict u host stage 2, load w ssd>host
"""
BY_NAME = {"a": 0.1, "b": 0.2, "c": 0.3}
B_FIRST = {"a": 0.3, "b": 0.1, "d": 0.2, "c": 0.5}
D_FIRST = {"a": 0.3, "b": 0.2, "d": 0.1, "c": 0.5}


@played(CASES)
def test_copies_come_and_leave(made, script):
    eval(made).play(script)


def test_head_without_room_blocks_fitting_loads_only_once_overdue():
    line = unified(host=6, sizes={"b": 6}, max_overtake_s=5.0)
    line.run("a")
    assert line.ask("b", at=1.0) == []  # not while a runs
    assert line.ask("x", at=2.0) == ["load x ssd>host"]  # another queue's head
    assert line.ask("c", at=2.0) == ["load c ssd>host"]  # a later group, into free room
    line.loaded("c", at=3.0)
    line.loaded("x", at=3.0)
    line.ask("y", at=3.0)
    assert line.ask("d", at=7.0) == ["evict c host stage 3"]  # b gathers its room now, and d has to wait


def test_overdue_head_keeps_its_place_on_the_link_until_it_has_room():
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


def test_eviction_reports_its_copy_claim_missing_bytes_and_candidates():
    line = unified(host=4, policy="samba", sizes={"b": 2, "d": 2}, usage={"a": 0.5})
    line.bring("abac")
    line.ask("d")
    assert line.loads["d"].size_bytes == 2
    weighed = (
        EvictionCandidate("b@fp32", "b", Footprint(2), 0.0, None, False, 3, 4),
        EvictionCandidate("a@fp32", "a", Footprint(1), 0.5, None, False, 1, 5),
        EvictionCandidate("c@fp32", "c", Footprint(1), 0.0, None, False, 6, 7),
    )
    decision = EvictionDecision("d@fp32", 2, weighed, "head")
    assert of(Evict, line.effects) == [Evict("b", "b@fp32", "host", 2, 0, decision)]


def away_until(line, until_s):
    """Effects while the file of a is missing, and read again at each retry."""
    told = []
    while True:
        told += line.load_failed("a", is_away=True)
        if line.engine.next_wakeup_s() > until_s:
            return told
        told += line.handle(events.Tick(), at=line.engine.next_wakeup_s())


@pytest.mark.parametrize("make", [lambda **limits: unified(**limits), lambda **limits: split(**limits)])
def test_absent_file_is_waited_for_without_a_failed_request(make):
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


def test_file_absent_beyond_the_limit_puts_its_expert_on_probation_until_it_returns():
    line = unified(away_s=30.0, longest_away_pause_s=4.0)
    line.ask("a", at=100.0)
    away_until(line, 145.0)
    statistics = line.engine.statistics()
    assert (statistics.failed, list(statistics.on_probation), statistics.quarantined) == (1, ["a"], {})
    assert line.engine.next_wakeup_s() - line.now <= 4.0
    line.handle(events.Tick(), at=line.engine.next_wakeup_s())
    line.loaded("a")
    assert line.engine.statistics().on_probation == {}


def test_next_wakeup_is_the_earliest_retry_of_failed_loads():
    line = unified(load_backoff_s=1.0)
    line.ask("a")
    line.ask("x")
    line.load_failed("x", at=0.0)
    line.load_failed("a", at=0.5)
    assert line.engine.next_wakeup_s() == 1.0
    line.handle(events.Tick(), at=1.0)
    assert line.engine.next_wakeup_s() == 1.5


def test_load_that_an_overtaken_head_waited_for_is_a_switch():
    line = unified(host=3)
    line.bring("a")
    line.ask("b")
    line.ask("a")  # runs while b is on its way
    line.loaded("b")
    assert line.engine.statistics().switches == 2


def test_copy_reaches_the_device_through_the_host():
    line = split()
    assert line.ask("a") == ["load a ssd>host"]
    assert line.handle(events.Tick()) == []  # it is on its way to the host
    assert line.loaded("a") == ["load a host>device"]
    assert line.loaded("a") == ["run a"]
    statistics = line.engine.statistics()
    assert (statistics.loads, statistics.bytes_read) == ({"host_device": 1, "ssd_device": 0, "ssd_host": 1}, 1)
    assert (statistics.switches, statistics.evictions) == (1, 0)


def test_predicted_load_of_a_copy_in_the_host_is_the_host_load():
    line = split(device=1)
    line.bring("ab")  # b replaces a on the device, both are in the host
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
def test_copy_on_its_way_to_the_device_evicts_only_less_used_host_copies(usage, effects):
    line = split(host=1, usage=usage)
    line.bring("x")
    assert line.ask("a") == effects


def test_copy_that_no_head_runs_on_is_evictable_despite_its_expert_being_a_head():
    """Two processors of different precisions in one memory: a head spares its copy, not its expert's other one."""
    processors, sizes = {"cpu": ("ab", "host"), "gpu": ("a", "host")}, {"a": 8, "b": 8, "a@fp16": 4}
    line = Line((PoolSpec("host", 9, 8),), processors, forms={"gpu": "fp16"}, sizes=sizes, usage={"a": 1.0})
    line.handle(events.Started())
    line.ask("b")  # only the cpu runs it
    line.ask("a")  # shorter on the gpu
    assert [each.split()[0] for each in line.loaded("a")] == ["evict", "load"]


def test_overdue_head_with_a_resident_copy_reserves_no_load():
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
            while line.loading or line.running:
                line.answer()
    held = {entry.copy for pool in line.engine._state.pools.values() for entry in pool.entries() if entry.pinned}
    assert held <= {"a@fp32"}


@pytest.mark.parametrize(
    ("usage", "able", "dealt"),
    [
        (
            {"a": 0.1, "b": 0.5, "c": 0.3, "d": 0.3, "e": 0.6, "f": 0.05, "g": 0.01},
            dict.fromkeys(("gpu", "cpu", "npu"), "abcdefg"),
            "0e 2b 3c 0d 2a 3f 0g",
        ),
        (dict.fromkeys("abcdefg", 0.5), {"gpu": "bcefg", "cpu": "abcfg", "npu": "abcfg"}, "2a 3b 0c 0e 2f 3g"),
    ],
    ids=["all able", "by the next pool that can run it; none can run d"],
)
def test_experts_are_dealt_to_one_pool_after_the_other_in_descending_usage(usage, able, dealt):
    runs_on = {processor: {name: row(name) for name in names} for processor, names in able.items()}
    found = initial_placement(usage, THREE_POOLS, runs_on)
    assert [f"{spec.id}{expert}" for spec, expert in found] == dealt.split()
