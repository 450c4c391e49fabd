"""One decoding step of DeepSpeed-MoE's models on a simulated mesh of A100 GPUs: bytes, arithmetic, messages, launches.

``OPTIMISED`` works as ``experts.llm.parallel``: it reads only moe_experts that have tokens, sends counts before rows,
and takes the cheapest exchange. ``BASELINE`` is PyTorch as DeepSpeed-MoE describes it (arXiv 2201.05596, sections 5.3
and 5.4): one-hot gating and einsums, rows padded to each moe_expert's capacity, and a flat all-to-all that ignores
tensor-slicing. Guarantees: seeded; a layer takes as long as its slowest GPU; nothing overlaps. No KV cache is read, for
the paper states no context length.

Models: Table 6 of sections 3.1, 4 and 5.5, and their PR-MoE and Mixture-of-Students forms. Every second layer has
moe_experts, one a token. An attention has 4 h^2 parameters, a feed-forward network and a moe_expert 8 h^2. Table 6
states 30 layers for 8B and 40 for 24B. Its sizes fit the opposite: 349.2 of 349.0 billion with 40 layers, and 1,047 of
1,064.9 billion with 30 (as printed: 262 and 1,396). The sizes are followed here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from experts.llm.parallel.costs import (
    ExchangeForm,
    LinkCosts,
    MeshCosts,
    cheapest,
    exchange_seconds,
    tensor_gather,
)
from experts.llm.parallel.shape import MeshShape, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from experts.llm.parallel.shape import MoePiece

VOCABULARY = 51_200  # GPT-2's 50,257 (the GPT architecture, section 3.1), padded as Megatron-LM pads it
WEIGHT_BYTES = 2  # fp16
NODE_GPUS = 8  # Azure ND A100 v4 (learn.microsoft.com, "ND A100 v4-series"), as in section 3.2
STANDARD, PR_MOE, STUDENT = "MoE", "PR-MoE", "PR-MoE+MoS"
# NVIDIA's A100 datasheet, 40 GB SXM: 1,555 GB/s, of which kernels read 0.88 (forums.developer.nvidia.com/t/339083), and
# 312 TFLOPS in fp16 without sparsity.
READ_BYTES_PER_S, FLOPS = 0.88 * 1555e9, 312e12
MEMORY_BYTES = 42_405_855_232  # that CUDA reports of it (PC2 Paderborn, "NVIDIA A100 40GB with NVLINK")
RESERVED_BYTES = 2**31  # assumed: CUDA's context, workspace, KV cache
LAUNCH_S = 5e-6  # a short kernel's launch: 4 to 6 us (susun-blog.com, "From Launch Overhead to CUDA Graph")
# NCCL's model of its own latencies (src/graph/tuning.cc, 2.16, ring, LL): 0.6 us a step over NVLink, 2.7 us over the
# network, 6.6 us a collective. NVLink: 600 GB/s, half in each direction (A100 datasheet). HDR InfiniBand: 200 Gb/s for
# each GPU (learn.microsoft.com, "ND A100 v4-series").
COSTS = MeshCosts(inside=LinkCosts(0.6e-6, 1 / 300e9), between=LinkCosts(2.7e-6, 1 / 25e9), call_s=6.6e-6)
LEAST_CAPACITY = 4  # min_capacity of deepspeed.moe.layer.MoE, whose capacity factor is 1
COUNT_BYTES = 8
GPU_TOKENS = 8  # sequences for each GPU: assumed, the paper states no batch


@dataclass(frozen=True, slots=True)
class MixtureModel:
    """``moe_experts``: number in each MoE layer. ``tensor``: MP degree of Table 6."""

    name: str
    layers: int
    hidden: int
    tensor: int
    moe_experts: tuple[int, ...]
    form: str = STANDARD

    @property
    def networks(self) -> int:
        """Feed-forward networks that every token passes: in PR-MoE also beside moe_experts."""
        return self.layers - (len(self.moe_experts) if self.form == STANDARD else 0)

    @property
    def shared_parameters(self) -> int:
        """Everything but moe_experts."""
        return (4 * self.layers + 8 * self.networks) * self.hidden**2 + VOCABULARY * self.hidden

    @property
    def parameters(self) -> int:
        return self.shared_parameters + sum(self.moe_experts) * 8 * self.hidden**2

    def mesh(self, gpus: int) -> MeshShape:
        """Tensor-slicing by the model's degree, moe_experts over all GPUs."""
        return MeshShape(expert=gpus // self.tensor, tensor=self.tensor, node_ranks=min(gpus, NODE_GPUS))

    def pieces(self, gpus: int, moe_experts: int) -> tuple[MoePiece, ...]:
        return pieces_of(self.mesh(gpus), moe_experts, 4 * self.hidden)

    def piece_parameters(self, piece: MoePiece) -> int:
        return 2 * self.hidden * (piece.end - piece.begin)

    def gpu_bytes(self, gpus: int) -> float:
        """Weights of the GPU that holds most."""
        held = Counter[int]()
        for moe_experts, layers in Counter(self.moe_experts).items():
            for piece in self.pieces(gpus, moe_experts):
                held[piece.rank] += layers * self.piece_parameters(piece)
        return WEIGHT_BYTES * (self.shared_parameters / self.tensor + max(held.values()))


def _standard(name: str, layers: int, hidden: int, tensor: int) -> MixtureModel:
    return MixtureModel(name, layers, hidden, tensor, (128,) * (layers // 2))


TABLE_6 = (
    _standard("1.3B+MoE-128", 24, 2048, 1),
    _standard("2.4B+MoE-128", 16, 3584, 1),
    _standard("8B+MoE-128", 40, 4096, 4),
    _standard("24B+MoE-128", 30, 8192, 8),
    _standard("47B+MoE-128", 58, 8192, 8),
)


def forms_of(model: MixtureModel) -> tuple[MixtureModel, MixtureModel, MixtureModel]:
    """The model, its PR-MoE and its student, at the proportions of the 1.3B base (sections 4.1 and 4.2).

    PR-MoE: 64 moe_experts a layer, 128 in the last sixth of the MoE layers. The student has 7/8 of the layers.
    """
    return model, _pyramid(model, PR_MOE, model.layers), _pyramid(model, STUDENT, model.layers * 7 // 8)


def _pyramid(model: MixtureModel, form: str, layers: int) -> MixtureModel:
    wide = round(len(model.moe_experts) / 6)
    return replace(model, form=form, layers=layers, moe_experts=(64,) * (layers // 2 - wide) + (128,) * wide)


@dataclass(frozen=True, slots=True)
class MoeSystem:
    """Numbers of kernels, and seconds of a launch."""

    name: str
    attention: int
    network: int  # of a feed-forward network, or of a moe_expert
    gating: int  # of a layer's gating and layouts
    launch_s: float
    is_padded: bool = False


# Kernels of DeepSpeed Inference (arXiv 2207.00032, section III): fused regions. Gating is one kernel, and each layout
# transformation is another (section 5.4).
OPTIMISED = MoeSystem("optimised", attention=3, network=2, gating=3, launch_s=LAUNCH_S)
# Operators in eager PyTorch: of top1gating and MOELayer.forward (deepspeed/moe/sharded_moe.py, counted), of the rest
# (assumed). A launch's time is fitted: ``figures.fitted_baseline``.
BASELINE = MoeSystem("baseline", attention=15, network=5, gating=38, launch_s=0.0, is_padded=True)


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """One step, and parts of its latency. ``exchange``: form of its last all-to-all."""

    model: str
    form: str
    system: str
    gpus: int
    exchange: ExchangeForm
    gpu_bytes: float
    compute_s: float  # weights and arithmetic
    messages_s: float  # exchanges of rows, and sums of tensor-slicing
    launches: int
    launches_s: float
    latency_s: float
    gpu_tokens_per_s: float


def decode(
    model: MixtureModel,
    gpus: int,
    system: MoeSystem,
    gpu_tokens: int = GPU_TOKENS,
    costs: MeshCosts = COSTS,
    seed: int = 0,
) -> DecodingStep:
    """Every GPU brings ``gpu_tokens`` sequences; each token's moe_expert is drawn evenly."""
    drawn = random.Random(seed)
    tokens = gpu_tokens * model.tensor  # of a tensor group
    sliced = model.shared_parameters / model.tensor
    compute_s = roofline_s(WEIGHT_BYTES * sliced, 2 * sliced * tokens)
    launches = model.layers * system.attention + model.networks * system.network
    total_s = costs.call_s + costs.seconds(tensor_gather(model.mesh(gpus), tokens * model.hidden * WEIGHT_BYTES))
    totals = model.layers + (model.networks if system.is_padded else model.layers)
    exchange, messages_s = ExchangeForm.LOCAL, totals * total_s if model.tensor > 1 else 0.0
    for moe_experts in model.moe_experts:
        if system.is_padded:  # the GPUs of a tensor group send the same tokens
            rows = [gpus * capacity(moe_experts, tokens)] * moe_experts
        else:
            counts = Counter(drawn.choices(range(moe_experts), k=gpus * gpu_tokens))
            rows = [counts[number] for number in range(moe_experts)]
        seconds, computing = _moe_experts(model, gpus, rows)
        compute_s += seconds + layout_s(moe_experts, model.hidden, tokens, system)
        launches += computing * system.network + system.gating
        exchange, seconds = _exchange(model, gpus, moe_experts, tokens, system.is_padded, costs)
        messages_s += seconds
    launches_s = launches * system.launch_s
    latency_s = compute_s + messages_s + launches_s
    parts = (model.gpu_bytes(gpus), compute_s, messages_s, launches, launches_s, latency_s)
    return DecodingStep(model.name, model.form, system.name, gpus, exchange, *parts, gpu_tokens / latency_s)


def fits(model: MixtureModel, gpus: int) -> bool:
    return gpus >= model.tensor and model.gpu_bytes(gpus) <= MEMORY_BYTES - RESERVED_BYTES


def roofline_s(moved_bytes: float, operations: float) -> float:
    return max(moved_bytes / READ_BYTES_PER_S, operations / FLOPS)


def layout_s(moe_experts: int, hidden: int, tokens: int, system: MoeSystem) -> float:
    """Rows laid out by moe_expert, and back: einsums of S*E*M*c operations, or copies of S*M values (section 5.4)."""
    if not system.is_padded:
        return 2 * roofline_s(2 * tokens * hidden * WEIGHT_BYTES, 0)
    slots = moe_experts * capacity(moe_experts, tokens)
    moved = slots * hidden + tokens * (slots + hidden)
    return 2 * roofline_s(moved * WEIGHT_BYTES, 2 * tokens * slots * hidden)


def capacity(moe_experts: int, tokens: int) -> int:
    return max(ceil(tokens / moe_experts), LEAST_CAPACITY)


def _moe_experts(model: MixtureModel, gpus: int, rows: Sequence[int]) -> tuple[float, int]:
    """Seconds of the slowest GPU, and most pieces with rows on one."""
    seconds, computing = defaultdict[int, float](float), Counter[int]()
    for piece in model.pieces(gpus, len(rows)):
        if count := rows[piece.moe_expert]:
            parameters = model.piece_parameters(piece)
            seconds[piece.rank] += roofline_s(WEIGHT_BYTES * parameters, 2 * parameters * count)
            computing[piece.rank] += 1
    return max(seconds.values()), max(computing.values())


def _exchange(
    model: MixtureModel, gpus: int, moe_experts: int, tokens: int, is_padded: bool, costs: MeshCosts
) -> tuple[ExchangeForm, float]:
    """Form, and seconds of rows there and back. A moe_expert cut over GPUs gets its rows on each of them."""
    shape, row_bytes = model.mesh(gpus), model.hidden * WEIGHT_BYTES
    if is_padded:
        slots = shape.tensor * moe_experts * capacity(moe_experts, tokens)
        return ExchangeForm.FLAT, exchange_seconds(shape, ExchangeForm.FLAT, costs, slots * row_bytes)
    pieces = len(model.pieces(gpus, moe_experts))
    pair_bytes = tokens * pieces / moe_experts * row_bytes
    form = cheapest(shape, costs, pair_bytes)
    counts_s = exchange_seconds(shape, form, costs, shape.tensor * pieces * COUNT_BYTES) / 2  # they go one way
    return form, counts_s + exchange_seconds(shape, form, costs, pair_bytes)
