"""What it costs to hold half of a model's experts: texts go on from a cache and from all of them at hand, in turns.

Both run over the agent's own path: packed files, slots, loads past the page cache into places of the copy's region. The
model is random but for its gates, which are made so that experts are chosen about as often as Zipf's law says, each
layer's in an order of its own; how often is counted, and told. A token's experts do not depend on the one before, so
the cache is helped by nothing but the skew. The tokens are drawn, not sampled: a random model that reads its own words
soon repeats itself, and would need few experts.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from agent.core.effects import StartLoad
from agent.core.events import Loaded
from agent.core.performance import HOST, SSD
from agent.runtime.executor import RunsTexts
from agent.runtime.expert_copy import ExpertCopy, moe_experts_of
from agent.runtime.machine.memories import HostMemory
from agent.runtime.moe_loads import MoeLoads
from agent.runtime.slots import SkeletonShelf, SlotStore
from agent.runtime.transfer import PacedLink, Transfers
from experts.expert import Expert, Precision
from experts.llm.config import parse_spec
from experts.llm.dispatch import run_moe_experts
from experts.llm.names import assemblies
from experts.llm.serving.extents import ModelKeyValues
from experts.llm.tiers.moe_experts import MoeExpert
from experts.llm.token_batch import Chunk, TokenBatch
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from profiler.bench.software import software
from profiler.targets import at_least

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from agent.runtime.slots import Slot
    from experts.llm.dispatch import MlpWeights, MoeExperts
    from experts.llm.gate import MappingTable
    from experts.llm.model import Model
    from experts.llm.names import Part
    from experts.llm.tiers.offload import OffloadStatistics
    from profiler.targets import Target

TARGET_RATIO = 0.5
HELD_SHARE = 0.5
REPEATS = 5
EXPERT = "llm/offloaded"
RESIDENT, OFFLOADED = f"{EXPERT}@all", f"{EXPERT}@half"
NOISE = 1.28  # the deviation of Gumbel's distribution: with such noise the largest of log shares are drawn by them
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class OffloadShape:
    """A Qwen3-MoE, and what is asked of it: ``rows`` texts at a time, each of so many tokens read, then written."""

    hidden: int = 512
    layers: int = 8
    moe_experts: int = 32
    width: int = 256
    per_token: int = 2
    vocabulary: int = 2048
    zipf: float = 1.0
    rows: int = 4
    prompt: int = 64
    output: int = 64
    precision: Precision = Precision.FP32

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "qwen3_moe", "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden, "moe_intermediate_size": self.width,
            "num_hidden_layers": self.layers, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": self.hidden // 8, "max_position_embeddings": self.prompt + self.output, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "num_experts": self.moe_experts, "num_experts_per_tok": self.per_token,
            "norm_topk_prob": True, "tie_word_embeddings": True,
        }  # fmt: skip


LARGE = OffloadShape()
TINY = OffloadShape(hidden=64, layers=2, moe_experts=8, width=32, vocabulary=128, prompt=8, output=4)


@dataclass(frozen=True, slots=True)
class MoeOffloadTimes:
    """Tokens a second, prompts and answers together, medians of runs in turns.

    ``resident_per_s``: with all experts at hand; ``offloaded_per_s``: with ``places`` of them; ``unpredicted_per_s``:
    the same where nothing is loaded ahead. ``popular_share``: of all choices, those that go to a layer's more popular
    half. ``hit_rate``: of the offloaded runs; ``ahead_used_share``: of what was loaded ahead, what was needed then.
    ``waited_share``: of their time, in which nothing was there to run.
    """

    shape: OffloadShape
    moe_experts: int
    places: int
    block_bytes: int
    repeats: int
    resident_per_s: float
    offloaded_per_s: float
    unpredicted_per_s: float
    popular_share: float
    hit_rate: float
    ahead_used_share: float
    bytes_loaded: int
    waited_share: float
    largest_difference: float

    @property
    def ratio(self) -> float:
        return self.offloaded_per_s / self.resident_per_s

    @property
    def targets(self) -> tuple[Target, ...]:
        return (at_least("MoE with half its experts in memory, of resident throughput", self.ratio, TARGET_RATIO),)

    @property
    def remarks(self) -> tuple[str, ...]:
        shape = self.shape
        return (
            f"{shape.rows} texts at a time, {shape.prompt} tokens read and {shape.output} written, {shape.precision}; "
            f"{self.places} of {self.moe_experts} moe_experts of {self.block_bytes / 1e6:.2f} MB held, "
            f"{self.repeats} repeats",
            f"Zipf exponent {shape.zipf:g}: the popular half of each layer's has {self.popular_share:.0%} of the "
            f"choices; found in their places {self.hit_rate:.1%}, of those loaded ahead used "
            f"{self.ahead_used_share:.0%}, waited {self.waited_share:.0%} of the time",
            f"all at hand {self.resident_per_s:.0f} tokens/s, half {self.offloaded_per_s:.0f}, half and nothing loaded "
            f"ahead {self.unpredicted_per_s:.0f}; {self.bytes_loaded / 1e6:.0f} MB read a run",
        )


def measure_moe_offload(
    directory: Path, shape: OffloadShape = OffloadShape(), repeats: int = REPEATS
) -> MoeOffloadTimes:
    """Write a model into ``directory``, which the caller removes, pack it, and run it both ways.

    ValueError where the two say different things. Needs three times the model's bytes on the disk.
    """
    weights = directory / "model"
    write_skewed_model(weights, shape)
    segments = SegmentStore(directory / "packed")
    try:
        with torch.inference_mode():
            return _measure(segments, Expert(EXPERT, "llm", weights, (), None), shape, repeats)
    finally:
        segments.close()


def report(times: MoeOffloadTimes) -> str:
    machine = f"machine    {platform.machine()}, {software()}, {torch.get_num_threads()} threads"
    targets = (f"{one.what}: {one.found}, {one.wanted} - {one.remark}" for one in times.targets)
    return "\n".join((machine, *times.remarks, *targets))


def write_skewed_model(directory: Path, shape: OffloadShape, seed: int = 0) -> None:
    """A directory with a random model whose gates choose by Zipf's law, as far as noise lets them.

    The first channel is the same for all tokens, and no layer reads or changes it but gates: through it each adds the
    logarithm of its experts' shares; from the other channels it has noise.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [part for one in assemblies(parse_spec(shape.config, EXPERT)) for part in one.forms[0]]
    constant = math.sqrt(shape.hidden)
    tensors = {part.name: _skewed(part, shape, constant, generator) for part in parts}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config), "utf-8")
    save_file(tensors, directory / "model.safetensors")


def _skewed(part: Part, shape: OffloadShape, constant: float, generator: torch.Generator) -> Tensor:
    if part.name.endswith("norm.weight"):
        return torch.ones(part.shape)
    drawn = torch.randn(part.shape, generator=generator)
    if part.name.endswith("embed_tokens.weight"):
        drawn[:, 0] = constant
        return drawn
    if part.name.endswith("mlp.gate.weight"):
        shares = torch.arange(1, shape.moe_experts + 1, dtype=torch.float32).pow(-shape.zipf)
        order = torch.randperm(shape.moe_experts, generator=generator)
        seen = constant / math.sqrt(2.0)  # of the constant, under a norm: it is half of the squares
        gate = drawn * NOISE * math.sqrt(2.0 / shape.hidden)
        gate[:, 0] = shares[order].log() / seen
        return gate
    drawn = drawn / math.sqrt(part.shape[-1])
    if part.name.endswith(("o_proj.weight", "down_proj.weight")):
        drawn[0] = 0.0
    else:  # or what all tokens have in common would favour the same experts
        drawn[:, 0] = 0.0
    return drawn


def _measure(segments: SegmentStore, expert: Expert, shape: OffloadShape, repeats: int) -> MoeOffloadTimes:
    report = pack_line([expert], lambda _: {shape.precision}, segments)
    if report.failed:
        raise report.failed[expert.id]
    packed = report.packed[expert.id][shape.precision]
    total = moe_experts_of(packed)
    places = int(total * HELD_SHARE)
    copies = {RESIDENT: ExpertCopy(RESIDENT, expert, packed), OFFLOADED: ExpertCopy(OFFLOADED, expert, packed, places)}
    usage: dict[str, dict[MoeExpert, float]] = {}
    with _Bench(segments, copies, usage) as bench:
        bench.load(RESIDENT)
        with bench.store.using(RESIDENT) as slot:
            shares = _count_routing(_model(slot), _prompts(shape, seed=1, prompts=8))
        usage[OFFLOADED] = {one: min(share, 1.0) for one, share in shares.items()}
        bench.load(OFFLOADED)
        runs = [bench.round(shape, number) for number in range(repeats + 1)][1:]  # the first one warms up
    tokens = shape.rows * (shape.prompt + shape.output)
    difference = max(run.difference for run in runs)
    if shape.precision is Precision.FP32 and difference > TOLERANCE:
        raise ValueError(f"with half of its experts the model's logits differ by {difference:.2g}")
    resident_s, offloaded_s, unpredicted_s = (
        statistics.median(times) for times in zip(*(run.seconds for run in runs), strict=True)
    )
    before, after = runs[0].before, runs[-1].after
    needs = _needs(after) - _needs(before)
    ahead = after.cache.residency.ahead - before.cache.residency.ahead
    return MoeOffloadTimes(
        shape, total, places, copies[OFFLOADED].block_bytes, repeats,
        resident_per_s=tokens / resident_s,
        offloaded_per_s=tokens / offloaded_s,
        unpredicted_per_s=tokens / unpredicted_s,
        popular_share=_popular_share(shares, shape),
        hit_rate=(after.cache.residency.hits - before.cache.residency.hits) / max(needs, 1),
        ahead_used_share=(after.cache.residency.ahead_used - before.cache.residency.ahead_used) / max(ahead, 1),
        bytes_loaded=(after.bytes_loaded - before.bytes_loaded) // (2 * repeats),
        waited_share=(after.cache.waited_s - before.cache.waited_s)
        / sum(run.seconds[1] + run.seconds[2] for run in runs),
        largest_difference=difference,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: tuple[float, float, float]
    difference: float
    before: OffloadStatistics
    after: OffloadStatistics


class _Bench:
    """A memory of the agent's with both copies in it."""

    def __init__(
        self, segments: SegmentStore, copies: Mapping[str, ExpertCopy], usage: Mapping[str, Mapping[MoeExpert, float]]
    ) -> None:
        self._link, self._answers = PacedLink(None), SimpleQueue[Any]()
        memory = HostMemory()
        budget_bytes = sum(copy.footprint.total_bytes for copy in copies.values())
        self.store = SlotStore(
            memory, budget_bytes, ("cpu",), SkeletonShelf(segments), MoeLoads(segments, self._link, memory, usage)
        )
        self._transfers = Transfers(
            {HOST: self.store}, segments, copies, memory, self._answers.put, link=self._link,
            operator_threads=torch.get_num_threads(),
        )  # fmt: skip

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._transfers.stop()
        self.store.close()

    def load(self, copy: str) -> None:
        """Have it in memory. Raises ValueError where that fails."""
        self._transfers.start_load(StartLoad(0, EXPERT, copy, SSD, HOST, 0))
        answer = self._answers.get()
        if not isinstance(answer, Loaded):
            raise ValueError(f"{copy} could not be loaded: {answer}")

    def round(self, shape: OffloadShape, seed: int) -> _Run:
        """Runs the same texts three ways, in an order that changes."""
        before = self._statistics()
        texts = _prompts(shape, seed + 100)
        ways = {
            "resident": lambda: self._run(RESIDENT, shape, texts),
            "offloaded": lambda: self._run(OFFLOADED, shape, texts),
            "unpredicted": lambda: self._unpredicted(shape, texts),
        }
        names = list(ways)[seed % 3 :] + list(ways)[: seed % 3]
        found = {name: ways[name]() for name in names}
        said = {name: logits for name, (_, logits) in found.items()}
        difference = max(float((said[name] - said["resident"]).abs().max()) for name in ("offloaded", "unpredicted"))
        seconds = (found["resident"][0], found["offloaded"][0], found["unpredicted"][0])
        return _Run(seconds, difference, before, self._statistics())

    def _unpredicted(self, shape: OffloadShape, texts: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
        with self._link.demanded():  # as while the Engine waits for bytes
            return self._run(OFFLOADED, shape, texts)

    def _run(self, copy: str, shape: OffloadShape, texts: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
        """Seconds for reading all prompts and then going on by a token of each; what the last tokens said."""
        with self.store.using(copy) as slot:
            model = _model(slot)
            key_values = ModelKeyValues(model.spec, model.dtype)
            began = time.perf_counter()
            chunks = [Chunk(number, 0, text[: shape.prompt]) for number, text in enumerate(texts)]
            logits = model.forward(TokenBatch.of(chunks), key_values)
            for place in range(shape.prompt, shape.prompt + shape.output):
                chunks = [Chunk(number, place, [text[place]]) for number, text in enumerate(texts)]
                logits = model.forward(TokenBatch.of(chunks), key_values)
            return time.perf_counter() - began, logits.float()

    def _statistics(self) -> OffloadStatistics:
        with self.store.using(OFFLOADED) as slot:
            assert slot.moe is not None, "it was made to hold half"
            return slot.moe.statistics()


def _model(slot: Slot) -> Model:
    skeleton = slot.skeleton("cpu")
    assert isinstance(skeleton, RunsTexts), "it is a language model's"
    return skeleton.model


def _prompts(shape: OffloadShape, seed: int, prompts: int | None = None) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    size = (prompts or shape.rows, shape.prompt + shape.output)
    found: list[list[int]] = torch.randint(shape.vocabulary, size, generator=generator).tolist()
    return found


def _needs(statistics: OffloadStatistics) -> int:
    residency = statistics.cache.residency
    return residency.hits + residency.late + residency.misses


def _popular_share(shares: Mapping[MoeExpert, float], shape: OffloadShape) -> float:
    """Share of choices that go to the more popular half of each layer's experts."""
    half = 0.0
    for layer in range(shape.layers):
        found = sorted((share for one, share in shares.items() if one.layer == layer), reverse=True)
        half += sum(found[: len(found) // 2])
    return half / sum(shares.values())


def _count_routing(model: Model, prompts: Sequence[Sequence[int]]) -> dict[MoeExpert, float]:
    """Share of the prompts' tokens that go to each moe_expert, counted where the model reads them."""
    tokens = sum(len(prompt) for prompt in prompts)
    counts = {
        number: torch.zeros(layer.moe.moe_experts, dtype=torch.int64)
        for number, layer in enumerate(model.spec.layers)
        if layer.moe is not None
    }
    counting = model.running_through(lambda layer, moe_experts: _Counting(moe_experts, counts[layer]))
    key_values = ModelKeyValues(model.spec, model.dtype)
    for number, prompt in enumerate(prompts):
        counting.hidden(TokenBatch.of([Chunk(number, 0, prompt)]), key_values)
        key_values.release(number)
    return {
        MoeExpert(layer, number): count / tokens
        for layer, found in counts.items()
        for number, count in enumerate(found.tolist())
    }


class _Counting:
    def __init__(self, moe_experts: MlpWeights | MoeExperts, counts: Tensor) -> None:
        self._moe_experts = moe_experts
        self._counts = counts

    def run(self, tokens: Tensor, table: MappingTable) -> Tensor:
        self._counts += torch.bincount(table.moe_expert, minlength=len(self._counts)).cpu()
        return run_moe_experts(tokens, table, self._moe_experts)
