"""Slots of many sizes in one arena: what the ledger has room for is loaded, and what is moved for it runs as before."""

import threading
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.core.events import BatchFailed
from agent.core.performance import ExecutorSpec
from agent.core.request import Batch, Portion
from agent.faults.errors import CopyDamaged
from agent.runtime.executor import BatchExecutor, Shared
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.images.preparation import Preparation
from agent.runtime.machine.memories import EmulatedMemory
from agent.runtime.machine.threads import Team
from agent.runtime.texts import RunningTexts
from agent.runtime.weights.skeletons import SkeletonShelf
from agent.runtime.weights.slots import SlotStore
from experts.backends import backend_for
from experts.expert import Precision
from experts.llm.serving.iteration import OutputLengths
from experts.packed.weights import SLOT_QUANTUM_BYTES, SegmentStore
from tests.experts.conftest import ExpertFiles, packed_in
from tests.waiting import until

PATIENCE_S = 30.0
QUANTA = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 5, "f": 6}  # each fake's own size
TRUNKED = {"g": 1, "h": 2}  # two that share a trunk beside
TRUNK_QUANTA = 4


class Fakes:
    """Packed fakes of whole quanta: a fake refuses to run over bytes that are not its own."""

    def __init__(self, directory):
        self.segments = SegmentStore(directory / "packed")
        files, trunk = ExpertFiles(directory), {"shared": {"trunk": TRUNK_QUANTA * SLOT_QUANTUM_BYTES}}
        experts = [
            files.fake(name, quanta * SLOT_QUANTUM_BYTES, label="ok", **trunk if name in TRUNKED else {})
            for name, quanta in (QUANTA | TRUNKED).items()
        ]
        packed = packed_in(self.segments, experts, Precision.FP32)
        self.copies = {each.id: ExpertCopy(each.id, each, packed[each.id][Precision.FP32]) for each in experts}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    fakes = Fakes(tmp_path_factory.mktemp("fakes"))
    yield fakes
    fakes.segments.close()


class Bench:
    """A store over an emulated arena, and what the ledger counts for it."""

    budget_bytes = 12 * SLOT_QUANTUM_BYTES

    def __init__(self, fakes):
        self.fakes = fakes
        self.memory = EmulatedMemory(self.budget_bytes)
        self.store = SlotStore(self.memory, self.budget_bytes, ("cpu",), SkeletonShelf(fakes.segments))

    def has_room(self, name):
        resident = {*self.store.ready(), name}
        segments = {s.sha256: s.slot_bytes for each in resident for s in self.fakes.copies[each].packed.segments}
        return sum(segments.values()) <= self.budget_bytes

    def load(self, name):
        slot = self.store.reserve(self.fakes.copies[name])
        self.store.materialise(slot)
        for segment in slot.copy.packed.segments:
            region = slot.region_of(segment)
            content = np.fromfile(self.fakes.segments.segment_path(segment.sha256), dtype=np.uint8)
            region.tensor("cpu")[: content.size].numpy()[:] = content
        self.store.commit(slot)

    def check(self):
        """Everything that is resident runs, over its own bytes."""
        for name in self.store.ready():
            with self.store.using(name) as slot:
                expert = slot.copy.expert
                prepared = backend_for("fake").prepare(expert, np.zeros((16, 16, 3), dtype=np.uint8))
                slot.skeleton("cpu").infer(expert, [prepared])
        assert self.memory.held_bytes <= self.budget_bytes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(sorted(QUANTA | TRUNKED)), max_size=40))
def test_load_finds_room_wherever_the_ledger_has_some(fakes, names):
    bench = Bench(fakes)
    for name in names:
        if name in bench.store.ready():
            bench.store.evict(name)
        elif bench.has_room(name):
            bench.load(name)
        bench.check()
    bench.store.close()


class Fault(Exception):
    """A device's, in the middle of a move."""


class Countdown:
    """``steps`` copies and bindings go well, the next one fails; None: all go well."""

    steps = None

    def tick(self):
        if self.steps is None:
            return
        self.steps -= 1
        if self.steps < 0:
            self.steps = None
            raise Fault


class FaultyMemory(EmulatedMemory):
    countdown = Countdown()

    def _copy(self, pairs):
        def each():
            for pair in pairs:
                self.countdown.tick()
                yield pair

        super()._copy(each())


class FaultySkeleton:
    def __init__(self, skeleton, countdown):
        self._skeleton, self._countdown, self.infer = skeleton, countdown, skeleton.infer

    def bind(self, tensors):
        self._countdown.tick()
        self._skeleton.bind(tensors)


class FaultyShelf(SkeletonShelf):
    countdown = Countdown()

    def take(self, copy, device):
        skeleton = super().take(copy, device)
        return skeleton if isinstance(skeleton, FaultySkeleton) else FaultySkeleton(skeleton, self.countdown)


class FaultyBench(Bench):
    """Copies and bindings fail as told. A damaged copy is evicted, as the Engine does after a batch that says so."""

    def __init__(self, fakes):
        super().__init__(fakes)
        self.countdown, self.damaged = Countdown(), 0
        self.memory.close()
        self.memory, shelf = FaultyMemory(self.budget_bytes), FaultyShelf(fakes.segments)
        self.memory.countdown = shelf.countdown = self.countdown
        self.store = SlotStore(self.memory, self.budget_bytes, ("cpu",), shelf)

    def attempt(self, name, steps):
        self.countdown.steps = steps
        try:
            self.load(name)
        except Fault:
            self.store.abandon(self.store._slots[name])
        self.countdown.steps = None

    def check(self):
        for name in self.store.ready():
            try:
                with self.store.using(name):
                    pass
            except CopyDamaged:
                self.damaged += 1
                self.store.evict(name)
        super().check()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(sorted(QUANTA | TRUNKED)), st.none() | st.integers(0, 12)), max_size=30))
def test_move_that_fails_at_any_step_leaves_no_copy_over_wrong_bytes(fakes, steps):
    bench = FaultyBench(fakes)
    for name, fails_after in [*steps, *((name, None) for name in ("e", "f", "a"))]:
        if name in bench.store.ready():
            bench.store.evict(name)
        elif bench.has_room(name):
            bench.attempt(name, fails_after)
        bench.check()
    bench.store.close()


def in_the_background(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_stilled(bench):
    return bench.store._stilled is not None


@pytest.fixture
def crowded(fakes):
    """d's 5 quanta free, then a and b, then 4 free: f's 6 are there once a and b are moved."""
    bench = Bench(fakes)
    for name in ("d", "a", "b"):
        bench.load(name)
    bench.store.evict("d")
    yield bench
    bench.store.close()


def test_move_waits_for_a_running_batch_and_the_next_batch_waits_for_the_move(crowded):
    with crowded.store.using("a") as slot:
        before = slot.region
        loading = in_the_background(lambda: crowded.load("f"))
        until(lambda: is_stilled(crowded))
        assert slot.region is before
        with crowded.store.using("b"):  # only what is to be moved now is kept from being used
            pass
        stood_on = []

        def run_next():
            with crowded.store.using("a") as later:
                stood_on.append(later.region)

        next_batch = in_the_background(run_next)
        next_batch.join(0.05)  # time enough to begin, were it not kept from it
    loading.join(PATIENCE_S)
    next_batch.join(PATIENCE_S)
    assert stood_on == [slot.region]
    assert slot.region is not before
    crowded.check()


def test_copy_evicted_during_a_move_is_moved_as_a_spare_and_reused(crowded):
    crowded.load("c")
    with crowded.store.using("a"):
        loading = in_the_background(lambda: crowded.load("f"))
        until(lambda: is_stilled(crowded))
        crowded.store.evict("c")
    loading.join(PATIENCE_S)
    assert crowded.store.statistics().regions_moved == 3
    crowded.load("c")
    crowded.check()
    assert sorted(crowded.store.ready()) == ["a", "b", "c", "f"]


class LoadBetween:
    """A store as an executor has it, where a load comes as soon as anything is in use, and stills a region."""

    def __init__(self, bench, name):
        self._bench, self._name, self.loading = bench, name, None

    def using(self, copy):
        return self._load_after(self._bench.store.using(copy))

    def using_together(self, copies):
        return self._load_after(self._bench.store.using_together(copies))

    @contextmanager
    def _load_after(self, use):
        with use as slots:
            if self.loading is None:
                self.loading = in_the_background(lambda: self._bench.load(self._name))
                until(lambda: is_stilled(self._bench))
            yield slots


def test_quantum_over_a_shared_trunk_and_a_load_that_moves_it_do_not_deadlock(fakes):
    bench = Bench(fakes)
    for name in ("c", "g", "h"):  # 3, the trunk's 4 and 1, 2
        bench.load(name)
    bench.store.evict("c")
    store, answers, preparation = LoadBetween(bench, "d"), SimpleQueue(), Preparation(1)
    shared = Shared(preparation, answers.put, RunningTexts({}, OutputLengths()))
    executor = BatchExecutor(ExecutorSpec(0, "cpu", "host"), store, Team(1), shared)
    executor.start()
    batch = Batch(1, 0, "g", "g", (1, 2), 0, 0.05, (Portion("g", "g", (1,)), Portion("h", "h", (2,))))
    executor.start_quantum(batch, [fakes.copies["g"], fakes.copies["h"]])
    assert isinstance(answers.get(timeout=PATIENCE_S), BatchFailed)  # fakes write no texts: it came that far
    store.loading.join(PATIENCE_S)
    assert sorted(bench.store.ready()) == ["d", "g", "h"]
    bench.check()
    executor.stop()
    preparation.stop()
    bench.store.close()
