"""Leases on known cases: who may begin, beside whom, and what each holds."""

from __future__ import annotations

import math

import pytest

from agent.core.performance import PoolSpec
from agent.core.pool import Leases, ModelPool
from experts.errors import MemoryExceeded

BOUND_S = 5.0


@pytest.fixture
def pools():
    return {name: ModelPool(PoolSpec(name, 0, 0, lease_bytes=10)) for name in ("host", "device")}


@pytest.fixture
def leases(pools):
    return Leases(pools, BOUND_S)


def test_nobody_waits_and_nobody_holds_anything_at_first(leases):
    leases.check_invariants()
    assert (leases.is_any, set(leases.waiting), dict(leases.begun)) == (False, set(), {})


def test_who_begins_holds_its_lease_until_it_ends(leases, pools):
    leases.wait(1, "host", 7, since_s=0.0)
    assert (leases.is_any, set(leases.waiting), pools["host"].lease_used_bytes) == (True, {1}, 0)
    leases.begin(1)
    assert (set(leases.waiting), dict(leases.begun), pools["host"].free_lease_bytes) == (set(), {1: "host"}, 3)
    leases.check_invariants()
    leases.end(1)
    assert (leases.is_any, pools["host"].lease_used_bytes) == (False, 0)
    leases.check_invariants()


def test_who_stops_waiting_takes_nothing_and_who_is_unknown_ends_without_a_trace(leases, pools):
    leases.wait(1, "host", 7, since_s=0.0)
    leases.end(1)
    leases.end(1)
    leases.check_invariants()
    assert (leases.is_any, pools["host"].lease_used_bytes) == (False, 0)


def test_a_lease_fits_up_to_the_last_byte_and_each_memory_has_its_own(leases):
    for request, pool, size in ((1, "host", 4), (2, "host", 6), (3, "host", 7), (4, "device", 10)):
        leases.wait(request, pool, size, since_s=0.0)
    leases.begin(1)
    assert [leases.can_begin(request) for request in (2, 3, 4)] == [True, False, True]


def test_there_is_no_beginning_without_room(leases, pools):
    leases.wait(1, "host", 11, since_s=0.0)
    with pytest.raises(MemoryExceeded):
        leases.begin(1)
    leases.check_invariants()
    assert pools["host"].lease_used_bytes == 0


@pytest.mark.parametrize(("since_s", "may_begin"), [(4.9, True), (5.0, False), (9.0, False)])
def test_what_an_older_one_needs_is_kept_for_it_once_it_came_longer_before_than_the_bound(leases, since_s, may_begin):
    leases.wait(1, "host", 3, since_s=0.0)
    leases.wait(2, "host", 6, since_s=0.0)
    leases.wait(3, "host", 2, since_s=since_s)
    assert leases.can_begin(3) is may_begin
    leases.end(2)
    assert leases.can_begin(3)


def test_what_is_kept_for_an_older_one_leaves_the_rest_to_others(leases):
    leases.wait(1, "host", 8, since_s=0.0)
    leases.wait(2, "host", 2, since_s=9.0)
    leases.wait(3, "host", 3, since_s=9.0)
    assert [leases.can_begin(request) for request in (1, 2, 3)] == [True, True, False]


def test_who_takes_nothing_waits_for_nobody(leases):
    leases.wait(1, "host", 10, since_s=0.0)
    leases.wait(2, "host", 10, since_s=1.0)
    leases.wait(3, "host", 0, since_s=9.0)
    leases.begin(1)
    assert [leases.can_begin(request) for request in (2, 3)] == [False, True]
    leases.begin(3)
    leases.check_invariants()
    assert set(leases.begun) == {1, 3}


def test_a_lease_grows_up_to_the_last_byte_and_no_further(leases, pools):
    for request, size in ((1, 4), (2, 3)):
        leases.wait(request, "host", size, since_s=0.0)
        leases.begin(request)
    assert not leases.grow(1, 8, since_s=0.0)
    assert leases.grow(1, 7, since_s=0.0)
    assert leases.grow(1, 2, since_s=0.0)  # it has that already
    assert pools["host"].free_lease_bytes == 0
    leases.check_invariants()
    leases.end(1)
    assert pools["host"].lease_used_bytes == 3


@pytest.mark.parametrize(("since_s", "may_grow"), [(4.9, True), (5.0, False)])
def test_what_an_older_one_needs_is_kept_for_it_by_those_who_have_begun_too(leases, since_s, may_grow):
    leases.wait(2, "host", 2, since_s=since_s)
    leases.begin(2)
    leases.wait(1, "host", 7, since_s=0.0)  # its batch failed
    assert leases.grow(2, 4, since_s=since_s) is may_grow
    assert leases.grow(2, 2, since_s=since_s)


def test_nothing_is_kept_for_anybody_where_nothing_is_bounded(pools):
    leases = Leases(pools, math.inf)
    leases.wait(1, "host", 10, since_s=0.0)
    leases.wait(2, "host", 1, since_s=1e9)
    assert leases.can_begin(2)


def test_those_who_wait_are_in_the_order_of_their_age_whenever_they_came(leases):
    leases.wait(1, "host", 1, since_s=8.0)
    leases.wait(2, "host", 10, since_s=1.0)  # given back, as old as ever
    leases.check_invariants()
    assert not leases.can_begin(1)


def test_a_request_that_is_lost_is_found(leases, pools):
    leases.wait(1, "host", 1, since_s=0.0)
    leases.begin(1)
    pools["host"].return_lease(1)
    with pytest.raises(AssertionError, match="host: leases taken by"):
        leases.check_invariants()
