"""Language models larger than their memory, in the agent's own slots: the same tokens, and no byte uncounted."""

import json
import math
import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from safetensors.torch import save_file

from agent.core.effects import Evict, EvictionDecision, StartLoad
from agent.core.engine import Engine
from agent.core.events import Loaded
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Performance, PerformanceMatrix, PoolSpec
from agent.core.policy import PRESETS
from agent.runtime.expert_copy import ExpertCopy, footprint_of
from agent.runtime.loop import LoopOptions, assemble
from agent.runtime.machine.detection import detect
from agent.runtime.machine.memories import EmulatedMemory, HostMemory
from agent.runtime.moe_loads import MoeLoads
from agent.runtime.moe_usage import read_usage
from agent.runtime.slots import SkeletonShelf, SlotStore
from agent.runtime.text_sources import TextSource
from agent.runtime.transfer import PacedLink, Transfers
from experts.errors import LoadError, WeightsCorrupt
from experts.expert import Expert, Precision
from experts.graph import ExpertGraph, RouteStep
from experts.llm.config import parse_spec
from experts.llm.model import LanguageModel, load_model
from experts.llm.names import assemblies
from experts.llm.serving.extents import ModelKeyValues
from experts.llm.serving.generation import GREEDY, Generation, TextRequest
from experts.llm.serving.kv import KvLayout
from experts.llm.token_batch import Chunk, TokenBatch
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from tests.agent.core import worlds

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
CONFIGS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16,
    },
    "pr_moe": {
        "num_experts": [0, 4, 6], "num_experts_per_tok": 1, "norm_topk_prob": False, "residual": "softmax",
        "mlp": "gelu",
    },
}  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3], list(range(60, 30, -1)))
ROOMY = 64 * 1024 * 1024
PATIENCE_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny models gain nothing from more, and wait for one another on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A model of each family, packed; and one more Mixtral of another seed."""
    folder = tmp_path_factory.mktemp("models")
    experts = [write_model(folder, name, seed) for name, seed in [*((name, 0) for name in CONFIGS), ("mixtral", 1)]]
    segments = SegmentStore(folder / "packed")
    report = pack_line(experts, lambda _: {Precision.FP32}, segments)
    assert not report.failed
    yield segments, [ExpertCopy(f"{one.id}@fp32", one, report.packed[one.id][Precision.FP32]) for one in experts]
    segments.close()


def write_model(folder, family, seed):
    values = {"model_type": family, **SIZES, **CONFIGS[family]}
    directory = folder / f"{family}-{seed}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values), "utf-8")
    generator = torch.Generator().manual_seed(seed)
    parts = [part for one in assemblies(parse_spec(values, "tiny")) for part in one.forms[0]]
    drawn = {part.name: torch.randn(part.shape, generator=generator) for part in parts}
    tensors = {name: 1 + 0.1 * one if "norm" in name else one / math.sqrt(one.shape[-1]) for name, one in drawn.items()}
    save_file(tensors, directory / "model.safetensors")
    return Expert(f"llm/{family}-{seed}", "llm", directory, (), None)


class Yard:
    """One memory with transfers into it; copies that hold ``places`` moe_experts at a time, or so many by expert."""

    def __init__(self, packed, places, *, device=None, budget_bytes=ROOMY, rate=None, kept=None):
        self.segments, copies = packed
        wanted = places if isinstance(places, dict) else dict.fromkeys((copy.expert.id for copy in copies), places)
        self.copies = {
            copy.expert.id: replace(copy, moe_places=wanted[copy.expert.id])
            for copy in copies
            if copy.expert.id in wanted
        }
        self.link = PacedLink(rate)
        self.loads = MoeLoads(self.segments, self.link, HostMemory(), kept=kept)
        memory = HostMemory() if device is None else device
        self.store = SlotStore(memory, budget_bytes, ("cpu",), SkeletonShelf(self.segments), self.loads)
        self.answers = SimpleQueue()
        by_name = {copy.name: copy for copy in self.copies.values()}
        self.transfers = Transfers(
            {"pool": self.store}, self.segments, by_name, HostMemory(), self.answers.put, link=self.link
        )
        self.count = 0

    def load(self, expert):
        self.count += 1
        self.transfers.start_load(StartLoad(self.count, expert, f"{expert}@fp32", SSD, "pool", 0))
        assert self.answers.get(timeout=PATIENCE_S) == Loaded(self.count)

    def evict(self, expert):
        self.transfers.evict(Evict(expert, f"{expert}@fp32", "pool", 0, 0, EvictionDecision("", 0, ())))

    def greedy(self, expert):
        with self.store.using(f"{expert}@fp32") as slot:
            return greedy(slot.skeleton("cpu").model)

    def statistics(self, expert):
        with self.store.using(f"{expert}@fp32") as slot:
            return slot.moe.statistics()

    def close(self):
        self.transfers.stop()
        self.store.close()


@pytest.fixture
def yard(packed, tmp_path):
    made = []

    def make(places, **options):
        made.append(Yard(packed, places, kept=tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def greedy(model, count=5):
    key_values = ModelKeyValues(model.spec, model.dtype)
    chunks = [Chunk(number, 0, prompt) for number, prompt in enumerate(PROMPTS)]
    tokens = [[] for _ in PROMPTS]
    for _ in range(count):
        best = model.forward(TokenBatch.of(chunks), key_values).argmax(dim=-1).tolist()
        for number, token in enumerate(best):
            tokens[number].append(token)
        chunks = [Chunk(one.sequence, one.first + len(one.tokens), [best[one.sequence]]) for one in chunks]
    return tokens


def expected(yard, expert):
    return greedy(load_model(yard.copies[expert].expert.weights, expert))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("places", [1, 3, 100, None])
def test_it_says_what_it_says_resident_and_takes_what_is_counted(yard, family, places):
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
        assert statistics.used_bytes < footprint_of(copy.packed).total_bytes


def test_another_model_over_the_same_bytes_finds_nothing_of_the_first(yard):
    one = yard(4)
    first, second = "llm/mixtral-0", "llm/mixtral-1"
    for expert in (first, second, first):
        one.load(expert)
        assert one.greedy(expert) == expected(one, expert)
        one.evict(expert)
    assert one.store.statistics().regions_allocated == 1
    assert one.store.statistics().used_bytes == 0


def test_a_copy_that_comes_back_knows_what_it_learned(yard):
    one, expert = yard(4), "llm/mixtral-0"
    one.load(expert)
    one.greedy(expert)
    one.evict(expert)
    one.load(expert)
    with one.store.using(f"{expert}@fp32") as slot:
        known = slot.moe._cache.usage()
    assert max(known.values()) > 0
    assert one.greedy(expert) == expected(one, expert)


def test_both_at_once_beside_each_other(yard):
    one = yard(2)
    for expert in ("llm/mixtral-0", "llm/qwen3_moe-0"):
        one.load(expert)
    found = {}
    threads = [
        threading.Thread(target=lambda expert=expert: found.update({expert: one.greedy(expert)}))
        for expert in ("llm/mixtral-0", "llm/qwen3_moe-0")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {expert: expected(one, expert) for expert in found}
    assert len(found) == 2


class TestOnADevice:
    @pytest.mark.parametrize("places", [1, 3, 100])
    def test_it_says_the_same(self, yard, places):
        one = yard(places, device=EmulatedMemory(ROOMY))
        for expert in ("llm/mixtral-0", "llm/pr_moe-0"):
            one.load(expert)
            assert one.greedy(expert) == expected(one, expert)

    def test_a_region_that_is_moved_keeps_what_lies_in_its_places(self, yard):
        """The first leaves a hole below the second; a third one needs it and the end behind the second together."""
        places = {"llm/mixtral-1": 6, "llm/mixtral-0": 6, "llm/pr_moe-0": 200}
        sizes = {copy.expert.id: copy.footprint.total_bytes for copy in yard(places).copies.values()}
        budget_bytes = sizes["llm/mixtral-0"] + sizes["llm/pr_moe-0"]
        one = yard(places, device=EmulatedMemory(budget_bytes), budget_bytes=budget_bytes)
        for expert in ("llm/mixtral-1", "llm/mixtral-0"):
            one.load(expert)
        before = one.greedy("llm/mixtral-0")
        hits = one.statistics("llm/mixtral-0").cache.residency.hits
        one.evict("llm/mixtral-1")
        one.load("llm/pr_moe-0")
        assert one.store.statistics().regions_moved == 1
        assert one.greedy("llm/mixtral-0") == before == expected(one, "llm/mixtral-0")
        assert one.statistics("llm/mixtral-0").cache.residency.hits > hits


class TestTheLink:
    def test_each_block_takes_its_time_on_a_paced_link(self, yard):
        one, expert = yard(2, rate=1e12), "llm/mixtral-0"
        one.load(expert)
        reserved = []
        reserve = one.link.reserve
        one.link.reserve = lambda size_bytes: (reserved.append(size_bytes), reserve(size_bytes))[1]
        one.greedy(expert)
        assert set(reserved) == {one.copies[expert].block_bytes}
        assert len(reserved) >= one.statistics(expert).cache.loads > 0

    def test_nothing_is_loaded_ahead_while_the_engine_waits(self, yard):
        one, expert = yard(4), "llm/mixtral-0"
        one.load(expert)
        with one.link.demanded():
            assert one.greedy(expert) == expected(one, expert)
        assert one.statistics(expert).cache.residency.ahead == 0
        one.greedy(expert)
        assert one.statistics(expert).cache.residency.ahead > 0

    def test_whoever_waits_for_a_slow_link_is_told_of_the_end(self, yard):
        one, expert = yard(1), "llm/mixtral-0"
        one.load(expert)
        one.link.bytes_per_s = 1.0
        one.loads._ending.set()
        with pytest.raises(LoadError, match="the agent is stopping"):
            one.greedy(expert)


def test_a_block_that_is_not_what_was_packed_fails_the_pass_and_nothing_else(packed, yard, tmp_path):
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


def test_the_agent_serves_a_model_that_does_not_fit(packed):
    """Engine, ledger, leases, quanta and all: texts of a model whose memory holds a part of it, beside another one."""
    segments, copies = packed
    listed = [replace(copy, moe_places=2) for copy in copies if copy.expert.id in ("llm/mixtral-0", "llm/pr_moe-0")]
    spec = parse_spec({"model_type": "mixtral", **SIZES, **CONFIGS["mixtral"]}, "tiny")
    token_bytes = KvLayout.of(spec, torch.float32).token_bytes
    times = Performance(0.001, 0.002, 4, 1024 * 1024, K_prompt_s=1e-5, K_output_s=1e-3, lease_bytes=token_bytes)
    rows = {copy.expert.id: ExpertProfile(copy.name, times, copy.footprint, {SSD: 0.01}) for copy in listed}
    room_bytes = max(copy.footprint.total_bytes for copy in listed)
    assert room_bytes < min(footprint_of(copy.packed).total_bytes for copy in listed)
    pool = PoolSpec("host", room_bytes, ROOMY, lease_bytes=400 * token_bytes)
    limits = worlds.limits((pool,), load_backoff_s=0.001, quantum_s=0.02)
    graph = ExpertGraph(list(rows), {name: (RouteStep(name, frozenset()),) for name in rows})
    specs = [ExecutorSpec(0, "cpu", "host")]
    matrix, outcomes = PerformanceMatrix({"cpu": rows}), {}
    loop = assemble(
        Engine(graph, matrix, specs, PRESETS["coserve"], limits), replace(detect("cpu"), cores=1), specs, limits,
        {copy.name: copy for copy in listed}, segments, outcomes.__setitem__, LoopOptions(checks_invariants=True),
        matrix, routes=graph,
    )  # fmt: skip
    loop.start()
    try:
        asked = [(name, prompt, Reader()) for prompt in PROMPTS for name in rows]
        for name, prompt, reader in asked:
            request = TextRequest(Generation(tuple(prompt), 5, GREEDY), reader)
            loop.submit(TextSource(lambda _, request=request: request), expert=name)
        assert loop.wait_until_idle(PATIENCE_S)
        wanted = {copy.expert.id: greedy(load_model(copy.expert.weights, copy.expert.id)) for copy in listed}
        for name, prompt, reader in asked:
            assert reader.tokens == wanted[name][PROMPTS.index(prompt)]
        assert len(outcomes) == len(asked)
    finally:
        loop.stop()


class Reader:
    def __init__(self):
        self.tokens = []

    def write(self, sampled):
        self.tokens.append(sampled.token)
        return False


def test_a_model_without_a_cache_is_bound_as_ever(yard):
    one = yard(None)
    one.load("llm/mixtral-0")
    with one.store.using("llm/mixtral-0@fp32") as slot:
        assert slot.moe is None
        assert isinstance(slot.skeleton("cpu").model, LanguageModel)


def test_what_was_counted_in_serving_is_known_of_these_weights_after_the_next_start(yard, tmp_path, caplog):
    one, expert = yard(4), "llm/mixtral-0"
    one.load(expert)
    one.greedy(expert)
    one.evict(expert)
    copy = one.copies[expert]
    assert max(read_usage(tmp_path, copy).values()) > 0
    first, *others = copy.packed.moe_layers
    retrained = replace(copy, packed=replace(copy.packed, shared=(replace(first, sha256="other"), *others)))
    assert read_usage(tmp_path, retrained) == {}
    (file,) = tmp_path.glob("*.json")
    for damaged in ("{", "[]", '{"usage": []}'):
        file.write_text(damaged)
        assert read_usage(tmp_path, copy) == {}
    assert caplog.text.count("counted anew") == 3
