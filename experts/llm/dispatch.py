"""Dispatch of tokens to moe_experts and back: gate, layout transform, expert networks, combination.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 5.4, which replaces one-hot masks and their sparse einsums by a dense
token-to-expert table. Guarantees: dropless, as a moe_expert has no capacity: a token's moe_experts do not depend on its
neighbours. Deterministic: a stable counting sort keeps each moe_expert's tokens in order, and results are written to
separate places, then summed over a token's choices in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.functional import gelu, grouped_mm

from experts.llm.files.config import Mlp
from experts.llm.kernels.device_products import grouped_product, takes_grouped_product
from experts.llm.low_rank import added
from experts.llm.quant import DEVICE_BLOCK_BYTES, gated, project

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from experts.llm.files.config import MoeSpec
    from experts.llm.low_rank import AdaptedRows
    from experts.llm.quant import Matrix, RootMeanSquare

# Measured with torch 2.15, 2 threads, fp32, ms for pairs in a loop / padded / grouped_mm, weights cold:
#                             32 pairs          64 pairs          96 pairs          128 pairs         256 pairs
# 32 experts, 512, width 256  2.7  5.6  4.9     4.3  5.8  7.3     5.2  5.9  7.9     7.2  6.0  8.2    11.6  7.4 10.6
# 16 experts, 256, width 128  1.0  1.0  1.2     1.4  1.0  1.7     1.1  0.9  1.1     2.3  1.3  1.2     1.9  1.4  1.5
LOOPED_PAIRS_AN_EXPERT = 3  # below, not all experts have tokens, and a loop over those that have costs least
PADDED_ROWS_A_PAIR = 3  # beyond, more is spent on padding than padding saves
GROUPED_ALIGNMENT_BYTES = 16  # required by grouped_mm of addresses and strides
GROUPED_CAPABILITY = (8, 0)  # of a CUDA device whose grouped_mm reads its offsets on the device

capability_of = cache(torch.cuda.get_device_capability)  # asked twice in each layer
Way: TypeAlias = "Callable[[Tensor, MappingTable, MlpWeights], Tensor]"
MoeExperts: TypeAlias = "Callable[[Tensor, MappingTable], Tensor]"  # of one layer, which a cache runs


@dataclass(frozen=True, slots=True)
class MappingTable:
    """Pairs of a token and one of its experts; pair ``token * per_token + n`` is a token's n-th choice."""

    order: Tensor  # the pairs sorted by expert, then token, int64
    source: Tensor  # their tokens
    moe_expert: Tensor  # their experts
    ends: Tensor  # cumulative, where each expert's pairs end, int32
    weight: Tensor  # (tokens, per_token) fp32


def route(logits: Tensor, spec: MoeSpec) -> MappingTable:
    """Softmax of (tokens, experts) in fp32, then top ``per_token``; Mixtral's, and by ``norm_topk_prob``, sum to 1."""
    weight, chosen = logits.float().softmax(dim=-1).topk(spec.per_token, dim=-1)
    if spec.is_normalised:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    return mapping_table(chosen, weight, spec.moe_experts)


def mapping_table(chosen: Tensor, weight: Tensor, moe_experts: int) -> MappingTable:
    """The table of tokens that chose these experts, both (tokens, per_token)."""
    # keys of a byte or two make torch's stable sort a counting sort
    keys = chosen.reshape(-1).to(torch.uint8 if moe_experts <= 256 else torch.int16)
    moe_expert, order = torch.sort(keys, stable=True)
    numbers = torch.arange(moe_experts, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(moe_expert, numbers, right=True, out_int32=True)
    return MappingTable(order, order // chosen.shape[1], moe_expert.to(torch.int64), ends, weight)


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A feed-forward network, or several with the experts as first dimension."""

    kind: Mlp
    up: Matrix  # (width, hidden); if gated (2 * width, hidden), the gate's rows first
    down: Matrix  # (hidden, width)
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    adapters: tuple[AdaptedRows, ...] = ()  # of one pass
    name: str = ""  # by which they know the network

    def of(self, moe_expert: int | Tensor) -> MlpWeights:
        """One network, or with a tensor of numbers a copy of several."""
        up_bias = None if self.up_bias is None else self.up_bias[moe_expert]
        down_bias = None if self.down_bias is None else self.down_bias[moe_expert]
        return MlpWeights(self.kind, self.up[moe_expert], self.down[moe_expert], up_bias, down_bias)


def plain(matrices: Matrix) -> Tensor:
    assert isinstance(matrices, torch.Tensor), "quantised experts are run one by one"
    return matrices


def run_mlp(tokens: Tensor, weights: MlpWeights, norm: RootMeanSquare | None = None) -> Tensor:
    """(tokens, hidden) through one network. ``norm``: of the tokens before."""
    adapters, is_gated = weights.adapters, weights.kind is Mlp.SWIGLU
    raised = project(tokens, weights.up, weights.up_bias, norm=norm)
    raised = added(raised, tokens, adapters, f"{weights.name}.up", norm.applied if norm else None)
    rows = raised if is_gated else activate(raised, weights.kind)
    lowered = project(rows, weights.down, weights.down_bias, is_gated=is_gated)
    return added(lowered, rows, adapters, f"{weights.name}.down", gated if is_gated else None)


def activate(raised: Tensor, kind: Mlp) -> Tensor:
    """Activation between a network's two matrices."""
    if kind is Mlp.SWIGLU:
        return gated(raised)
    if kind is Mlp.GEGLU_TANH:
        gate, up = raised.chunk(2, dim=-1)
        return gelu(gate, approximate="tanh") * up
    return gelu(raised, approximate="tanh" if kind is Mlp.GELU_TANH else "none")


def run_moe_experts(tokens: Tensor, table: MappingTable, weights: MlpWeights | MoeExperts) -> Tensor:
    """(tokens, hidden) through the experts that the table names, weighed and summed."""
    if not isinstance(weights, MlpWeights):
        return weights(tokens, table)
    scattered = scatter(tokens, table)
    run = way_of_running(scattered, table, weights)
    return combine(run(scattered, table, weights), table, tokens.dtype)


def scatter(tokens: Tensor, table: MappingTable) -> Tensor:
    """The layout transform: one row for each pair, in the table's order."""
    return tokens.index_select(0, table.source)


def combine(computed: Tensor, table: MappingTable, dtype: torch.dtype) -> Tensor:
    """The transform back: each pair's row to its token's choice, then their weighted sum in fp32."""
    tokens, per_token = table.weight.shape
    placed = torch.empty_like(computed)
    placed[table.order] = computed
    choices = placed.view(tokens, per_token, computed.shape[-1]).float()
    return (choices * table.weight.unsqueeze(-1)).sum(dim=1).to(dtype)


def way_of_running(scattered: Tensor, table: MappingTable, weights: MlpWeights) -> Way:
    """Choose by the number of pairs and how evenly they are spread.

    Few pairs, and quantised experts, go through a loop. Padded experts are one multiplication, whose threads meet once:
    four times faster beside other work on the same cores (1024 tokens, 128 experts, 256 wide). On a device the choice
    depends on shapes alone, as the host does not know the spread.
    """
    if scattered.device.type != "cpu":
        is_grouped = all(_is_grouped_there(matrices, scattered) for matrices in (weights.up, weights.down))
        return run_grouped if is_grouped else run_tiled
    is_looped = len(scattered) < LOOPED_PAIRS_AN_EXPERT * len(table.ends)
    if is_looped or not (isinstance(weights.up, torch.Tensor) and isinstance(weights.down, torch.Tensor)):
        return run_each
    padded_rows = len(table.ends) * int(_counts(table).max())
    if padded_rows <= PADDED_ROWS_A_PAIR * len(scattered):
        return run_padded
    is_aligned = all(_is_aligned(matrix) for matrix in (scattered, weights.up, weights.down))
    return run_grouped if is_aligned else run_each


def _counts(table: MappingTable) -> Tensor:
    ends = table.ends.to(torch.int64)
    return ends.diff(prepend=ends.new_zeros(1))


def _is_aligned(matrix: Tensor) -> bool:
    row_bytes: int = matrix.shape[-1] * matrix.element_size()
    address: int = matrix.data_ptr()
    return row_bytes % GROUPED_ALIGNMENT_BYTES == 0 and address % GROUPED_ALIGNMENT_BYTES == 0


def _is_grouped_there(matrices: Matrix, rows: Tensor) -> bool:
    """True if the rows' device has a grouped product of these that reads the ends there.

    Torch's does in bf16 from sm_80 on. For other number formats and older devices it would copy the ends to the host.
    """
    if not isinstance(matrices, torch.Tensor):
        return takes_grouped_product(rows, matrices)
    if rows.device.type != "cuda" or rows.dtype is not torch.bfloat16:
        return False
    # an arena's own address is aligned
    offsets = (matrices.shape[-1], matrices.stride(0), matrices.storage_offset())
    is_aligned = all(offset * matrices.element_size() % GROUPED_ALIGNMENT_BYTES == 0 for offset in offsets)
    return is_aligned and capability_of(rows.device) >= GROUPED_CAPABILITY


def run_each(scattered: Tensor, table: MappingTable, weights: MlpWeights) -> Tensor:
    """Run each expert that has tokens, one after the other."""
    computed = torch.empty_like(scattered)
    start = 0
    for moe_expert, end in enumerate(table.ends.tolist()):
        if end > start:
            computed[start:end] = run_mlp(scattered[start:end], weights.of(moe_expert))
        start = end
    return computed


def run_grouped(scattered: Tensor, table: MappingTable, weights: MlpWeights) -> Tensor:
    """Run all moe_experts in one grouped multiplication for each matrix."""
    raised = _grouped(scattered, weights.up, table.ends)
    if weights.up_bias is not None:
        raised += weights.up_bias[table.moe_expert]
    computed = _grouped(activate(raised, weights.kind), weights.down, table.ends)
    if weights.down_bias is not None:
        computed += weights.down_bias[table.moe_expert]
    return computed


def _grouped(rows: Tensor, matrices: Matrix, ends: Tensor) -> Tensor:
    if isinstance(matrices, torch.Tensor):
        return grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    return grouped_product(rows, matrices, ends)


def run_padded(scattered: Tensor, table: MappingTable, weights: MlpWeights) -> Tensor:
    """Run all moe_experts in one batched multiplication for each matrix, padded to the rows of the fullest."""
    counts = _counts(table)
    moe_experts, rows = len(counts), int(counts.max())
    begins = table.ends.to(torch.int64) - counts
    places = torch.arange(len(scattered), device=scattered.device) - begins[table.moe_expert]
    places = places + table.moe_expert * rows
    padded = scattered.new_zeros((moe_experts * rows, scattered.shape[1])).index_copy_(0, places, scattered)
    raised = _batched(padded.view(moe_experts, rows, scattered.shape[1]), plain(weights.up), weights.up_bias)
    computed = _batched(activate(raised, weights.kind), plain(weights.down), weights.down_bias)
    return computed.flatten(0, 1).index_select(0, places)


def _batched(rows: Tensor, matrices: Matrix, biases: Tensor | None) -> Tensor:
    if not isinstance(matrices, torch.Tensor):
        product = matrices.stacked_product(rows)
        return product if biases is None else product.add_(biases.unsqueeze(1))
    if biases is None:
        return torch.bmm(rows, matrices.transpose(1, 2))
    return torch.baddbmm(biases.unsqueeze(1), rows, matrices.transpose(1, 2))


def run_tiled(scattered: Tensor, table: MappingTable, weights: MlpWeights) -> Tensor:
    """Run all moe_experts by batched products of tiles, for devices: the host knows all shapes beforehand.

    A tile is some rows of one moe_expert. A copy of its moe_expert's matrices, of quantised ones as numbers, is made
    for each, ``DEVICE_BLOCK_BYTES`` at a time.
    """
    pairs, moe_experts, device = len(scattered), len(table.ends), scattered.device
    rows = max(-(-pairs // moe_experts), 1)
    tiles = (pairs + (rows - 1) * min(pairs, moe_experts)) // rows  # at most: each moe_expert ends with a part of one
    counts = _counts(table)
    own_tiles = (counts + rows - 1) // rows
    tile_ends = own_tiles.cumsum(dim=0)
    shifts = (tile_ends - own_tiles) * rows - (table.ends - counts)
    places = torch.arange(pairs, device=device) + shifts[table.moe_expert]
    padded = scattered.new_zeros((tiles * rows, scattered.shape[1])).index_copy_(0, places, scattered)
    owners = torch.searchsorted(tile_ends, torch.arange(tiles, device=device), right=True).clamp_(max=moe_experts - 1)
    computed, padded = torch.empty_like(padded), padded.view(tiles, rows, scattered.shape[1])
    numbers = weights.up.shape[1:].numel() + weights.down.shape[1:].numel()
    step = max(DEVICE_BLOCK_BYTES // (numbers * scattered.element_size()), 1)
    for start in range(0, tiles, step):
        own = weights.of(owners[start : start + step])
        raised = activate(_batched(padded[start : start + step], own.up, own.up_bias), own.kind)
        lowered = _batched(raised, own.down, own.down_bias).flatten(0, 1)
        computed[start * rows : start * rows + len(lowered)] = lowered
    return computed.index_select(0, places)
