"""Low-rank deltas of adapters (LoRA, arXiv 2106.09685), added to the rows of a product that are theirs.

A matrix of ours joins several of a checkpoint: queries', keys' and values', or gate and up. So a delta belongs to a
slice of the matrix's outputs. Guarantee: rows of other adapters, and of none, are not written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

DOWN, UP = ".lora_a.", ".lora_b."  # in a tensor's name, between its matrix and the first output of its slice


@dataclass(frozen=True, slots=True)
class LowRank:
    """Delta of the outputs from ``start`` on. ``down``: (rank, in); ``up``: (outputs, rank), scaled."""

    start: int
    down: Tensor
    up: Tensor


Rowwise: TypeAlias = "Callable[[Tensor], Tensor]"
Adapter: TypeAlias = Mapping[str, tuple[LowRank, ...]]  # by the matrix's name


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows of a product, and their adapter. ``rows``: None for all."""

    rows: Tensor | None
    adapter: Adapter


def adapter_of(tensors: Mapping[str, Tensor]) -> Adapter:
    """The adapter among a model's tensors; empty without one."""
    found: defaultdict[str, tuple[LowRank, ...]] = defaultdict(tuple)
    for name in tensors:
        matrix, is_down, start = name.partition(DOWN)
        if is_down:
            found[matrix] += (LowRank(int(start), tensors[name], tensors[f"{matrix}{UP}{start}"]),)
    return dict(found)


def added(
    product: Tensor, rows: Tensor, adapters: Sequence[AdaptedRows], matrix: str, before: Rowwise | None = None
) -> Tensor:
    """``product`` of ``rows`` and a matrix, (rows, out), with the adapters' deltas, in its own memory.

    ``before``: what the product did to each row before.
    """
    for adapted in adapters:
        parts, own = adapted.adapter.get(matrix, ()), rows
        if parts and adapted.rows is not None:
            own = own[adapted.rows]
        if parts and before is not None:
            own = before(own)
        for part in parts:
            outputs = product[:, part.start : part.start + len(part.up)]
            if adapted.rows is None:
                outputs.addmm_(linear(own, part.down), part.up.t())
            else:
                outputs.index_add_(0, adapted.rows, linear(linear(own, part.down), part.up))
    return product
