"""ModelPool on known cases: bytes of weights and of workspaces, who may leave, and that a wrong ledger is noticed."""

from __future__ import annotations

import pytest

from agent.core.performance import Footprint, PoolSpec, SharedTensors
from agent.core.pool import ModelPool, Move, PoolEntry, PoolStatistics, Residency, misfits
from experts.errors import IllegalMove, MemoryExceeded

TRUNK, NECK = SharedTensors("trunk", 10), SharedTensors("neck", 4)
NOTHING_SHARED = Footprint(3)
ON_TRUNK = Footprint(2, (TRUNK,))
ON_BOTH = Footprint(1, (TRUNK, NECK))


@pytest.fixture
def pool():
    return ModelPool(PoolSpec("host", expert_bytes=30, workspace_bytes=20))


def hold(pool, name, footprint=NOTHING_SHARED, *, pinned=False):
    size_bytes = pool.start_load(f"{name}@fp32", name, footprint, pinned=pinned)
    pool.loaded(f"{name}@fp32")
    return size_bytes


def refusal(refused):
    return refused.value.copy, refused.value.state, refused.value.move


def test_a_new_memory_is_empty(pool):
    assert (pool.name, pool.free_bytes, list(pool.entries())) == ("host", 30, [])
    assert (pool.entry("a@fp32"), pool.is_resident("a@fp32"), pool.holders("trunk")) == (None, False, 0)
    assert pool.statistics() == PoolStatistics("host", 30, 0, 20, 0, 0, (), ())
    pool.check_invariants()


def test_a_copy_is_reserved_when_its_load_starts_and_resident_when_it_is_loaded(pool):
    assert pool.start_load("a@fp32", "a", ON_TRUNK, pinned=False) == 12
    assert pool.entry("a@fp32") == PoolEntry("a@fp32", "a", ON_TRUNK, False, 1, 1, Residency.LOADING, 0)
    assert (pool.is_resident("a@fp32"), pool.free_bytes) == (False, 18)
    assert pool.statistics() == PoolStatistics("host", 30, 12, 20, 0, 12, (), ("a@fp32",))
    pool.loaded("a@fp32")
    assert pool.entry("a@fp32") == PoolEntry("a@fp32", "a", ON_TRUNK, False, 1, 1, Residency.RESIDENT, 0)
    assert (pool.is_resident("a@fp32"), pool.free_bytes) == (True, 18)
    assert pool.statistics() == PoolStatistics("host", 30, 12, 20, 0, 12, ("a@fp32",), ())
    pool.check_invariants()


def test_copies_are_listed_in_the_order_in_which_they_came(pool):
    for name in "bac":
        hold(pool, name)
    assert [(entry.expert, entry.loaded_order) for entry in pool.entries()] == [("b", 1), ("a", 2), ("c", 3)]


def test_a_copy_is_not_loaded_twice(pool):
    hold(pool, "a")
    with pytest.raises(IllegalMove) as refused:
        pool.start_load("a@fp32", "a", NOTHING_SHARED, pinned=False)
    assert refusal(refused) == ("a@fp32", Residency.RESIDENT, Move.START_LOAD)
    assert (pool.used_bytes, pool.is_resident("a@fp32")) == (3, True)


def test_what_fits_exactly_is_taken_and_a_byte_more_is_refused_with_the_sizes(pool):
    assert pool.can_reserve(Footprint(30))
    assert not pool.can_reserve(Footprint(31))
    with pytest.raises(MemoryExceeded, match="memory host: 31 bytes wanted, 30 free"):
        pool.start_load("a@fp32", "a", Footprint(31), pinned=False)
    assert hold(pool, "a", Footprint(30)) == 30
    with pytest.raises(MemoryExceeded, match="memory host: 1 bytes wanted, 0 free"):
        pool.start_load("b@fp32", "b", Footprint(1), pinned=False)
    assert [entry.expert for entry in pool.entries()] == ["a"]


def test_a_newcomer_needs_only_the_shared_parts_that_are_not_there(pool):
    assert (pool.needed_bytes(ON_TRUNK), pool.needed_bytes(ON_BOTH)) == (12, 15)
    hold(pool, "a", ON_TRUNK)
    assert (pool.needed_bytes(ON_TRUNK), pool.needed_bytes(ON_BOTH)) == (2, 5)


def test_a_shared_part_goes_with_the_last_of_its_holders(pool):
    assert [hold(pool, name, footprint) for name, footprint in (("a", ON_TRUNK), ("b", ON_BOTH), ("c", ON_TRUNK))] == [
        12, 5, 2,
    ]  # fmt: skip
    assert (pool.holders("trunk"), pool.holders("neck")) == (3, 1)
    assert [pool.freed_bytes(f"{name}@fp32") for name in "abc"] == [2, 5, 2]
    assert pool.evict("b@fp32") == 5
    assert (pool.holders("trunk"), pool.holders("neck"), pool.used_bytes) == (2, 0, 14)
    pool.check_invariants()
    assert pool.evict("a@fp32") == 2
    assert (pool.holders("trunk"), pool.freed_bytes("c@fp32")) == (1, 12)
    assert pool.evict("c@fp32") == 12
    assert (pool.holders("trunk"), pool.used_bytes, pool.peak_used_bytes) == (0, 0, 19)
    pool.check_invariants()


def test_a_load_that_came_to_nothing_gives_its_room_back(pool):
    hold(pool, "a", ON_TRUNK)
    pool.start_load("b@fp32", "b", ON_BOTH, pinned=False)
    pool.load_failed("b@fp32")
    assert (pool.entry("b@fp32"), pool.used_bytes, pool.holders("trunk"), pool.holders("neck")) == (None, 12, 1, 0)
    assert pool.start_load("b@fp32", "b", ON_BOTH, pinned=False) == 5
    pool.check_invariants()


def test_the_peak_is_the_most_that_was_ever_held(pool):
    hold(pool, "a", Footprint(20))
    pool.evict("a@fp32")
    hold(pool, "b", Footprint(5))
    assert pool.statistics().peak_used_bytes == 20


def test_only_a_resident_copy_that_is_neither_used_nor_pinned_may_leave(pool):
    pool.start_load("coming@fp32", "coming", NOTHING_SHARED, pinned=False)
    for name in ("idle", "used"):
        hold(pool, name)
    hold(pool, "pinned", pinned=True)
    pool.start_use("used@fp32")
    assert [entry.expert for entry in pool.entries() if entry.is_evictable] == ["idle"]
    assert [entry.expert for entry in pool.entries() if entry.is_resident] == ["idle", "used", "pinned"]
    assert pool.statistics().resident == ("idle@fp32", "used@fp32", "pinned@fp32")
    assert pool.statistics().loading == ("coming@fp32",)


def test_every_use_is_counted_and_tells_when_it_was(pool):
    for name in "ab":
        hold(pool, name)
    used = pool.entry("a@fp32")
    pool.start_use("a@fp32")
    assert (used.state, used.uses, used.loaded_order, used.used_order) == (Residency.IN_USE, 1, 1, 3)
    pool.start_use("a@fp32")
    assert (used.state, used.uses, used.used_order) == (Residency.IN_USE, 2, 4)
    pool.end_use("a@fp32")
    assert (used.state, used.uses) == (Residency.IN_USE, 1)
    pool.end_use("a@fp32")
    assert (used.state, used.uses, used.used_order) == (Residency.RESIDENT, 0, 4)
    pool.check_invariants()


@pytest.mark.parametrize(
    ("step", "move"),
    [
        (ModelPool.loaded, Move.LOADED),
        (ModelPool.load_failed, Move.LOAD_FAILED),
        (ModelPool.start_use, Move.START_USE),
    ],
)
def test_a_copy_that_is_not_there_makes_no_move(pool, step, move):
    with pytest.raises(IllegalMove) as refused:
        step(pool, "a@fp32")
    assert refusal(refused) == ("a@fp32", Residency.ABSENT, move)


def test_a_copy_in_use_does_not_leave_and_keeps_its_bytes(pool):
    hold(pool, "a")
    pool.start_use("a@fp32")
    with pytest.raises(IllegalMove) as refused:
        pool.evict("a@fp32")
    assert refusal(refused) == ("a@fp32", Residency.IN_USE, Move.EVICT)
    assert pool.used_bytes == 3


def test_an_executor_may_take_what_the_others_are_not_owed(pool):
    pool.guaranteed_workspace.update({0: 6, 1: 5, 2: 3})
    assert [pool.workspace_for(executor) for executor in (0, 1, 2)] == [12, 11, 9]
    pool.take_workspace(0, 12)
    assert [pool.workspace_for(executor) for executor in (1, 2)] == [5, 3]
    pool.take_workspace(1, 4)  # less than it is owed: what is left of that is still its own
    assert pool.workspace_for(2) == 20 - 16 - 1
    pool.return_workspace(0)
    assert (pool.workspace_used_bytes, pool.workspace_for(2)) == (4, 20 - 4 - 6 - 1)
    pool.check_invariants()


def test_a_workspace_beyond_what_may_be_taken_is_refused_with_the_sizes(pool):
    pool.guaranteed_workspace.update({0: 6, 1: 5})
    with pytest.raises(MemoryExceeded, match="memory host workspace: 16 bytes wanted, 15 free"):
        pool.take_workspace(0, 16)
    assert pool.workspace_used_bytes == 0
    pool.take_workspace(0, 15)
    assert pool.statistics().workspace_used_bytes == 15


def weights_miscounted(pool):
    pool.used_bytes += 1


def weights_over_budget(pool):
    pool.spec = PoolSpec("host", expert_bytes=14, workspace_bytes=20)


def workspaces_miscounted(pool):
    pool.workspace_used_bytes += 1


def workspaces_over_budget(pool):
    pool.spec = PoolSpec("host", expert_bytes=30, workspace_bytes=7)


def a_part_lost(pool):
    pool.entry("a@fp32").footprint = Footprint(2, (SharedTensors("other", 10),))


def a_use_too_few(pool):
    pool.entry("b@fp32").uses = -1


def a_use_without_its_state(pool):
    pool.entry("b@fp32").uses = 1


def a_state_without_its_use(pool):
    pool.entry("b@fp32").state = Residency.IN_USE


def a_copy_that_is_listed_and_absent(pool):
    pool.entry("b@fp32").state = Residency.ABSENT


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (weights_miscounted, "^host: ledger is not the sum of its copies$"),
        (weights_over_budget, "^host: weights over budget$"),
        (workspaces_miscounted, "^host: workspace miscounted$"),
        (workspaces_over_budget, "^host: workspace over budget$"),
        (a_part_lost, "^host: shared tensors miscounted$"),
        (a_use_too_few, "^host: b@fp32 has negative uses$"),
        (a_use_without_its_state, "^host: b@fp32 is resident with 1 uses$"),
        (a_state_without_its_use, "^host: b@fp32 is in use with 0 uses$"),
        (a_copy_that_is_listed_and_absent, "^host: b@fp32 is listed and absent$"),
    ],
)
def test_a_ledger_that_does_not_add_up_is_told_by_name(pool, damage, told):
    hold(pool, "a", ON_TRUNK)
    hold(pool, "b")
    pool.take_workspace(0, 8)
    pool.check_invariants()
    damage(pool)
    with pytest.raises(AssertionError, match=told):
        pool.check_invariants()


def test_budgets_that_are_used_to_the_last_byte_are_in_order(pool):
    hold(pool, "a", Footprint(30))
    pool.take_workspace(0, 20)
    pool.check_invariants()


def test_an_expert_needs_its_own_bytes_and_shared_parts_beside_everything_pinned():
    experts = [
        ("pin", Footprint(5, (TRUNK,)), True),
        ("other pin", Footprint(1, (TRUNK,)), True),
        ("sharing", Footprint(6, (TRUNK, NECK)), False),
        ("alone", Footprint(9), False),
    ]
    assert misfits(experts, 15) == {"pin": 16, "other pin": 16, "sharing": 26, "alone": 25}
    assert misfits(experts, 16) == {"sharing": 26, "alone": 25}
    assert misfits(experts, 25) == {"sharing": 26}
    assert misfits(iter(experts), 26) == {}


@pytest.mark.parametrize("sizes", [(9, 4), (4, 9)])
def test_an_expert_that_is_there_in_several_forms_needs_its_largest(sizes):
    assert misfits([("two forms", Footprint(size), False) for size in sizes], -1) == {"two forms": 9}


def test_a_budget_is_lowered_to_what_lies_there_and_raised_to_what_was_planned_at_most():
    pool = ModelPool(PoolSpec("host", 10, 0))
    pool.start_load("a", "a", Footprint(4), pinned=False)
    pool.set_budget(4)
    assert (pool.expert_bytes, pool.free_bytes, pool.missing_bytes) == (4, 0, 6)
    with pytest.raises(MemoryExceeded) as refused:
        pool.set_budget(3)
    assert (refused.value.pool, refused.value.wanted_bytes, refused.value.free_bytes) == ("host", 4, 3)
    pool.set_budget(10)
    assert pool.missing_bytes == 0
    with pytest.raises(MemoryExceeded) as refused:
        pool.set_budget(11)
    assert (refused.value.pool, refused.value.wanted_bytes, refused.value.free_bytes) == ("host", 11, 10)


@pytest.fixture
def leasing():
    return ModelPool(PoolSpec("host", 0, 0, lease_bytes=10))


def test_leases_are_counted_per_request_and_never_exceed_their_share(leasing):
    leasing.take_lease(1, 7)
    leasing.take_lease(2, 3)
    with pytest.raises(MemoryExceeded):
        leasing.take_lease(3, 1)
    assert (leasing.statistics().lease_bytes, leasing.statistics().lease_used_bytes) == (10, 10)
    leasing.return_lease(1)
    assert (leasing.free_lease_bytes, set(leasing.lessees)) == (7, {2})
    leasing.check_invariants()


def test_a_request_has_one_lease(leasing):
    leasing.take_lease(1, 3)
    with pytest.raises(ValueError, match="request 1 has a lease already"):
        leasing.take_lease(1, 3)
    assert leasing.lease_used_bytes == 3


@pytest.mark.parametrize(("used_bytes", "message"), [(11, "leases over budget"), (4, "leases miscounted")])
def test_leases_that_do_not_add_up_are_found(leasing, used_bytes, message):
    leasing.take_lease(1, 3)
    leasing.lease_used_bytes = used_bytes
    with pytest.raises(AssertionError, match=message):
        leasing.check_invariants()


def test_a_batch_keeps_what_it_needs_of_the_workspace_of_the_one_before():
    pool = ModelPool(PoolSpec("host", 10, 16))
    pool.take_workspace(0, 12)
    pool.keep_workspace(0, 5)
    assert pool.workspace_used_bytes == 5
    pool.check_invariants()
    pool.return_workspace(0)
    assert pool.workspace_used_bytes == 0
