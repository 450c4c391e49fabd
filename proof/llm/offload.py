"""Half of a model's moe_experts in memory, alternating with all of them in memory.

All ways run over the agent's path: packed files, slots, loads past the page cache into places of the copy's region.
Gates choose by Zipf's law, each layer's in another order, so that only this skew helps the cache. Tokens are drawn, not
sampled: a random model that reads its own words soon repeats itself, and would need few experts.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from agent.core.effects import StartLoad
from agent.core.events import Loaded
from agent.core.performance import HOST, SSD
from agent.runtime.executor import model_of
from agent.runtime.expert_copy import ExpertCopy, moe_experts_of
from agent.runtime.machine.memories import HostMemory
from agent.runtime.weights.drive import Drive, PacedLink
from agent.runtime.weights.moe_loads import MoeLoads
from agent.runtime.weights.skeletons import SkeletonShelf
from agent.runtime.weights.slots import SlotStore
from agent.runtime.weights.transfer import Transfers, load_threads
from experts.expert import Expert, Precision
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.tiers.moe_experts import MoeExpert
from experts.llm.token_batch import Chunk, TokenBatch
from experts.packed.weights import SegmentStore
from profiler.bench.measured import Plan, at_least, by_turns
from profiler.workload.generated_line import packed_or_raised
from proof.llm.figures import Figure, LlmFindings, median_of
from proof.llm.random_models import write_skewed_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from experts.llm.tiers.moe_experts import MoeStatistics
    from experts.packed.weights import PackedExpert
    from proof.llm.random_models import QwenShape

TARGET_RATIO = 0.5
HELD_SHARE = 0.5
EXPERT = "llm/offloaded"
RESIDENT, OFFLOADED = f"{EXPERT}@all", f"{EXPERT}@half"
ALL, HALF, UNPREDICTED = "all at hand", "half", "half, nothing loaded ahead"
ROWS, PROMPT, OUTPUT = 4, 64, 64  # texts at a time, tokens read, tokens written
ZIPF = 1.0
TOLERANCE = 1e-3


def measure_offload(
    directory: Path, shape: QwenShape, rounds: int, precision: Precision = Precision.FP32, least: float = TARGET_RATIO
) -> LlmFindings:
    """Write a model into ``directory``, which the caller removes, pack it, and run it all ways.

    Raises ValueError where their logits differ. Needs three times the model's bytes of disk.
    """
    weights, shares = write_skewed_model(directory / "model", shape, ZIPF)
    expert = Expert(EXPERT, "llm", weights, (), None)
    usage = {MoeExpert(*place): min(shape.per_token * share, 1.0) for place, share in shares.items()}
    with closing(SegmentStore(directory / "packed")) as segments:
        packed = packed_or_raised(expert, precision, segments)
        with torch.inference_mode(), _memory(segments, expert, packed, usage) as memory:
            texts = torch.randint(shape.vocabulary, (ROWS, PROMPT + OUTPUT), generator=torch.Generator().manual_seed(1))
            ways = {
                ALL: partial(memory.run, RESIDENT, texts),
                HALF: partial(memory.run, OFFLOADED, texts),
                UNPREDICTED: partial(memory.run_unpredicted, OFFLOADED, texts),
            }
            times = by_turns(ways, Plan(rounds, warming_up=1))
            counted = memory.statistics()
    results = [result for each in times.values() for result in each.results]
    difference = max(float((logits - results[0]).abs().max()) for logits in results)
    if difference > TOLERANCE:
        raise ValueError(f"with half of its experts the model's logits differ by {difference:.2g}")
    rates = {way: [ROWS * (PROMPT + OUTPUT) / one for one in each.seconds] for way, each in times.items()}
    needs = counted.hits + counted.late + counted.misses
    figures = [median_of("offloaded experts", way, each, "tokens/s") for way, each in rates.items()]
    per_s = {figure.what: figure.value for figure in figures}
    figures += [
        Figure("offloaded experts", "found in their places", 100 * counted.hits / max(needs, 1), "%"),
        Figure("offloaded experts", "used, of those loaded ahead",
               100 * counted.ahead_used / max(counted.ahead, 1), "%"),
        Figure("offloaded experts", "read a run", counted.bytes_loaded / 1e6 / (2 * rounds + 2), "MB"),
    ]  # fmt: skip
    note = (
        f"offloaded experts: {ROWS} texts at a time, {PROMPT} tokens read and {OUTPUT} written, "
        f"{memory.places} of {memory.moe_experts} moe_experts held, Zipf exponent {ZIPF:g}, {rounds} rounds"
    )
    what = f"{shape.name}, {precision}: half its moe_experts in memory, of resident throughput"
    return LlmFindings(tuple(figures), (at_least(what, per_s[HALF] / per_s[ALL], least),), (note,))


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory with a whole copy, and one with ``places`` for its ``moe_experts``."""

    store: SlotStore
    link: PacedLink
    places: int
    moe_experts: int

    def run(self, copy: str, texts: Tensor) -> Tensor:
        """Read all prompts, then go on by a token of each; the last logits."""
        with self.store.using(copy) as slot:
            model = model_of(slot.skeleton("cpu"))
            key_values = ModelKeyValues(model.spec, model.dtype)
            logits = torch.empty(0)
            for start, end in ((0, PROMPT), *((place, place + 1) for place in range(PROMPT, PROMPT + OUTPUT))):
                chunks = [Chunk(number, start, text) for number, text in enumerate(texts[:, start:end].tolist())]
                logits = model.forward(TokenBatch.of(chunks), key_values)
            return logits.float()

    def run_unpredicted(self, copy: str, texts: Tensor) -> Tensor:
        with self.link.demanded():  # as while the Engine waits for bytes
            return self.run(copy, texts)

    def statistics(self) -> MoeStatistics:
        with self.store.using(OFFLOADED) as slot:
            assert slot.moe is not None, "it was made to hold half"
            return slot.moe.statistics()


@contextmanager
def _memory(
    segments: SegmentStore, expert: Expert, packed: PackedExpert, usage: Mapping[MoeExpert, float]
) -> Iterator[_Memory]:
    moe_experts = moe_experts_of(packed)
    places = int(moe_experts * HELD_SHARE)
    copies = {RESIDENT: ExpertCopy(RESIDENT, expert, packed), OFFLOADED: ExpertCopy(OFFLOADED, expert, packed, places)}
    link, answers, memory = PacedLink(None), SimpleQueue[Any](), HostMemory()
    budget_bytes = sum(copy.footprint.total_bytes for copy in copies.values())
    drive = Drive(segments, memory, link)
    moe_loads = MoeLoads(drive, {OFFLOADED: usage})
    store = SlotStore(memory, budget_bytes, ("cpu",), SkeletonShelf(segments), moe_loads)
    transfers = Transfers(drive, {HOST: store}, copies, answers.put, load_threads(1, torch.get_num_threads()))
    try:
        for copy in copies:
            transfers.start_load(StartLoad(0, EXPERT, copy, SSD, HOST, 0))
            answer = answers.get()
            if not isinstance(answer, Loaded):
                raise ValueError(f"{copy} could not be loaded: {answer}")
        yield _Memory(store, link, places, moe_experts)
    finally:
        transfers.stop()
        store.close()
