"""ModelPool and Leases against plain lists: copies, bytes, leases that can begin; and damage is noticed."""

import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.performance import Footprint, PoolSpec, SharedTensors
from agent.core.pool import MOVES, Leases, ModelPool, Move, Residency, misfits
from agent.faults.errors import IllegalMove
from experts.errors import MemoryExceeded
from tests.agent.core.worlds import histories

TRUNK, NECK = SharedTensors("trunk", 10), SharedTensors("neck", 4)
ON_TRUNK = Footprint(2, (TRUNK,))
FOOTPRINTS = {"a": Footprint(3), "b": ON_TRUNK, "c": Footprint(1, (TRUNK, NECK)), "d": Footprint(9), "e": ON_TRUNK}


@pytest.fixture
def pool():
    return ModelPool(PoolSpec("host", expert_bytes=30, workspace_bytes=20))


def hold(pool, name, footprint):
    pool.start_load(f"{name}@fp32", name, footprint, pinned=False)
    pool.loaded(f"{name}@fp32")


class ListedPool:
    """A memory of 20 bytes and its list, which take the same steps; a step may be refused, and changes nothing then."""

    def __init__(self):
        self.pool = ModelPool(PoolSpec("host", expert_bytes=20, workspace_bytes=0, lease_bytes=10))
        self.copies = {}  # name -> state, uses, is pinned, when it came, when it was last used
        self.budget_bytes, self.lease_bytes, self.peak_bytes, self.order = 20, 10, 0, 0
        self.leases = {}

    def bytes_of(self, names):
        shared = {each for name in names for each in FOOTPRINTS[name].shared}
        return sum(FOOTPRINTS[name].own_bytes for name in names) + sum(each.size_bytes for each in shared)

    def state_of(self, name):
        return self.copies[name][0] if name in self.copies else Residency.ABSENT

    def step(self, move, name, amount):
        state = self.state_of(name)
        if move is Move.END_USE and state is not Residency.IN_USE:
            return  # the Engine ends what it began
        others = [each for each in self.copies if each != name]
        more_bytes = self.bytes_of([*others, name]) - self.bytes_of(others)
        if (state, move) not in MOVES:
            with pytest.raises(IllegalMove) as refused:
                self.make(move, name, amount)
            assert (refused.value.copy, refused.value.state, refused.value.move) == (name, state, move)
            return
        free_bytes = self.budget_bytes - self.bytes_of(self.copies)
        if move is Move.START_LOAD and more_bytes > free_bytes:
            with pytest.raises(MemoryExceeded, match=f"memory host: {more_bytes} bytes wanted, {free_bytes} free"):
                self.make(move, name, amount)
            return
        moved_bytes = self.make(move, name, amount)
        assert moved_bytes == (more_bytes if move in (Move.START_LOAD, Move.EVICT) else None)
        self.move(move, name, bool(amount % 2))

    def make(self, move, name, amount):
        if move is Move.START_LOAD:
            return self.pool.start_load(name, name.upper(), FOOTPRINTS[name], pinned=bool(amount % 2))
        return getattr(self.pool, move.value)(name)

    def move(self, move, name, pinned):
        if move is Move.START_LOAD:
            self.order += 1
            self.copies[name] = [Residency.LOADING, 0, pinned, self.order, self.order]
            self.peak_bytes = max(self.peak_bytes, self.bytes_of(self.copies))
            return
        if move in (Move.LOAD_FAILED, Move.EVICT):
            del self.copies[name]
            return
        copy = self.copies[name]
        copy[1] += (move is Move.START_USE) - (move is Move.END_USE)
        copy[0] = Residency.IN_USE if copy[1] else Residency.RESIDENT
        if move is Move.START_USE:
            self.order += 1
            copy[4] = self.order

    def set_budget(self, name, amount):
        """Of leases with a, of weights else."""
        kind, where, planned, used_bytes = "budget", "host", 20, self.bytes_of(self.copies)
        if name == "a":
            kind, where, planned, used_bytes = "lease", "host leases", 10, sum(self.leases.values())
        set_to, to_bytes = self.pool.set_lease_budget if name == "a" else self.pool.set_budget, planned + 2 - amount
        if used_bytes <= to_bytes <= planned:
            set_to(to_bytes)
            setattr(self, f"{kind}_bytes", to_bytes)
        else:
            wanted = (to_bytes, planned) if to_bytes > planned else (used_bytes, to_bytes)
            with pytest.raises(MemoryExceeded, match="memory {}: {} bytes wanted, {} free".format(where, *wanted)):
                set_to(to_bytes)

    def lease(self, name, amount):
        if name in self.leases:
            with pytest.raises(ValueError, match=f"request {name} has a lease already"):
                self.pool.take_lease(name, amount)
            if (more := amount - self.leases[name]) > self.pool.free_lease_bytes:
                with pytest.raises(MemoryExceeded, match=f"memory host leases: {more} bytes wanted, "):
                    self.pool.grow_lease(name, amount)
            self.pool.return_lease(name)
            del self.leases[name]
        elif amount + sum(self.leases.values()) > self.lease_bytes:
            with pytest.raises(MemoryExceeded, match=f"host leases: {amount} bytes wanted"):
                self.pool.take_lease(name, amount)
        else:
            self.pool.take_lease(name, amount)
            self.leases[name] = amount

    def check(self):
        pool, used_bytes = self.pool, self.bytes_of(self.copies)
        pool.check_invariants()
        assert [
            (
                each.copy,
                each.expert,
                each.footprint,
                [each.state, each.uses, each.pinned, each.loaded_order, each.used_order],
            )
            for each in pool.entries()
        ] == [(name, name.upper(), FOOTPRINTS[name], copy) for name, copy in self.copies.items()]
        there = [name for name, copy in self.copies.items() if copy[0] in (Residency.RESIDENT, Residency.IN_USE)]
        told = pool.statistics()
        assert (told.resident, told.loading) == (tuple(there), tuple(name for name in self.copies if name not in there))
        assert (told.used_bytes, told.peak_used_bytes, told.expert_bytes) == (
            used_bytes,
            self.peak_bytes,
            self.budget_bytes,
        )
        assert (pool.free_bytes, pool.missing_bytes) == (self.budget_bytes - used_bytes, 20 - self.budget_bytes)
        assert (told.lease_used_bytes, pool.free_lease_bytes) == (
            sum(self.leases.values()),
            self.lease_bytes - sum(self.leases.values()),
        )
        assert (pool.lessees, told.lease_bytes) == (self.leases.keys(), self.lease_bytes)
        for name, footprint in FOOTPRINTS.items():
            copy = self.copies.get(name)
            others = [each for each in self.copies if each != name]
            more_bytes = self.bytes_of([*self.copies, name]) - used_bytes if copy is None else footprint.own_bytes
            assert (pool.entry(name) is None, pool.is_resident(name)) == (copy is None, name in there)
            assert pool.is_evictable(name) == (copy is not None and copy[0] is Residency.RESIDENT and not copy[2])
            assert pool.needed_bytes(footprint) == more_bytes
            assert pool.can_reserve(footprint) == (more_bytes <= pool.free_bytes)
            assert copy is None or pool.freed_bytes(name) == used_bytes - self.bytes_of(others)
            assert copy is None or pool.entry(name).is_untouched == (pool.is_evictable(name) and copy[3] == copy[4])
        for each in (TRUNK, NECK):
            assert pool.holders(each.id) == sum(each in FOOTPRINTS[name].shared for name in self.copies)


@given(histories(st.tuples(st.integers(0, 15), st.sampled_from(sorted(FOOTPRINTS)), st.integers(0, 9))))
def test_pool_ledger_equals_a_naive_model_under_any_moves(steps):
    listed = ListedPool()
    listed.check()
    for kind, name, amount in steps:
        legal = [move for state, move in MOVES if state is listed.state_of(name)]
        if kind < 2:
            (listed.lease, listed.set_budget)[kind](name, amount)
        else:
            listed.step(legal[kind % len(legal)] if kind < 13 else list(Move)[amount % len(Move)], name, amount)
        listed.check()


def test_executor_may_take_workspace_not_guaranteed_to_others(pool):
    pool.guaranteed_workspace.update({0: 6, 1: 5, 2: 3})
    assert [pool.workspace_for(executor) for executor in (0, 1, 2)] == [12, 11, 9]
    with pytest.raises(MemoryExceeded, match="memory host workspace: 13 bytes wanted, 12 free"):
        pool.take_workspace(0, 13)
    pool.take_workspace(0, 12)
    assert [pool.workspace_for(executor) for executor in (1, 2)] == [5, 3]
    pool.take_workspace(1, 4)  # less than it is owed: what is left of that is still its own
    assert pool.workspace_for(2) == 20 - 16 - 1
    pool.keep_workspace(0, 5)  # for the next batch
    assert (pool.workspace_used_bytes, pool.statistics().workspace_used_bytes) == (9, 9)
    pool.return_workspace(0)
    assert (pool.workspace_used_bytes, pool.workspace_for(2)) == (4, 20 - 4 - 6 - 1)
    pool.check_invariants()


B = operator.methodcaller("entry", "b@fp32")


def damaged(place=lambda pool: pool, **changes):
    """``place(pool)``: the record that is damaged."""
    return lambda pool: [setattr(place(pool), name, change) for name, change in changes.items()]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damaged(used_bytes=16), "^host: ledger is not the sum of its copies$"),
        (damaged(spec=PoolSpec("host", 14, 20)), "^host: weights over budget$"),
        (damaged(workspace_used_bytes=9), "^host: workspace miscounted$"),
        (damaged(spec=PoolSpec("host", 30, 7)), "^host: workspace over budget$"),
        (
            damaged(operator.methodcaller("entry", "a@fp32"), footprint=Footprint(2, (SharedTensors("other", 10),))),
            "^host: shared tensors miscounted$",
        ),
        (damaged(B, uses=-1), "^host: b@fp32 has negative uses$"),
        (damaged(B, uses=1), "^host: b@fp32 is resident with 1 uses$"),
        (damaged(B, state=Residency.IN_USE), "^host: b@fp32 is in use with 0 uses$"),
        (damaged(B, state=Residency.ABSENT), "^host: b@fp32 is listed and absent$"),
    ],
)
def test_inconsistent_pool_ledger_is_reported_by_name(pool, damage, told):
    hold(pool, "a", ON_TRUNK)
    hold(pool, "b", Footprint(3))
    pool.take_workspace(0, 8)
    pool.check_invariants()
    damage(pool)
    with pytest.raises(AssertionError, match=told):
        pool.check_invariants()


def test_expert_needs_its_own_and_shared_bytes_beside_everything_pinned():
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
def test_expert_in_several_forms_needs_its_largest(sizes):
    assert misfits([("two forms", Footprint(size), False) for size in sizes], -1) == {"two forms": 9}


@pytest.mark.parametrize(("used_bytes", "message"), [(11, "leases over budget"), (4, "leases miscounted")])
def test_inconsistent_leases_are_reported(used_bytes, message):
    pool = ModelPool(PoolSpec("host", 0, 0, lease_bytes=10))
    pool.take_lease(1, 3)
    pool.lease_used_bytes = used_bytes
    with pytest.raises(AssertionError, match=message):
        pool.check_invariants()


# -- who waits for a lease, and who has begun --


class ListedLeases:
    """Leases of two memories of 10 bytes each, and a list of them. A request's number is its place in what waited."""

    def __init__(self, bound_s):
        self.pools = {name: ModelPool(PoolSpec(name, 0, 0, lease_bytes=10)) for name in ("host", "device")}
        self.leases, self.bound_s = Leases(self.pools, bound_s), bound_s
        self.waiting, self.begun, self.last = {}, {}, 0  # request -> memory, bytes, since when

    def wait(self, amount, since_s):
        pool = "device" if amount % 5 == 4 else "host"
        self.leases.wait(self.last, pool, amount, since_s)
        self.waiting[self.last] = pool, amount, since_s
        self.last += 1

    def has_room(self, pool, size_bytes, since_s):
        free_bytes = 10 - sum(size for name, size, _ in self.begun.values() if name == pool)
        older = [size for name, size, at_s in self.waiting.values() if name == pool and at_s + self.bound_s <= since_s]
        return size_bytes <= free_bytes and (not size_bytes or size_bytes + sum(older) <= free_bytes)

    def begin(self, amount, _):
        if self.waiting:
            request = list(self.waiting)[amount % len(self.waiting)]
            free_bytes = self.pools[self.waiting[request][0]].free_lease_bytes
            if self.waiting[request][1] > free_bytes:
                with pytest.raises(MemoryExceeded):
                    self.leases.begin(request)
            else:
                self.leases.begin(request)
                self.begun[request] = self.waiting.pop(request)

    def grow(self, amount, _):
        if self.begun:
            request = list(self.begun)[amount % len(self.begun)]
            pool, size_bytes, since_s = self.begun[request]
            may_grow = amount <= size_bytes or self.has_room(pool, amount - size_bytes, since_s)
            assert self.leases.grow(request, amount, since_s) is may_grow
            if may_grow:
                self.begun[request] = pool, max(amount, size_bytes), since_s

    def end(self, amount, _):
        request = amount % (self.last + 1)  # or one that is not known
        self.leases.end(request)
        self.waiting.pop(request, None)
        self.begun.pop(request, None)

    def check(self):
        leases = self.leases
        leases.check_invariants()
        assert leases.is_any == bool(self.waiting or self.begun)
        assert (leases.waiting, dict(leases.begun)) == (
            self.waiting.keys(), {request: pool for request, (pool, *_) in self.begun.items()}
        )  # fmt: skip
        for request, (pool, size_bytes, since_s) in self.waiting.items():
            assert leases.can_begin(request) is self.has_room(pool, size_bytes, since_s)
        for request, (pool, size_bytes, _) in self.begun.items():
            assert self.pools[pool].leased_bytes(request) == size_bytes


LEASE_STEPS = (ListedLeases.wait, ListedLeases.wait, ListedLeases.begin, ListedLeases.grow, ListedLeases.end)


@given(
    st.sampled_from([5.0, 5.0, math.inf]),
    histories(st.tuples(st.sampled_from(LEASE_STEPS), st.integers(0, 11), st.integers(0, 9))),
)
def test_lease_leaves_room_for_requests_older_by_more_than_the_bound(bound_s, steps):
    listed = ListedLeases(bound_s)
    for step, amount, since_s in steps:
        step(listed, amount, float(since_s))
        listed.check()


def test_lost_request_is_reported():
    listed = ListedLeases(5.0)
    listed.wait(1, 0.0)
    listed.begin(0, 0.0)
    listed.pools["host"].return_lease(0)
    with pytest.raises(AssertionError, match="host: leases taken by"):
        listed.leases.check_invariants()
