"""Keys and values of the tokens so far, kept between iterations.

``KeyValues`` is the seam to scheduling: the model asks once an iteration for room for its tokens, then appends and
reads layer by layer. ``experts.llm.serving.extents`` keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.llm.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys and values of one layer, each (sequences, kv heads, positions, head size); for one row without the first."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """Places of some decode rows in the tensors of ``decode``, the same for every layer."""

    mask: Tensor | None  # (sequences, 1, 1, positions), true where a sequence has a token; None: everywhere
    places: Tensor | None  # at which sequence each row stands; None: row i is sequence i, and there are no others
    rows: slice | Tensor = field(default_factory=lambda: slice(None))  # of the decode rows, counted from the first


class BatchKeyValues(Protocol):
    """The keys and values that one batch writes and reads."""

    @property
    def decode_layouts(self) -> Sequence[DecodeLayout]:
        """Division of the decode rows: each row is in one layout, and each layout is one call of attention."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep those of the batch's tokens, (tokens, kv heads, head size), in its order."""

    def prefill(self, layer: int, row: int) -> Stored:
        """A prefill row's sequence up to the row's end: (kv heads, positions, head size)."""

    def decode(self, layer: int, number: int) -> Stored:
        """The sequences of some decode rows, as this one of the ``decode_layouts`` describes."""


class KeyValues(Protocol):
    """Keys and values of all sequences of one model."""

    def reserve(self, batch: TokenBatch) -> BatchKeyValues:
        """Room for a batch. A row before its sequence's end cuts it there; ValueError for one beyond its end."""


def mask_of(lengths: Sequence[int]) -> Tensor | None:
    """Mask of the positions that sequences of these lengths have, for DecodeLayout."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    there = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return there[:, None, None, :]
