"""What a memory holds, byte for byte, and when a skeleton is made or bound."""

import pytest

from agent.faults.errors import IllegalMove
from agent.runtime.machine.memories import HostMemory
from agent.runtime.weights.slots import SkeletonShelf, SlotStore
from experts.backends import backend_for
from experts.errors import LoadError

ROOMY = 64 * 1024 * 1024


@pytest.fixture
def shelf(line):
    return SkeletonShelf(line.segments)


@pytest.fixture
def store(shelf):
    store = SlotStore(HostMemory(), ROOMY, ("cpu",), shelf)
    yield store
    store.close()


def test_a_reserved_slot_counts_before_it_has_memory_and_an_abandoned_one_no_more(line, store):
    slot = store.reserve(line.copy("twin-0"))
    assert store.statistics().used_bytes > 0
    store.abandon(slot)
    assert store.statistics().used_bytes == 0
    line.load(store, "twin-0")


def test_loading_over_an_expert_of_the_same_layout_makes_and_binds_nothing(line, store):
    for name in ("own-0", "own-1", "own-2", "own-0"):
        store.evict(line.load(store, name).copy.name)
    statistics = store.statistics()
    assert (statistics.regions_allocated, statistics.binds) == (1, 1)


def test_a_skeleton_is_bound_again_when_another_shared_region_lies_under_it(line, store, shelf):
    line.load(store, "twin-0")
    line.load(store, "kin-0")
    store.evict("cls/twin-0@fp32")
    assert store.statistics().binds == 2
    expert = line.load(store, "kin-1").copy.expert
    assert (store.statistics().binds, shelf.constructed) == (3, 2)
    image = line.pixels(1)
    with store.using("cls/kin-1@fp32") as slot:
        prepared = backend_for(expert.architecture).prepare(expert, image)
        assert slot.skeleton("cpu").infer(expert, [prepared]) == (line.predict("kin-1", image),)


def test_what_runs_is_not_evicted_and_what_is_on_its_way_neither_run_nor_evicted_nor_loaded_twice(line, store):
    copy = line.load(store, "own-0").copy
    with store.using(copy.name), pytest.raises(IllegalMove, match="in use"):
        store.evict(copy.name)
    store.evict(copy.name)
    with pytest.raises(IllegalMove, match="absent"):
        store.evict(copy.name)
    slot = store.reserve(line.copy("own-0"))
    store.materialise(slot)
    for misuse in (store.evict, lambda name: store.using(name).__enter__()):
        with pytest.raises(IllegalMove, match="loading"):
            misuse("cls/own-0@fp32")
    with pytest.raises(IllegalMove, match="loading"):
        store.reserve(line.copy("own-0"))
    store.abandon(slot)


def test_a_mere_cache_binds_no_skeleton(line, store, shelf):
    store.devices_of = lambda copy: ()
    copy = line.load(store, "own-0").copy
    assert shelf.constructed == 0
    with store.using(copy.name) as slot, pytest.raises(LoadError, match="not bound for cpu"):
        slot.skeleton("cpu")
