"""Language models larger than their memory, in the agent's own slots: the same tokens, and no byte uncounted."""

from contextlib import ExitStack, closing
from dataclasses import replace
from queue import SimpleQueue
from threading import Event

import pytest

from agent.core.effects import StartLoad
from agent.core.events import Loaded
from agent.core.performance import SSD
from agent.runtime.machine.box import exclusive
from agent.runtime.machine.memories import EmulatedMemory, HostMemory
from agent.runtime.weights import moe_loads
from agent.runtime.weights.drive import Drive, PacedLink
from agent.runtime.weights.moe_loads import MoeLoads, read_usage
from agent.runtime.weights.skeletons import SkeletonShelf
from agent.runtime.weights.slots import SlotStore
from agent.runtime.weights.transfer import Transfers, load_threads
from experts.errors import LoadError, WeightsCorrupt
from experts.expert import Expert
from experts.llm.model import load_model
from experts.packed.weights import SegmentStore
from tests.agent.runtime.conftest import copies_of
from tests.experts.conftest import one_thread  # noqa: F401  a fixture
from tests.experts.llm.conftest import ModelFiles, greedy
from tests.waiting import until

FAMILIES = {"mixtral": {}, "qwen3_moe": {"num_experts": 6, "decoder_sparse_step": None}, "pr_moe": {}}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3], list(range(60, 30, -1)))
ROOMY = 64 * 1024 * 1024
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A model of each family, packed; and one more Mixtral of another seed."""
    folder = tmp_path_factory.mktemp("models")
    experts = [write_model(folder, name, seed) for name, seed in [*((name, 0) for name in FAMILIES), ("mixtral", 1)]]
    segments = SegmentStore(folder / "packed")
    yield segments, list(copies_of(experts, segments).values())
    segments.close()


def write_model(folder, family, seed):
    files = ModelFiles(folder)
    values = files.config(family, **FAMILIES[family])
    directory = files.write(values, files.tensors(values, seed=seed)).rename(folder / f"{family}-{seed}")
    return Expert(f"llm/{family}-{seed}", "llm", directory, (), None)


class Yard:
    """One memory with transfers into it; copies that hold ``places`` moe_experts at a time, or so many by expert."""

    def __init__(self, packed, places, *, device=None, budget_bytes=ROOMY, kept=None):
        self.segments, copies = packed
        wanted = places if isinstance(places, dict) else dict.fromkeys((copy.expert.id for copy in copies), places)
        held = {copy.expert.id: copy for copy in copies if copy.expert.id in wanted}
        self.copies = {expert: replace(copy, moe_places=wanted[expert]) for expert, copy in held.items()}
        self.link = PacedLink(None)
        drive = Drive(self.segments, HostMemory(), self.link)
        self.loads = MoeLoads(drive, kept=kept)
        self.store = SlotStore(device or HostMemory(), budget_bytes, ("cpu",), SkeletonShelf(self.segments), self.loads)
        self.answers = SimpleQueue()
        by_name = {copy.name: copy for copy in self.copies.values()}
        self.transfers = Transfers(drive, {"pool": self.store}, by_name, self.answers.put, load_threads(4, 1))
        self.count = 0

    def load(self, expert):
        self.count += 1
        self.transfers.start_load(StartLoad(self.count, expert, f"{expert}@fp32", SSD, "pool", 0))
        assert self.answers.get(timeout=PATIENCE_S) == Loaded(self.count)

    def evict(self, expert):
        self.store.evict(f"{expert}@fp32")

    def greedy(self, expert):
        with self.store.using(f"{expert}@fp32") as slot:
            return greedy(slot.skeleton("cpu").model, PROMPTS, 5)[0]

    def statistics(self, expert):
        with self.store.using(f"{expert}@fp32") as slot:
            return slot.moe.statistics()

    def close(self):
        self.transfers.stop()
        self.store.close()


@pytest.fixture
def yard(packed, tmp_path):
    with ExitStack() as opened:
        yield lambda places, **options: opened.enter_context(closing(Yard(packed, places, kept=tmp_path, **options)))


def expected(yard, expert):
    return greedy(load_model(yard.copies[expert].expert.weights, expert), PROMPTS, 5)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("places", [1, 3, 100, None])
def test_moe_model_answers_as_a_resident_one_within_the_counted_bytes(yard, family, places):
    one, expert = yard(places), f"llm/{family}-0"
    one.load(expert)
    assert one.greedy(expert) == expected(one, expert)
    statistics, copy = one.store.statistics(), one.copies[expert]
    assert statistics.used_bytes == copy.footprint.total_bytes
    held = sum(slot.region.size_bytes for slot in one.store._slots.values())
    held += sum(part.region.size_bytes for part in one.store._parts.values())
    assert held == statistics.used_bytes
    assert (statistics.moe_experts.bytes_loaded > 0) is (places is not None)
    assert statistics.moe_experts.bytes_loaded % copy.block_bytes == 0
    one.evict(expert)
    assert one.store.statistics().moe_experts == statistics.moe_experts
    if places == 1:
        assert statistics.used_bytes < replace(copy, moe_places=None).footprint.total_bytes


def test_moe_model_in_reused_memory_finds_nothing_of_the_previous_one(yard):
    one = yard(4)
    first, second = "llm/mixtral-0", "llm/mixtral-1"
    for expert in (first, second, first):
        one.load(expert)
        assert one.greedy(expert) == expected(one, expert)
        one.evict(expert)
    assert (one.store.statistics().regions_allocated, one.store.statistics().used_bytes) == (1, 0)


class Metal(EmulatedMemory):
    def _copy(self, pairs):
        with exclusive("mps"):
            super()._copy(pairs)


def test_pass_that_has_metal_for_itself_lets_the_loads_that_it_waits_for_copy(yard, monkeypatch):
    monkeypatch.setattr(moe_loads, "MpsMemory", Metal)
    one, expert = yard(2, device=Metal(ROOMY)), "llm/mixtral-0"
    one.load(expert)
    with exclusive("mps"):
        assert one.greedy(expert) == expected(one, expert)


def test_moved_region_keeps_the_blocks_in_its_places(yard):
    """The first leaves a hole below the second; a third one needs it and the end behind the second together."""
    places = {"llm/mixtral-1": 6, "llm/mixtral-0": 6, "llm/pr_moe-0": 200}
    sizes = {copy.expert.id: copy.footprint.total_bytes for copy in yard(places).copies.values()}
    budget_bytes = sizes["llm/mixtral-0"] + sizes["llm/pr_moe-0"]
    one = yard(places, device=EmulatedMemory(budget_bytes), budget_bytes=budget_bytes)
    for expert in ("llm/mixtral-1", "llm/mixtral-0"):
        one.load(expert)
    before = one.greedy("llm/mixtral-0")
    hits = one.statistics("llm/mixtral-0").hits
    one.evict("llm/mixtral-1")
    one.load("llm/pr_moe-0")
    assert one.store.statistics().regions_moved == 1
    assert one.greedy("llm/mixtral-0") == before == expected(one, "llm/mixtral-0")
    assert one.statistics("llm/mixtral-0").hits > hits


def test_eviction_waits_for_no_file_and_the_next_load_has_later_bytes(yard, monkeypatch):
    one, written, may_write, write = yard(4), Event(), Event(), moe_loads.write_usage

    def write_slowly(*arguments):
        written.set()
        assert may_write.wait(PATIENCE_S)
        write(*arguments)

    monkeypatch.setattr(moe_loads, "write_usage", write_slowly)
    one.load("llm/mixtral-0")
    one.greedy("llm/mixtral-0")
    one.evict("llm/mixtral-0")  # on the loop's thread
    assert written.wait(PATIENCE_S)
    one.transfers.start_load(StartLoad(9, "llm/mixtral-1", "llm/mixtral-1@fp32", SSD, "pool", 0))
    assert one.store.statistics().regions_allocated == 1
    may_write.set()
    assert one.answers.get(timeout=PATIENCE_S) == Loaded(9)
    assert one.greedy("llm/mixtral-1") == expected(one, "llm/mixtral-1")
    assert one.store.statistics().regions_allocated == 1


class TestLink:
    def test_blocks_are_not_loaded_ahead_while_the_engine_waits(self, yard):
        one, expert = yard(4), "llm/mixtral-0"
        one.load(expert)
        with one.link.demanded():
            assert one.greedy(expert) == expected(one, expert)
        assert one.statistics(expert).ahead == 0
        one.greedy(expert)
        assert one.statistics(expert).ahead > 0

    def test_wait_for_a_slow_link_ends_when_the_agent_stops(self, yard):
        one, expert = yard(1), "llm/mixtral-0"
        one.load(expert)
        one.link.bytes_per_s = 1.0
        one.loads._ending.set()
        with pytest.raises(LoadError, match="the agent is stopping"):
            one.greedy(expert)


def test_corrupt_block_fails_its_pass_and_nothing_else(yard):
    one, expert = yard(1), "llm/pr_moe-0"
    one.load(expert)
    path = one.segments.segment_path(one.copies[expert].packed.moe_layers[-1].sha256)
    sound = path.read_bytes()
    try:
        path.write_bytes(bytes(len(sound)))
        with pytest.raises(WeightsCorrupt, match="block"):
            one.greedy(expert)
    finally:
        path.write_bytes(sound)
    assert one.greedy(expert) == expected(one, expert)


def test_moe_usage_is_kept_for_these_weights_over_a_restart(yard, tmp_path, caplog):
    one, expert = yard(4), "llm/mixtral-0"
    one.load(expert)
    one.greedy(expert)
    one.evict(expert)
    copy = one.copies[expert]
    until(lambda: read_usage(tmp_path, copy))
    assert max(read_usage(tmp_path, copy).values()) > 0
    first, *others = copy.packed.moe_layers
    retrained = replace(copy, packed=replace(copy.packed, shared=(replace(first, sha256="other"), *others)))
    assert read_usage(tmp_path, retrained) == {}
    (file,) = tmp_path.glob("*.json")
    for damaged in ("{", "[]", '{"usage": []}'):
        file.write_text(damaged)
        assert read_usage(tmp_path, copy) == {}
    assert caplog.text.count("counted again") == 3
